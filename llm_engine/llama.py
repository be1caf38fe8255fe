"""llama.cpp, typed: the only module that touches the C library.

Owns: the process-wide log callback. Called by: `model.py` (vocabulary, metadata) and `backend.py`
(context, memory, decode). Arguments that would make the library abort the process are checked here,
before the call, with an assert that names the numbers.

Short calls are bound through `PyDLL`, which keeps the GIL: beside a busy Python thread a call that gives
it up waits up to the switch interval (5 ms) to get it back. `llama_decode`, tokenising and loading go
through `CDLL` and release it.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from llm_engine.errors import BackendError
from llm_engine.hugepages import huge_pages

try:
    from llama_cpp import llama_cpp as c
except (OSError, RuntimeError, AttributeError) as error:  # no library, no such, or one without a function
    where = os.environ.get("LLAMA_CPP_LIB_PATH", "the package llama-cpp-python")
    raise ImportError(f"llama.cpp does not load from {where}: {error}") from error

ModelPointer = NewType("ModelPointer", int)
ContextPointer = NewType("ContextPointer", int)
VocabPointer = NewType("VocabPointer", int)
Logits = npt.NDArray[np.float32]

N_SEQ_LIMIT = 256  # LLAMA_MAX_SEQ
CTX_PADDING = 256  # a sequence's context is padded up to this

_GGML_LOG_ERROR, _GGML_LOG_CONT = 4, 5


class TokenAttr(IntFlag):
    """Source: llama.h, enum llama_token_attr."""

    UNKNOWN = c.LLAMA_TOKEN_ATTR_UNKNOWN
    CONTROL = c.LLAMA_TOKEN_ATTR_CONTROL


class FlashAttn(IntEnum):
    """Source: llama.h, enum llama_flash_attn_type."""

    AUTO = c.LLAMA_FLASH_ATTN_TYPE_AUTO
    OFF = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
    ON = c.LLAMA_FLASH_ATTN_TYPE_ENABLED


class SplitMode(IntEnum):
    """How a model is spread over several GPUs. Source: llama.h, enum llama_split_mode."""

    NONE = c.LLAMA_SPLIT_MODE_NONE
    LAYER = c.LLAMA_SPLIT_MODE_LAYER
    ROW = c.LLAMA_SPLIT_MODE_ROW


class CacheType(IntEnum):
    """Element type of the KV cache. Source: ggml.h, enum ggml_type."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    BF16 = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParams:
    """What `load_model` sets of llama_model_params; the rest keeps llama.cpp's defaults."""

    n_gpu_layers: int = 0  # negative: all
    split_mode: SplitMode = SplitMode.LAYER
    main_gpu: int = 0
    mlock: bool = False
    mmap: bool = False  # map the file, which other processes can share; else the weights are copied
    repack: bool = True  # rearrange the weights for this CPU
    allocates: bool = True  # False: metadata alone, for contexts that only count


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParams:
    """What `init_context` sets of llama_context_params; the rest keeps llama.cpp's defaults."""

    n_ctx: int  # tokens over all sequences
    n_seq_max: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    flash_attn: FlashAttn
    type_k: CacheType
    type_v: CacheType


# --- loading ---------------------------------------------------------------------------------------------


class _Log:
    """llama.cpp's own words. It returns NULL and says why only here."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=8)
        self._texts: list[str] | None = None
        self._level = 0
        self.callback = c.llama_log_callback(self._on_text)

    @property
    def text(self) -> str:
        """All that was said since `keep`."""
        return "".join(self._texts or ())

    def keep(self, keeps: bool) -> None:
        self.errors.clear()
        self._texts = [] if keeps else None

    def _on_text(self, level: int, text: bytes, _user_data: Any) -> None:
        self._level = self._level if level == _GGML_LOG_CONT else level
        if self._level != _GGML_LOG_ERROR and self._texts is None:
            return
        decoded = text.decode("utf-8", "replace")
        if self._texts is not None:
            self._texts.append(decoded)
        if self._level == _GGML_LOG_ERROR and (line := decoded.strip()):
            self.errors.append(line)


_log = _Log()
c.llama_log_set(_log.callback, ctypes.c_void_p(0))
c.llama_backend_init()


@contextmanager
def collected_errors() -> Iterator[deque[str]]:
    """Collect llama.cpp's error lines while loading; the last eight are kept."""
    _log.errors.clear()
    yield _log.errors


