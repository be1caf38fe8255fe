"""A plan made real: cells in a llama.cpp context, one `llama_decode` a step, rows of logits.

Owns: the llama context and the batch. Thread: step thread only, after `create`.
Called by: `loop.py`.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, Self

from llm_engine import llama
from llm_engine.config import EngineConfig
from llm_engine.errors import BackendError, ModelError
from llm_engine.model import Model
from llm_engine.scheduler import Plan


class Backend(Protocol):
    """What computes plans."""

    def run(self, plan: Plan) -> llama.Logits:
        """Compute a plan.

        Shapes: (slices that sample, vocabulary) float32, valid until the next run.
        Raises: BackendError; the cells of the plan's sequences are then to be dropped.
        """

    def drop(self, seq_id: int) -> None:
        """Forget what is cached for a slot."""

    def close(self) -> None:
        """Free the context."""


class LlamaBackend:
    """llama.cpp."""

    def __init__(self, model: Model, context: llama.ContextPointer, params: llama.ContextParams) -> None:
        self._context = context
        self._n_seq_max = params.n_seq_max
        self._batch = llama.Batch(params.n_batch, params.n_ctx)
        self._logits = llama.LogitsViews(context, model.n_vocab)

    @classmethod
    def create(cls, model: Model, params: llama.ContextParams) -> Self:
        """Create the context and run one token through it, so that the weights are resident.

        Raises: ModelError with llama.cpp's reason, if memory or these settings do not allow it.
        """
        with llama.collected_errors() as errors:
            context = llama.init_context(model.pointer, params)
            if not context:
                reason = errors[-1] if errors else "no reason given"
                raise ModelError(str(model.path), f"no context of {params.n_ctx} tokens: {reason}")
        backend = cls(model, context, params)
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

    def drop(self, seq_id: int) -> None:
        llama.drop_cells(self._context, seq_id, self._n_seq_max)

    def close(self) -> None:
        llama.free_context(self._context)

    def _decode(self) -> None:
        code = llama.decode(self._context, self._batch)
        if code != 0:
            raise BackendError(f"llama_decode returned {code} for {self._batch.n_tokens} tokens")
        llama.synchronize(self._context)

    def _warm_up(self) -> None:
        self._batch.append(0, 0, [0], wants_logits=True)
        self._decode()
        self.drop(0)


def context_params(config: EngineConfig, n_ctx: int) -> llama.ContextParams:
    """The context of an engine whose slots hold `n_ctx` tokens each."""
    padded = -(-n_ctx // llama.CTX_PADDING) * llama.CTX_PADDING
    return llama.ContextParams(
        n_ctx=padded * config.n_slots,
        n_seq_max=config.n_slots,
        n_batch=config.batch_size,
        n_ubatch=config.n_ubatch,
        n_threads=config.n_threads,
        flash_attn=llama.FlashAttn[config.flash_attn.upper()],
        type_k=llama.CacheType[config.cache_type_k.upper()],
        type_v=llama.CacheType[config.cache_type_v.upper()],
    )
