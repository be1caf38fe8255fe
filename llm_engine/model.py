"""A loaded model: its vocabulary, its chat template, its facts.

Owns: the llama_model pointer. Called by: `engine.py` (prepare, on any thread), `scheduler.py` (pieces, on
the step thread), `backend.py` (creates its context from it). Everything here is constant after loading but
the cache of token pieces, which only ever gains equal entries.
"""

import hashlib
import logging
import re
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Self

from llm_engine import llama
from llm_engine.chat import ChatTemplate
from llm_engine.config import EngineConfig
from llm_engine.errors import ModelError

logger = logging.getLogger(__name__)

_DIGEST_HEAD_BYTES = 16 << 20
_DIGEST_SAMPLES = 64
_DIGEST_SAMPLE_BYTES = 64 << 10
_ON_THE_CPU = llama.ModelParams()
_NOT_LOCKED = re.compile(r"failed to mlock .*?: (?P<reason>.*)")


class Model:
    """Weights and vocabulary."""

    def __init__(self, path: Path, pointer: llama.ModelPointer) -> None:
        self.path = path
        self.pointer = pointer
        self._vocab = llama.vocab(pointer)
        self.n_vocab = llama.n_vocab(self._vocab)
        self.n_params = llama.n_params(pointer)
        self.n_ctx_train = llama.n_ctx_train(pointer)
        self._eog = frozenset(t for t in range(self.n_vocab) if llama.is_end_of_generation(self._vocab, t))
        self._longest_token_bytes = llama.longest_token_bytes(self._vocab)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: Path, params: llama.ModelParams = _ON_THE_CPU) -> Self:
        """Load a GGUF.

        Raises: ModelError with the file and llama.cpp's own reason.
        """
        with llama.collected_log() as log:
            pointer = llama.load_model(path, params)
            if not pointer:
                raise ModelError(str(path), _reason(log.errors))
            if params.mlock and (refused := _NOT_LOCKED.search(log.text)):
                logger.warning("the weights may be swapped all the same: %s (ulimit -l)", refused["reason"])
        return cls(path, pointer)

    def close(self) -> None:
        llama.free_model(self.pointer)

    def piece(self, token: int) -> bytes:
        """The bytes of a token's text; none for a control token."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = llama.token_piece(self._vocab, token)
        return piece

    def is_end_of_generation(self, token: int) -> bool:
        return token in self._eog

    def tokenize(self, segments: tuple[str, ...]) -> list[int]:
        """Rendered template text to tokens. Thread: any.

        The segments are tokenised one by one, so that no control token forms across a border. The start
        token is added to the first unless the template wrote it already.
        """
        bos = self._bos_text
        tokens: list[int] = []
        for index, text in enumerate(segments):
            adds_start = index == 0 and not (bos and text.startswith(bos))
            tokens += llama.tokenize(self._vocab, text, add_special=adds_start, parse_special=True)
        return tokens

    def n_tokens_at_least(self, segments: tuple[str, ...]) -> int:
        """A bound that costs nothing: tokenising megabytes takes seconds."""
        return sum(len(text.encode()) for text in segments) // self._longest_token_bytes

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template in the GGUF; None if it has none."""
        source = llama.chat_template(self.pointer)
        if source is None:
            return None
        return ChatTemplate(
            source,
            bos=self._bos_text,
            eos=self._text_of(llama.eos_token(self._vocab)),
            control_spellings=self._control_spellings(),
        )

    @property
    def _bos_text(self) -> str:
        return self._text_of(llama.bos_token(self._vocab))

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else llama.token_text(self._vocab, token)

    def _control_spellings(self) -> frozenset[str]:
        """Texts that tokenise to something other than text."""
        controls = (t for t in range(self.n_vocab) if llama.token_attr(self._vocab, t))
        return frozenset(llama.token_text(self._vocab, t) for t in controls)


def fingerprint(parts: Sequence[Path], *settings: object) -> str:
    """A digest of a model's files, engine build and settings: equal means the same tokens come out of like
    processors.

    Each file's head (header, vocabulary, template), its size and samples of its weights are digested,
    not all of it: a second for a hundred gigabytes rather than minutes.
    """
    digest = hashlib.sha256()
    for part in parts:
        size = part.stat().st_size
        digest.update(size.to_bytes(8))
        with part.open("rb") as file:
            digest.update(file.read(_DIGEST_HEAD_BYTES))
            for i in range(_DIGEST_SAMPLES):
                file.seek(i * max(0, size - _DIGEST_SAMPLE_BYTES) // (_DIGEST_SAMPLES - 1))
                digest.update(file.read(_DIGEST_SAMPLE_BYTES))
    digest.update(repr((version("llama-cpp-python"), llama.build(), settings)).encode())
    return digest.hexdigest()


def model_params(config: EngineConfig) -> llama.ModelParams:
    return llama.ModelParams(
        n_gpu_layers=config.n_gpu_layers,
        split_mode=llama.SplitMode[config.split_mode.upper()],
        main_gpu=config.main_gpu,
        mlock=config.mlock,
        mmap=config.mmap,
    )


def _reason(errors: Sequence[str]) -> str:
    """The first line says what was wrong, the later ones only that loading failed for it."""
    return errors[0] if errors else "llama.cpp could not load it and gave no reason"