@contextmanager
def collected_log() -> Iterator[_Log]:
    """Collect everything llama.cpp says, the sizes of its buffers among it."""
    _log.keep(True)
    try:
        yield _log
    finally:
        _log.keep(False)


def load_model(path: os.PathLike[str] | str, wanted: ModelParams) -> ModelPointer | None:
    """Load a GGUF; None on failure, with the reason in the log. Source: llama_model_load_from_file."""
    params = c.llama_model_default_params()
    params.n_gpu_layers = wanted.n_gpu_layers
    params.split_mode = wanted.split_mode
    params.main_gpu = wanted.main_gpu
    params.load_mode = _LOAD_MODES[wanted.mmap, wanted.mlock]
    params.use_extra_bufts = wanted.repack
    params.no_alloc = not wanted.allocates
    with huge_pages():
        return c.llama_model_load_from_file(os.fsencode(path), params)  # type: ignore[no-any-return]


_LOAD_MODES = {  # by mmap and mlock
    (False, False): c.LLAMA_LOAD_MODE_NONE,
    (False, True): c.LLAMA_LOAD_MODE_MLOCK,
    (True, False): c.LLAMA_LOAD_MODE_MMAP,
    (True, True): c.LLAMA_LOAD_MODE_MMAP_MLOCK,
}


def free_model(model: ModelPointer) -> None:
    c.llama_model_free(model)


def init_context(model: ModelPointer, wanted: ContextParams) -> ContextPointer | None:
    """Create a context with one KV stream per sequence; None on failure, with the reason in the log.

    Separate streams and flash attention make results independent of the batch, if a sequence has fewer than
    64 tokens in it.
    """
    assert 1 <= wanted.n_seq_max <= N_SEQ_LIMIT, f"n_seq_max {wanted.n_seq_max} not in 1..{N_SEQ_LIMIT}"
    assert wanted.n_batch >= wanted.n_seq_max, f"n_batch {wanted.n_batch} < n_seq_max {wanted.n_seq_max}"
    params = c.llama_context_default_params()
    params.n_ctx = wanted.n_ctx
    params.n_seq_max = wanted.n_seq_max
    params.n_batch = wanted.n_batch
    params.n_ubatch = wanted.n_ubatch
    params.n_outputs_max = wanted.n_seq_max
    params.n_threads = params.n_threads_batch = wanted.n_threads
    params.flash_attn_type = wanted.flash_attn
    params.type_k = wanted.type_k
    params.type_v = wanted.type_v
    params.kv_unified = False
    params.swa_full = True
    params.no_perf = True
    with huge_pages():
        return c.llama_init_from_model(model, params)  # type: ignore[no-any-return]


def build() -> str:
    """Which ggml the library was built from: it need not be that of the package. Source: ggml_commit."""
    commit: bytes = _ggml_commit()
    return commit.decode("utf-8", "replace")


def has_gpu() -> bool:
    """Whether this build of the library found a device to put layers on."""
    return bool(c.llama_supports_gpu_offload())


def free_context(context: ContextPointer) -> None:
    c.llama_free(context)


_ggml_commit = c._lib.ggml_commit
_ggml_commit.argtypes, _ggml_commit.restype = [], ctypes.c_char_p


# --- short calls, bound without giving up the GIL ----------------------------------------------------------

_library = ctypes.PyDLL(c._lib._name)


def _short(name: str) -> Any:
    bound, original = getattr(_library, name), getattr(c._lib, name)
    bound.argtypes, bound.restype = original.argtypes, original.restype
    return bound


_token_to_piece = _short("llama_token_to_piece")
_vocab_get_text = _short("llama_vocab_get_text")
_vocab_get_attr = _short("llama_vocab_get_attr")
_vocab_is_eog = _short("llama_vocab_is_eog")
_memory_seq_rm = _short("llama_memory_seq_rm")
_memory_seq_pos_max = _short("llama_memory_seq_pos_max")
_get_logits = _short("llama_get_logits")


# --- the model's vocabulary and metadata -------------------------------------------------------------------


def vocab(model: ModelPointer) -> VocabPointer:
    return VocabPointer(c.llama_model_get_vocab(model))


def n_vocab(v: VocabPointer) -> int:
    return int(c.llama_vocab_n_tokens(v))


def bos_token(v: VocabPointer) -> int | None:
    token = int(c.llama_vocab_bos(v))
    return token if token >= 0 else None


def eos_token(v: VocabPointer) -> int | None:
    token = int(c.llama_vocab_eos(v))
    return token if token >= 0 else None


