"""A plan made real: cells in a llama.cpp context, one `llama_decode`, rows of logits.

Owns: the llama context and the batch. Thread: step thread only, after `create`.
Called by: `loop.py`, and for the cells of a slot `slots.py`.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from llm_engine import llama
from llm_engine.config import EngineConfig
from llm_engine.errors import BackendError, ModelError
from llm_engine.hostcache import KvState
from llm_engine.model import Model
from llm_engine.pages import Spare, state_buffer
from llm_engine.plan import Plan
from llm_engine.prefix import Trim
from llm_engine.slots import Cells, KvCost


class Backend(Cells, Protocol):
    """What computes plans, and holds the cells."""

    def run(self, plan: Plan) -> llama.Logits:
        """Compute a plan.

        Shapes: (slices that sample, vocabulary) float32, valid until the next run.
        Raises: BackendError; the cells of the plan's sequences are then to be dropped.
        """

    def close(self) -> None:
        """Free the context."""


class LlamaBackend:
    """llama.cpp."""

    def __init__(
        self, model: Model, context: llama.ContextPointer, params: llama.ContextParams, fingerprint: str
    ) -> None:
        self.trim = _trim(model)
        self.cost = KvCost(0, 0)  # measured once a token has been computed
        self._context = context
        self._fingerprint = fingerprint
        self._n_seq_max = params.n_seq_max
        self._spare = Spare()
        self._copied = state_buffer(0)  # on the way from one slot to another
        self._batch = llama.Batch(params.n_batch, params.n_ctx // params.n_seq_max)
        self._logits = llama.LogitsViews(context, model.n_vocab)

    @classmethod
    def create(cls, model: Model, params: llama.ContextParams, fingerprint: str) -> Self:
        """Create the context and run two tokens through it, so that the weights are resident.

        `fingerprint` says which states fit: those of the same model in a context with the same settings.
        Raises: ModelError with llama.cpp's reason, if memory or these settings do not allow it.
        """
        with llama.collected_errors() as errors:
            context = llama.init_context(model.pointer, params)
            if not context:
                reason = errors[-1] if errors else "no reason given"
                raise ModelError(str(model.path), f"no context of {params.n_ctx} tokens: {reason}")
        backend = cls(model, context, params, fingerprint)
        # In a thread that ends: OpenMP keeps a team for every thread that ever computed, and with a second
        # team alive the threads of a step no longer spin at their barriers but sleep, a tenth of its speed.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(backend._warm_up).result()
        return backend

    def run(self, plan: Plan) -> llama.Logits:
        self._batch.clear()
        for part in plan.slices:
            sequence = part.sequence
            if part.n_tokens == 1 and part.samples:
                self._batch.append_one(sequence.slot, sequence.n_computed, sequence.tokens[-1])
            else:
                tokens = sequence.pending(part.n_tokens)
                self._batch.append(sequence.slot, sequence.n_computed, tokens, wants_logits=part.samples)
        self._decode()
        return self._logits.of(len(plan.sampled))

    def n_state_bytes(self, slot: int, *, checkpoint: bool) -> int:
        return llama.n_state_bytes(self._context, self._seq_id(slot), partial=checkpoint)

    def fetch(self, slot: int, *, checkpoint: bool) -> KvState:
        buffer = self._buffer(self.n_state_bytes(slot, checkpoint=checkpoint))
        data = llama.get_state(self._context, self._seq_id(slot), buffer, partial=checkpoint)
        return KvState(data, checkpoint, self._fingerprint)

    def restore(self, slot: int, state: KvState) -> None:
        if state.fingerprint != self._fingerprint:
            raise BackendError("a state of another model, or of other settings of the context")
        llama.set_state(self._context, self._seq_id(slot), state.data, partial=state.is_checkpoint)

    def copy(self, source: int, target: int) -> None:
        """By way of host memory, which takes the cells in use.

        llama_memory_seq_cp takes the whole stream, used or not, and only when the next batch is computed:
        until then neither sequence's state may be read or written.
        """
        n_bytes = self.n_state_bytes(source, checkpoint=False)
        if n_bytes > self._copied.nbytes:
            self._copied = self._buffer(n_bytes)
        data = llama.get_state(self._context, self._seq_id(source), self._copied[:n_bytes], partial=False)
        llama.set_state(self._context, self._seq_id(target), data, partial=False)

    def cut(self, slot: int, n_tokens: int) -> None:
        if not llama.cut_cells(self._context, self._seq_id(slot), n_tokens):
            raise BackendError(f"slot {slot} cannot be cut to {n_tokens} tokens")

    def close(self) -> None:
        self._spare.close()
        llama.free_context(self._context)

    def _seq_id(self, slot: int) -> int:
        assert 0 <= slot < self._n_seq_max, f"slot {slot} not in 0..{self._n_seq_max - 1}"
        return slot

    def _buffer(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        try:
            return self._spare.take(n_bytes)
        except MemoryError as error:
            raise BackendError("no memory for the state of a sequence") from error

    def _decode(self) -> None:
        code = llama.decode(self._context, self._batch)
        if code != 0:
            raise BackendError(f"llama_decode returned {code} for {self._batch.n_tokens} tokens")
        llama.synchronize(self._context)

    def _warm_up(self) -> None:
        first, second = (self._n_bytes_after(position) for position in range(2))
        self.cost = KvCost(2 * first - second, second - first)
        self.cut(0, 0)

    def _n_bytes_after(self, position: int) -> int:
        """Compute one more token of a sequence, and return what its KV then takes."""
        self._batch.clear()
        self._batch.append(0, position, [0], wants_logits=True)
        self._decode()
        return self.n_state_bytes(0, checkpoint=False)


def _trim(model: Model) -> Trim:
    if llama.has_recurrent_state(model.pointer):
        return Trim.NOWHERE
    return Trim.IN_PLACE if llama.has_sliding_window(model.pointer) else Trim.ANYWHERE


def context_params(config: EngineConfig, n_ctx: int) -> llama.ContextParams:
    """The context of an engine whose slots hold `n_ctx` tokens each."""
    padded = -(-n_ctx // llama.CTX_PADDING) * llama.CTX_PADDING
    return llama.ContextParams(
        n_ctx=padded * config.n_slots,
        n_seq_max=config.n_slots,
        n_batch=config.batch_size,
        n_ubatch=config.batch_size,
        n_threads=config.n_threads,
        flash_attn=llama.FlashAttn[config.flash_attn.upper()],
        type_k=llama.CacheType[config.type_of_keys.upper()],
        type_v=llama.CacheType[config.cache_type_v.upper()],
    )
