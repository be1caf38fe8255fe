"""Who is next in a conversation: its requests run one after the other, in the order in which they came.

Owns: the line of each conversation that has requests. Pure; whoever comes to the head of a line is called.
Called by: `conversations.py`.
"""

from collections.abc import Callable, Hashable

from llm_ingress.errors import NoTurn, RefusalReason


class Ticket:
    """A place in a line. `on_first` is called when it comes to the head; not for one that begins there."""

    __slots__ = ("_line", "key", "on_first")

    def __init__(self, key: Hashable, line: "dict[Ticket, None]", on_first: Callable[[], None]) -> None:
        self.key = key
        self.on_first = on_first
        self._line = line

    @property
    def is_first(self) -> bool:
        """Whether it is this one's turn."""
        return next(iter(self._line), None) is self


class Lines:
    """The lines of all conversations, each of at most `max_waiting` behind its head."""

    def __init__(self, *, max_waiting: int, max_waiting_in_all: int) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_in_all = max_waiting_in_all
        self._lines: dict[Hashable, dict[Ticket, None]] = {}
        self._n_tickets = 0

    @property
    def n_waiting(self) -> int:
        """How many are not at the head of their line."""
        return self._n_tickets - len(self._lines)

    def enter(self, key: Hashable, on_first: Callable[[], None]) -> Ticket:
        """Go to the end of a line. Raises: NoTurn where too many wait already."""
        line = self._lines.get(key, {})
        if len(line) > self._max_waiting:
            message = f"{self._max_waiting} requests of this conversation wait already"
            raise NoTurn(RefusalReason.RING_FULL, message)
        if line and self.n_waiting >= self._max_waiting_in_all:
            message = f"{self.n_waiting} requests wait for others of their conversations already"
            raise NoTurn(RefusalReason.RING_FULL, message)
        ticket = Ticket(key, line, on_first)
        line[ticket] = None
        self._lines[key] = line
        self._n_tickets += 1
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Leave a line, from wherever one is in it; from its head the next one comes there."""
        line = self._lines[ticket.key]
        was_first = ticket.is_first
        del line[ticket]
        self._n_tickets -= 1
        if not line:
            del self._lines[ticket.key]
        elif was_first:
            next(iter(line)).on_first()
