"""A context as llama.cpp lays it out, measured without allocating it.

llama.cpp can load a model's metadata alone and create a context that only counts: the same code that will
allocate the KV of every kind of layer, recurrent state and compute buffers writes their sizes into its log.
Only its table of cells is real; so of a context with very many, a shorter one is laid out and scaled.

Called by: `engine.py`, after `trial.py` and before the model is loaded.
"""

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llm_engine import llama
from llm_engine.backend import context_params
from llm_engine.config import CTX_MIN, EngineConfig
from llm_engine.errors import ConfigError, ModelError
from llm_engine.footprint import Footprint, host_share

logger = logging.getLogger(__name__)

N_CELLS_LAID_OUT = 1 << 18  # 50 bytes each in the table

_SIZE = re.compile(r"^(?P<what>\w+): size = +(?P<mib>[\d.]+) MiB", re.MULTILINE)
_BUFFER = re.compile(r"^\w+: +\S+ +(?:output|compute) buffer size = +(?P<mib>[\d.]+) MiB", re.MULTILINE)
_RECURRENT = "llama_memory_recurrent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What one context's buffers take, as llama.cpp's log has it: to 0.01 MiB each."""

    n_cells: int  # of all slots
    cells_bytes: int  # grows with the tokens of a slot
    state_bytes: int  # recurrent: one state a slot, however long
    scratch_bytes: int

    @classmethod
    def parse(cls, log: str, *, n_cells: int) -> "Layout":
        sizes = [(found["what"], _n_bytes(found["mib"])) for found in _SIZE.finditer(log)]
        return cls(
            n_cells=n_cells,
            cells_bytes=sum(n for what, n in sizes if what != _RECURRENT),
            state_bytes=sum(n for what, n in sizes if what == _RECURRENT),
            scratch_bytes=sum(_n_bytes(found["mib"]) for found in _BUFFER.finditer(log)),
        )


def measure(path: Path, config: EngineConfig) -> Footprint:
    """Lay out the engine of `config` for the model in `path`.

    Raises: ModelError with llama.cpp's reason, if it would not create such a context; ConfigError if no
    conversation of this model has room in the KV it may take.
    """
    with _metadata(path) as model:
        n_wished = min(config.ctx_size, llama.n_ctx_train(model))
        layout = _laid_out(path, model, config, n_wished)
        n_ctx = min(n_wished, n_tokens_allowed(layout, config))
        if n_ctx < n_wished:
            logger.warning(
                "a slot holds %d tokens, not %d: KV of one conversation takes %d MiB at most",
                n_ctx,
                n_wished,
                config.max_kv_mib_per_session,
            )
            layout = _laid_out(path, model, config, n_ctx)
        scale = context_params(config, n_ctx).n_ctx / layout.n_cells
        return Footprint(
            n_slots=config.n_slots,
            n_ctx=n_ctx,
            weights_bytes=llama.n_weights_bytes(model),
            kv_bytes=round(layout.cells_bytes * scale) + layout.state_bytes,
            scratch_bytes=round(layout.scratch_bytes * scale),  # at most: part of it stays as it is
            host_share=host_share(llama.n_layers(model), config.n_gpu_layers),
        )


def n_tokens_allowed(layout: Layout, config: EngineConfig) -> int:
    """The tokens of a conversation whose KV is within `max_kv_mib_per_session`.

    Raises: ConfigError where they are too few for any.
    """
    limit_mib, state_bytes = config.max_kv_mib_per_session, layout.state_bytes // config.n_slots
    cell_bytes = max(1, layout.cells_bytes) / layout.n_cells
    n_tokens = int(((limit_mib << 20) - state_bytes) / cell_bytes)
    if n_tokens < CTX_MIN:
        least_mib = math.ceil((state_bytes + CTX_MIN * cell_bytes) / (1 << 20))
        raise ConfigError(
            f"max_kv_mib_per_session is {limit_mib}, must be at least {least_mib} for this model"
        )
    return n_tokens


def _laid_out(path: Path, model: llama.ModelPointer, config: EngineConfig, n_ctx: int) -> Layout:
    """A context whose slots hold so many tokens, or fewer."""
    params = _shortened(context_params(config, n_ctx))
    return Layout.parse(_log_of(path, model, params), n_cells=params.n_ctx)


@contextmanager
def _metadata(path: Path) -> Iterator[llama.ModelPointer]:
    """A model without its weights."""
    with llama.collected_errors() as errors:
        model = llama.load_model(path, llama.ModelParams(allocates=False))
        if not model:
            raise ModelError(str(path), errors[0] if errors else "llama.cpp gave no reason")
    try:
        yield model
    finally:
        llama.free_model(model)


def _log_of(path: Path, model: llama.ModelPointer, params: llama.ContextParams) -> str:
    """What llama.cpp says while it creates a context."""
    with llama.collected_log() as log:
        context = llama.init_context(model, params)
        if not context:
            reason = log.errors[-1] if log.errors else "no reason given"
            raise ModelError(str(path), f"no context of {params.n_ctx} tokens: {reason}")
        llama.free_context(context)
        return log.text


def _shortened(params: llama.ContextParams) -> llama.ContextParams:
    """The same, or one with shorter slots where all of them have too many cells to be laid out."""
    unit = params.n_seq_max * llama.CTX_PADDING
    return replace(params, n_ctx=min(params.n_ctx, max(unit, N_CELLS_LAID_OUT // unit * unit)))


def _n_bytes(mib: str) -> int:
    return round(float(mib) * (1 << 20))
