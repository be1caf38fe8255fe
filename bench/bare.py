"""The least a program can do with llama.cpp: prefill each prompt, then decode all sequences together.

Nothing but `llama_decode` and an argmax over the rows of logits: no text, no stop strings, no events. This
is what the engine and the server are measured against.
"""

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Self

from llm_engine import gguf, llama
from llm_engine.backend import context_params
from llm_engine.config import EngineConfig
from llm_engine.model import Model, model_params


@dataclass(frozen=True, slots=True)
class BareRun:
    """What one run took. Units: tokens, seconds."""

    n_tokens: int
    prefill_s: float
    decode_s: float
    n_together: int  # tokens decoded while every sequence was running
    together_s: float

    @property
    def decode_rate(self) -> float:
        """Tokens per second while every sequence was running."""
        return self.n_together / self.together_s

    @property
    def total_rate(self) -> float:
        return self.n_tokens / (self.prefill_s + self.decode_s)


class BareLoop:
    """A model and a context of its own, with an engine's settings."""

    def __init__(self, config: EngineConfig) -> None:
        path = gguf.resolve(config.model, url=config.model_url).path
        self._model = Model.load(path, model_params(config))
        self._params = context_params(config, config.ctx_size)
        context = llama.init_context(self._model.pointer, self._params)
        if not context:
            raise RuntimeError(f"no context of {self._params.n_ctx} tokens for the bare loop")
        self._context = context
        self._logits = llama.LogitsViews(context, self._model.n_vocab)
        self._batch = llama.Batch(self._params.n_batch, self._params.n_ctx)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        llama.free_context(self._context)
        self._model.close()

    def tokenize(self, text: str) -> list[int]:
        """One user message as the engine would prepare it."""
        template = self._model.template
        assert template is not None, "the model has no chat template"
        return self._model.tokenize(template.render([{"role": "user", "content": text}], think=False))

    def run(self, prompts: Sequence[Sequence[int]], n_out: int) -> BareRun:
        """Generate up to `n_out` tokens for each prompt, all together; one that ends leaves the batch."""
        started = time.perf_counter()
        last = {seq_id: int(self.prefill(seq_id, prompt).argmax()) for seq_id, prompt in enumerate(prompts)}
        prefilled = time.perf_counter()
        n_tokens, n_together, together = len(last), 0, prefilled
        positions = [len(prompt) for prompt in prompts]
        for _ in range(n_out - 1):
            last = {s: t for s, t in last.items() if not self._model.is_end_of_generation(t)}
            if not last:
                break
            last = dict(zip(last, self.step(last, positions).argmax(axis=1).tolist(), strict=True))
            n_tokens += len(last)
            if len(last) == len(prompts):
                n_together, together = n_together + len(last), time.perf_counter()
        ended = time.perf_counter()
        for seq_id in range(len(prompts)):
            self.cut(seq_id, 0)
        return BareRun(
            n_tokens, prefilled - started, ended - prefilled, n_together, max(together - prefilled, 1e-9)
        )

    def prefill(self, seq_id: int, prompt: Sequence[int]) -> llama.Logits:
        """Compute a prompt. Shapes: (1, vocabulary), valid until the next call."""
        for start in range(0, len(prompt), self._params.n_batch):
            part = prompt[start : start + self._params.n_batch]
            self.compute(seq_id, start, part, wants_logits=start + len(part) == len(prompt))
        return self._logits.of(1)

    def compute(self, seq_id: int, start: int, tokens: Sequence[int], *, wants_logits: bool = False) -> None:
        """Compute tokens of a prompt, from `start` on, in a call of their own."""
        self._batch.clear()
        self._batch.append(seq_id, start, tokens, wants_logits=wants_logits)
        self._decode()

    def step(
        self, last: dict[int, int], positions: list[int], beside: tuple[int, int, Sequence[int]] | None = None
    ) -> llama.Logits:
        """Compute each sequence's last token, and move its position on.

        `beside` them tokens of a prompt: its sequence, where they start, and which they are.
        Shapes: (sequences, vocabulary), valid until the next call.
        """
        self._batch.clear()
        for seq_id, token in last.items():
            self._batch.append_one(seq_id, positions[seq_id], token)
            positions[seq_id] += 1
        if beside is not None:
            self._batch.append(*beside, wants_logits=False)
        self._decode()
        return self._logits.of(len(last))

    def cut(self, seq_id: int, n_tokens: int) -> None:
        """Keep the first tokens of a sequence. Raises: RuntimeError if its state cannot be cut there."""
        if not llama.cut_cells(self._context, seq_id, n_tokens):
            raise RuntimeError(f"the state of this model cannot be cut to {n_tokens} tokens")

    def _decode(self) -> None:
        code = llama.decode(self._context, self._batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}: are there more tokens than a context holds?")
        llama.synchronize(self._context)


class BareProcess:
    """A bare loop alone in its process: OpenMP teams of one process take each other's speed.

    Raises: on entry, what `BareLoop` does; BrokenProcessPool from then on, if its process is lost.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        # Not a Pool, which starts a process that fails or is killed anew, for ever.
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def __enter__(self) -> Self:
        try:
            self._pool.submit(_open, self._config).result()
        except BaseException:
            self._pool.shutdown()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._pool.shutdown()

    def run(self, prompts: Sequence[Sequence[int]], n_out: int) -> BareRun:
        """As `BareLoop.run`."""
        return self._pool.submit(_run, prompts, n_out).result()

    def tokenize(self, text: str) -> list[int]:
        """As `BareLoop.tokenize`."""
        return self._pool.submit(_tokenize, text).result()


_opened: list[BareLoop] = []  # of this process


def _open(config: EngineConfig) -> None:
    _opened.append(BareLoop(config))


def _run(prompts: Sequence[Sequence[int]], n_out: int) -> BareRun:
    return _opened[0].run(prompts, n_out)


def _tokenize(text: str) -> list[int]:
    return _opened[0].tokenize(text)