def adds_bos(v: VocabPointer) -> bool:
    return bool(c.llama_vocab_get_add_bos(v))


def token_text(v: VocabPointer, token: int) -> str:
    text: bytes = _vocab_get_text(v, token)
    return text.decode("utf-8", "replace")


def longest_token_bytes(v: VocabPointer) -> int:
    """No token's piece is longer: the vocabulary spells a byte of text with one byte or more."""
    return max(len(_vocab_get_text(v, token)) for token in range(n_vocab(v)))


def token_attr(v: VocabPointer, token: int) -> TokenAttr:
    return TokenAttr(_vocab_get_attr(v, token) & (TokenAttr.UNKNOWN | TokenAttr.CONTROL))


def is_end_of_generation(v: VocabPointer, token: int) -> bool:
    return bool(_vocab_is_eog(v, token))


def token_piece(v: VocabPointer, token: int) -> bytes:
    """The bytes a token stands for; control tokens stand for none."""
    buffer = ctypes.create_string_buffer(64)
    size = _token_to_piece(v, token, buffer, len(buffer), 0, False)
    if size < 0:
        buffer = ctypes.create_string_buffer(-size)
        size = _token_to_piece(v, token, buffer, len(buffer), 0, False)
    return buffer.raw[:size]


def tokenize(v: VocabPointer, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
    """Text to token ids; releases the GIL. Source: llama_tokenize."""
    data = text.encode("utf-8")
    capacity = len(data) + 8
    tokens = np.empty(capacity, np.int32)  # ctypes would make a new type for every length
    pointer = _pointer(tokens, c.llama_token)
    n_tokens = c.llama_tokenize(v, data, len(data), pointer, capacity, add_special, parse_special)
    if n_tokens < 0:
        raise BackendError(f"tokenising {len(data)} bytes needs {-n_tokens} tokens, more than {capacity}")
    found: list[int] = tokens[:n_tokens].tolist()
    return found


def chat_template(model: ModelPointer) -> str | None:
    source: bytes | None = c.llama_model_chat_template(model, None)
    return source.decode("utf-8", "replace") if source else None


def n_params(model: ModelPointer) -> int:
    return int(c.llama_model_n_params(model))


def n_layers(model: ModelPointer) -> int:
    return int(c.llama_model_n_layer(model))


def n_weights_bytes(model: ModelPointer) -> int:
    return int(c.llama_model_size(model))


def n_ctx_train(model: ModelPointer) -> int:
    return int(c.llama_model_n_ctx_train(model))


def has_recurrent_state(model: ModelPointer) -> bool:
    """Whether any layer keeps a state that cannot be cut back to fewer tokens."""
    return bool(c.llama_model_is_recurrent(model) or c.llama_model_is_hybrid(model))


def has_sliding_window(model: ModelPointer) -> bool:
    return int(c.llama_model_n_swa(model)) > 0


# --- one context -------------------------------------------------------------------------------------------


class Batch:
    """The tokens of one `llama_decode`, in arrays allocated once."""

    def __init__(self, n_batch: int, n_positions: int) -> None:
        self._count = np.arange(n_positions, dtype=np.int32)
        self.tokens = np.zeros(n_batch, np.int32)
        self.positions = np.zeros(n_batch, np.int32)
        self.seq_ids = np.zeros(n_batch, np.int32)
        self.wants_logits = np.zeros(n_batch, np.int8)
        self._ones = np.ones(n_batch, np.int32)
        first = self.seq_ids.ctypes.data
        addresses = range(first, first + 4 * n_batch, 4)
        self._seq_id_pointers = (ctypes.c_void_p * n_batch)(*addresses)
        self.struct = c.llama_batch(
            0,
            _pointer(self.tokens, c.llama_token),
            None,
            _pointer(self.positions, c.llama_pos),
            _pointer(self._ones, ctypes.c_int32),
            ctypes.cast(self._seq_id_pointers, ctypes.POINTER(ctypes.POINTER(c.llama_seq_id))),
            _pointer(self.wants_logits, ctypes.c_int8),
        )
        self.n_batch = n_batch
        self.n_tokens = 0

    def clear(self) -> None:
        self.n_tokens = 0

    def append(self, seq_id: int, start: int, tokens: Sequence[int], *, wants_logits: bool) -> None:
        """Add `tokens` of a sequence at positions `start`...; logits, if wanted, for the last of them."""
        begin, end = self.n_tokens, self.n_tokens + len(tokens)
        assert begin < end <= self.n_batch, f"{end} tokens in a batch of {self.n_batch}"
        self.tokens[begin:end] = tokens
        self.positions[begin:end] = self._count[start : start + len(tokens)]
        self.seq_ids[begin:end] = seq_id
        self.wants_logits[begin:end] = 0
        self.wants_logits[end - 1] = wants_logits
        self.n_tokens = end

    def append_one(self, seq_id: int, position: int, token: int) -> None:
        """Add the one token of a running sequence, with logits: `append` at a fraction of its cost."""
        at = self.n_tokens
        assert at < self.n_batch, f"{at + 1} tokens in a batch of {self.n_batch}"
        self.tokens[at] = token
        self.positions[at] = position
        self.seq_ids[at] = seq_id
        self.wants_logits[at] = 1
        self.n_tokens = at + 1


def _pointer(array: npt.NDArray[Any], ctype: Any) -> Any:
    """To its first element; the caller keeps the array. What numpy's own `data_as` makes is a cycle."""
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctype))


