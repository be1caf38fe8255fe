"""What fits in the memory that is free, and what the operator is told."""

from dataclasses import replace

import pytest

from llm_engine.config import EngineConfig
from llm_engine.engine import fitted
from llm_engine.errors import DoesNotFit
from llm_engine.footprint import SPARE_BYTES, Footprint, host_share, shown

MIB, GIB = 1 << 20, 1 << 30

SIXTEEN = Footprint(
    n_slots=16, n_ctx=4096, weights_bytes=100 * MIB, kv_bytes=1600 * MIB, scratch_bytes=50 * MIB
)
NEEDED = (100 + 1600 + 50 + 100) * MIB  # a slot's KV may be on its way into another


def test_everything_counts_that_lies_in_host_memory() -> None:
    assert SIXTEEN.host_bytes == NEEDED
    assert replace(SIXTEEN, n_slots=1).host_bytes == NEEDED - 100 * MIB
    assert replace(SIXTEEN, host_share=0.25).host_bytes == (25 + 400 + 50 + 100) * MIB


def test_what_fits_to_the_byte_is_taken_and_one_byte_more_is_refused() -> None:
    free = NEEDED + SPARE_BYTES
    assert SIXTEEN.room_left(free) == 0
    with pytest.raises(DoesNotFit):
        SIXTEEN.room_left(free - 1)


def test_a_refusal_says_what_was_asked_what_is_there_and_which_flags_take_less() -> None:
    with pytest.raises(DoesNotFit) as refused:
        SIXTEEN.room_left(GIB)
    assert str(refused.value) == (
        "no memory for 16 slots x 4,096 tokens: KV cache 1.6 GiB, weights 100 MiB,"
        " in all 1.9 GiB of host memory, and 1.0 GiB are free; lower --max-inflight or --ctx-size,"
        " quantise with --cache-type-k and --cache-type-v, or take a smaller model"
    )


def test_the_prefix_cache_takes_half_of_what_is_left_at_most(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(max_inflight=16, cache_ram_mib=2048)
    caplog.set_level("INFO")
    assert fitted(config, SIXTEEN, 21 * GIB) == config
    assert fitted(config, SIXTEEN, NEEDED + SPARE_BYTES + 600 * MIB).cache_ram_mib == 300
    assert fitted(replace(config, cache_prompt=False), SIXTEEN, 21 * GIB).cache_ram_mib == 0
    begin = "KV cache: 16 slots x 4,096 tokens, 1.6 GiB (weights 100 MiB, "
    assert caplog.messages == [
        f"{begin}prefix cache up to 2.0 GiB, 21.0 GiB free)",
        f"{begin}prefix cache up to 300 MiB, 2.5 GiB free)",
        f"{begin}21.0 GiB free)",
    ]


def test_a_gpu_takes_layers_from_the_last_and_the_output_before_them() -> None:
    assert [host_share(4, n) for n in (0, 1, 2, 3, 5, 99, -1)] == [1, 1, 0.75, 0.5, 0, 0, 0]
    on_gpu = replace(SIXTEEN, host_share=0.25)
    assert "weights 100 MiB, 25% of both in host memory," in on_gpu.summary(cache_bytes=0, free_bytes=GIB)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 MiB"), (360 * MIB, "360 MiB"), (1472 * MIB, "1.4 GiB"), (1 << 50, "1,048,576.0 GiB")],
)
def test_sizes_as_people_read_them(n_bytes: int, text: str) -> None:
    assert shown(n_bytes) == text
