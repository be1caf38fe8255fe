"""A disk with behaviour: it does what it was told when the test lets it, and may be full or broken."""

from dataclasses import dataclass, field

from llm_engine.diskcache import Loaded, Lost, Order, Outcome, Read, Remove, Stored, Sweep, Write, Written
from llm_engine.hostcache import KvState


@dataclass(slots=True, eq=False)
class FakeDisk:
    """Orders wait until `do`; `files` are those that lie on it."""

    orders: list[Order] = field(default_factory=list)
    files: dict[Stored, KvState] = field(default_factory=dict)
    is_full: bool = False
    is_broken: bool = False  # what it holds cannot be read

    def order(self, order: Order) -> None:
        self.orders.append(order)

    def do(self) -> list[Outcome]:
        """Everything that waits, reads first; what came of it."""
        orders, self.orders = sorted(self.orders, key=lambda order: not isinstance(order, Read)), []
        return [outcome for order in orders if (outcome := self._do(order)) is not None]

    def _do(self, order: Order) -> Outcome | None:
        match order:
            case Write(stored, _) if self.is_full:
                return Lost(stored)
            case Write(stored, state):
                self.files[stored] = state
                return Written(stored)
            case Read(stored):
                assert stored in self.files, f"file {stored.number} was never written, or is removed"
                return Lost(stored) if self.is_broken else Loaded(stored, self.files[stored])
            case Remove(stored):
                self.files.pop(stored, None)
            case Sweep():
                pass
        return None
