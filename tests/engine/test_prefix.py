"""Where runs can be cut, and what two prompts have in common."""

from hypothesis import given
from hypothesis import strategies as st

from llm_engine.prefix import Run, Trim, count_common

TOKENS = st.lists(st.integers(0, 2), max_size=40)


@given(TOKENS, TOKENS, st.integers(0, 50))
def test_common_tokens_are_counted_up_to_the_limit(a: list[int], b: list[int], limit: int) -> None:
    n = count_common(a, b, limit)
    assert a[:n] == b[:n]
    assert n == min(limit, len(a), len(b)) or a[n] != b[n]


def computed(n_cells: int, trim: Trim) -> Run:
    run = Run.begun(trim).continued(list(range(n_cells)), 0)
    run.n_cells = n_cells
    return run


def test_full_attention_can_be_cut_anywhere_wherever_its_cells_lie() -> None:
    run = computed(100, Trim.ANYWHERE)
    assert [run.n_usable(n) for n in (0, 40, 100)] == [0, 40, 100]
    assert run.moved(Trim.ANYWHERE).n_usable(40) == 40
    assert not run.needs_checkpoint(40)


def test_a_sliding_window_can_be_cut_anywhere_until_it_is_moved() -> None:
    run = computed(100, Trim.IN_PLACE)
    assert run.n_usable(40) == 40
    moved = run.moved(Trim.IN_PLACE)
    assert moved.n_usable(99) == 0
    assert moved.n_usable(100) == 100


def test_a_moved_window_that_went_on_can_be_cut_back_to_where_it_was_moved() -> None:
    moved = computed(100, Trim.IN_PLACE).moved(Trim.IN_PLACE).continued(list(range(200)), 100)
    moved.n_cells = 200
    assert [moved.n_usable(n) for n in (99, 100, 150)] == [0, 100, 150]


def test_a_window_cut_at_a_checkpoint_can_be_cut_from_there_on() -> None:
    run = computed(100, Trim.IN_PLACE).moved(Trim.IN_PLACE)
    assert run.n_usable(70, [30, 60]) == 60
    assert run.needs_checkpoint(60)
    cut = run.continued(list(range(90)), 60)
    cut.n_cells = 90
    assert cut.n_usable(75) == 75


def test_a_recurrent_state_is_used_whole_or_from_a_checkpoint() -> None:
    run = computed(100, Trim.NOWHERE)
    assert run.n_usable(99) == 0
    assert run.n_usable(100) == 100
    assert run.n_usable(99, [30, 60]) == 60
    cut = run.continued(list(range(90)), 60)
    cut.n_cells = 90
    assert cut.n_usable(75, [60]) == 60
