"""What an engine takes of the machine's memory, and whether that fits.

Linux grants memory that it does not have and kills whoever touches it later, so the sizes are compared with
what is free before anything is allocated. What is left over bounds the prefix cache in host memory.

Pure. Called by: `engine.py`, with sizes from `layout.py`.
"""

from dataclasses import dataclass

from llm_engine.errors import DoesNotFit

SPARE_BYTES = 128 << 20  # what the process grows by while it serves, beside everything counted here

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Sizes of one engine, wherever its layers lie."""

    n_slots: int
    n_ctx: int  # tokens of a slot
    weights_bytes: int
    kv_bytes: int  # of all slots, recurrent state included
    scratch_bytes: int  # what a step computes in
    host_share: float = 1.0  # of weights and KV; the rest lies on a GPU, where llama.cpp sees to it

    @property
    def host_bytes(self) -> int:
        # A prompt's beginning that lies in another slot passes through a buffer of up to a slot's size.
        passing = self.kv_bytes // self.n_slots if self.n_slots > 1 else 0
        return round(self.host_share * (self.weights_bytes + self.kv_bytes)) + self.scratch_bytes + passing

    def room_left(self, free_bytes: int) -> int:
        """Bytes that stay free beside the engine.

        Raises: DoesNotFit, if it needs more than there is.
        """
        room = free_bytes - SPARE_BYTES - self.host_bytes
        if room < 0:
            raise DoesNotFit(self._refusal(free_bytes))
        return room

    def summary(self, *, cache_bytes: int, free_bytes: int) -> str:
        """One line for the log, of an engine with a prefix cache of up to `cache_bytes`."""
        cache = f", prefix cache up to {shown(cache_bytes)}" if cache_bytes else ""
        place = "" if self.host_share == 1 else f", {self.host_share:.0%} of both in host memory"
        return (
            f"KV cache: {self._slots}, {shown(self.kv_bytes)}"
            f" (weights {shown(self.weights_bytes)}{place}{cache}, {shown(free_bytes)} free)"
        )

    @property
    def _slots(self) -> str:
        return f"{self.n_slots} slots x {self.n_ctx:,} tokens"

    def _refusal(self, free_bytes: int) -> str:
        return (
            f"no memory for {self._slots}: KV cache {shown(self.kv_bytes)},"
            f" weights {shown(self.weights_bytes)}, in all {shown(self.host_bytes + SPARE_BYTES)}"
            f" of host memory, and {shown(free_bytes)} are free; lower --max-inflight or --ctx-size,"
            " quantise with --cache-type-k and --cache-type-v, or take a smaller model"
        )


def host_share(n_layers: int, n_gpu_layers: int) -> float:
    """The part of a model's layers that a GPU leaves to the CPU.

    Source: llama.cpp counts the output as one layer more, and begins with the last; negative is all.
    """
    if n_gpu_layers < 0:
        return 0.0
    return min(1.0, max(0, n_layers + 1 - n_gpu_layers) / n_layers)


def shown(n_bytes: int) -> str:
    """A size for people, as in "360 MiB" and "1.4 GiB"."""
    if n_bytes < _GIB:
        return f"{n_bytes / _MIB:,.0f} MiB"
    return f"{n_bytes / _GIB:,.1f} GiB"
