"""Who is next in a conversation."""

import pytest

from llm_ingress.errors import NoTurn, RefusalReason
from llm_ingress.lines import Lines, Ticket


class Line:
    """The lines under test, and who came first in theirs, in order."""

    def __init__(self, *, max_waiting: int = 8, max_waiting_in_all: int = 8) -> None:
        self.lines = Lines(max_waiting=max_waiting, max_waiting_in_all=max_waiting_in_all)
        self.came: list[str] = []

    def enter(self, name: str, key: str = "k") -> Ticket:
        return self.lines.enter(key, lambda: self.came.append(name))


def test_one_after_the_other_in_the_order_in_which_they_came() -> None:
    line = Line()
    a, b, c = line.enter("a"), line.enter("b"), line.enter("c")
    assert (a.is_first, b.is_first, c.is_first) == (True, False, False)
    line.lines.leave(a)
    assert line.came == ["b"]
    assert b.is_first
    line.lines.leave(b)
    assert line.came == ["b", "c"]
    line.lines.leave(c)
    assert line.lines.n_waiting == 0


def test_lines_of_other_conversations_do_not_wait_for_each_other() -> None:
    line = Line()
    line.enter("a", "one")
    assert line.enter("b", "two").is_first


def test_who_leaves_while_waiting_wakes_nobody_and_is_never_called() -> None:
    line = Line()
    a, b, c = line.enter("a"), line.enter("b"), line.enter("c")
    line.lines.leave(b)
    assert line.came == []
    line.lines.leave(a)
    assert line.came == ["c"]
    assert c.is_first


def test_a_line_is_bounded_and_has_room_again() -> None:
    line = Line(max_waiting=2)
    first = line.enter("a")
    line.enter("b")
    line.enter("c")
    with pytest.raises(NoTurn) as refused:
        line.enter("d")
    assert refused.value.reason is RefusalReason.RING_FULL
    line.lines.leave(first)
    line.enter("d")
    assert line.lines.n_waiting == 2


def test_all_lines_together_are_bounded_and_whoever_need_not_wait_is_no_part_of_it() -> None:
    line = Line(max_waiting_in_all=1)
    line.enter("a", "one")
    line.enter("b", "one")
    line.enter("c", "two")
    with pytest.raises(NoTurn):
        line.enter("d", "two")