def decode(context: ContextPointer, batch: Batch) -> int:
    """Compute a batch; releases the GIL. 0, or llama.cpp's code for what went wrong.

    Source: llama_decode. 1: no room in the KV cache; 2: aborted; -1: invalid batch; below: fatal.
    """
    batch.struct.n_tokens = batch.n_tokens
    return int(c.llama_decode(context, batch.struct))


def synchronize(context: ContextPointer) -> None:
    """Wait for the device; releases the GIL. Logits may be read without waiting after it."""
    c.llama_synchronize(context)


class LogitsViews:
    """Views of the logits of a context's last decode, (rows that asked for them, vocabulary).

    Making one costs more than reading it, and llama.cpp keeps its buffer, so each shape is made once.
    """

    def __init__(self, context: ContextPointer, n_vocab: int) -> None:
        self._context = context
        self._n_vocab = n_vocab
        self._address: int | None = None
        self._views: dict[int, Logits] = {}

    def of(self, n_rows: int) -> Logits:
        """The first `n_rows` rows; valid until the next decode."""
        pointer = _get_logits(self._context)
        address = ctypes.addressof(pointer.contents)
        if address != self._address:
            self._address = address
            self._views.clear()
        if n_rows not in self._views:
            self._views[n_rows] = np.ctypeslib.as_array(pointer, shape=(n_rows, self._n_vocab))
        return self._views[n_rows]


# --- the cells of one sequence -----------------------------------------------------------------------------


def cut_cells(context: ContextPointer, seq_id: int, n_tokens: int) -> bool:
    """Keep the first `n_tokens` of what is cached for `seq_id`; False if that leaves something else.

    Source: llama_memory_seq_rm, which refuses to cut a recurrent state, and llama_memory_seq_pos_max.
    """
    memory = c.llama_get_memory(context)
    _memory_seq_rm(memory, seq_id, n_tokens, -1)
    return bool(_memory_seq_pos_max(memory, seq_id) == n_tokens - 1)


def n_state_bytes(context: ContextPointer, seq_id: int, *, partial: bool) -> int:
    return int(c.llama_state_seq_get_size_ext(context, seq_id, _state_flags(partial)))


def get_state(
    context: ContextPointer, seq_id: int, into: npt.NDArray[np.uint8], *, partial: bool
) -> npt.NDArray[np.uint8]:
    """Copy what is cached for `seq_id` into a buffer; releases the GIL. Returns the part written.

    `partial` leaves out what can be cut, the cells of full attention. Source: llama_state_seq_get_data_ext.
    """
    data = _pointer(into, ctypes.c_uint8)
    n_bytes = c.llama_state_seq_get_data_ext(context, data, into.nbytes, seq_id, _state_flags(partial))
    if not n_bytes:
        raise BackendError(f"llama.cpp gave no state of sequence {seq_id}")
    return into[:n_bytes]


def set_state(context: ContextPointer, seq_id: int, state: npt.NDArray[np.uint8], *, partial: bool) -> None:
    """Replace what is cached for `seq_id`; releases the GIL. Source: llama_state_seq_set_data_ext."""
    data = _pointer(state, ctypes.c_uint8)
    if not c.llama_state_seq_set_data_ext(context, data, state.nbytes, seq_id, _state_flags(partial)):
        raise BackendError(f"llama.cpp took no state of {state.nbytes} bytes for sequence {seq_id}")


def _state_flags(partial: bool) -> int:
    return int(c.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else c.LLAMA_STATE_SEQ_FLAGS_NONE)
