"""Options of an engine, validated once and never changed."""

import os
import platform
from dataclasses import dataclass, fields
from pathlib import Path

from llm_engine.errors import ConfigError

MAX_SLOTS = 256
CTX_MIN = 16  # tokens of a slot

_RANGES = {
    "max_inflight": (1, MAX_SLOTS),
    "target_step_ms": (0, 60_000),
    "prefill_chunk": (1, 1 << 16),
    "max_waiting": (0, 100_000),
    "ctx_size": (CTX_MIN, 1 << 24),
    "max_kv_mib_per_session": (1, 1 << 24),
    "max_tokens": (1, 1 << 24),
    "threads": (1, 1024),
    "n_gpu_layers": (-1, 10_000),
    "main_gpu": (0, 255),
    "batch_size": (1, 1 << 16),
    "cache_ram_mib": (0, 1 << 24),
    "session_ttl": (0, 1 << 31),
    "session_dir_mib": (1, 1 << 30),
}
_CHOICES = {
    "split_mode": ("none", "layer", "row"),
    "flash_attn": ("auto", "on", "off"),
    "cache_type_k": ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"),
    "cache_type_v": ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to load and how to run it.

    Raises: ConfigError naming field, value and range.
    """

    model: str | None = None  # path, REPO, REPO:FILE, or "smollm2"; None: gguf.DEFAULT_MODEL
    model_url: str | None = None  # a plain URL instead
    download: bool = True
    max_inflight: int | None = None  # slots; None: 4 on a CPU, 16 with layers on a GPU
    target_step_ms: int = 0  # admit no sequence that would make a step longer; 0: every slot
    prefill_chunk: int | None = None  # prompt tokens of a step; None: as step times allow
    max_waiting: int = 64  # requests accepted beyond the slots
    ctx_size: int = 4096  # tokens per slot, at most the model's own
    max_kv_mib_per_session: int = 512  # a slot holds fewer tokens where their KV would take more
    max_tokens: int = 4096  # when a request names none
    threads: int | None = None  # None: every core this process may use
    n_gpu_layers: int = 0  # -1: all
    split_mode: str = "layer"  # of layers over several GPUs
    main_gpu: int = 0  # the one that is used with split_mode none
    flash_attn: str = "on"
    cache_type_k: str | None = None  # None: `type_of_keys`
    cache_type_v: str = "f16"
    mlock: bool = False
    mmap: bool = False  # map the model file instead of copying it into huge pages
    batch_size: int = 512  # tokens in one call of llama.cpp at most
    batch_invariant: bool | None = None  # answers do not depend on what ran beside them; None: on a CPU
    cache_prompt: bool = True  # begin a prompt with what earlier ones had in common with it
    cache_ram_mib: int = 2048  # host memory for cells whose slot another request took; 0: none
    session_ttl: int = 300  # seconds after which cells that nobody used are dropped; 0: never
    session_dir: Path | None = None  # where those go for which host memory has no room, and at the end all
    session_dir_mib: int = 8192

    def __post_init__(self) -> None:
        for field in fields(self):
            if (field.name, getattr(self, field.name)) != ("cache_type_k", None):
                self._check(field.name, getattr(self, field.name))
        if self.model == "":
            raise ConfigError("model is empty, must be a path, REPO, REPO:FILE, or smollm2")
        if self.batch_size < self.n_slots:
            raise ConfigError(f"batch_size {self.batch_size} is less than max_inflight {self.n_slots}")
        if self.session_dir is not None and not (self.cache_prompt and self.cache_ram_mib):
            raise ConfigError(f"session_dir {self.session_dir} needs cache_prompt, and cache_ram_mib above 0")
        if self.flash_attn == "off" and self.cache_type_v not in ("f32", "f16", "bf16"):
            raise ConfigError(f"cache_type_v {self.cache_type_v} needs flash_attn on or auto")

    @property
    def target_step_s(self) -> float | None:
        return self.target_step_ms / 1000 or None

    @property
    def n_slots(self) -> int:
        if self.max_inflight is not None:
            return self.max_inflight
        return 16 if self.n_gpu_layers else 4

    @property
    def n_threads(self) -> int:
        return self.threads or count_cores()

    @property
    def is_batch_invariant(self) -> bool:
        return not self.n_gpu_layers if self.batch_invariant is None else self.batch_invariant

    @property
    def prompt_slice(self) -> int | None:
        """Tokens of one prompt that a step computes at most; None: as many as there is room for.

        Where keys and values are both f16, or both f32, fewer than 64 keep the attention of llama.cpp's CPU
        backend on one code path but for single tokens, so that it hardly matters how a prompt was sliced.
        """
        has_paths = self.type_of_keys == self.cache_type_v and self.cache_type_v in ("f16", "f32")
        return 63 if self.is_batch_invariant and has_paths else None

    @property
    def type_of_keys(self) -> str:
        """Element type of the K cache.

        Where K and V are of two types, the flash attention of llama.cpp's CPU backend has one code path only:
        a token is computed alone in its call as it is with hundreds. The backend has vector code for bf16 on
        x86, and for a GPU types are not to be mixed.
        """
        if self.cache_type_k is not None:
            return self.cache_type_k
        on_x86 = platform.machine().lower() in ("x86_64", "amd64")
        helps = self.is_batch_invariant and self.flash_attn != "off" and not self.n_gpu_layers
        return "bf16" if helps and on_x86 else "f16"

    @staticmethod
    def _check(name: str, value: object) -> None:
        if name in _RANGES and value is not None:
            low, high = _RANGES[name]
            if not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}, not a whole number in {low}..{high}")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ConfigError(f"{name} is {value!r}, not one of {', '.join(_CHOICES[name])}")


def count_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
