"""Labels: what may be one, and what a log shows of other text."""

import pytest

from llm_ingress.labels import is_label, shown


@pytest.mark.parametrize("text", ["gpu-1", "Qwen3.5 0.8B", "naïve 模型", "x" * 256])
def test_what_can_be_seen_is_a_label(text: str) -> None:
    assert is_label(text)
    assert shown(text) == text


@pytest.mark.parametrize("text", ["", "a\nb", "\x1b[31mred", "a\u2028b", "x" * 257])
def test_what_cannot_be_seen_or_is_too_long_is_none(text: str) -> None:
    assert not is_label(text)


def test_text_of_a_peer_stays_one_line_without_colour() -> None:
    assert len(shown("x" * 10_000)) == 500
    assert shown("a\nFAKE \x1b[31mred") == r"a\nFAKE \x1b[31mred"
