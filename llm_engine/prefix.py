"""How much of what was computed before a new prompt can begin with.

A run is a row of cells computed one after another, one for each token. Most of a run is of use to every
prompt that begins with the same tokens, if the run can be cut where they part:

    run      [ tokens in common ........ | others ....... ]
    prompt   [ tokens in common ........ | its own ............. ]
              0                           n_common

Pure. Called by: `slots.py`, `beginnings.py`, `hostcache.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

# Fewer tokens are computed anew sooner than they are moved, kept in host memory or waited for. What every
# request of a chat template begins with is often no more than two dozen, and saves a third of a short prompt.
WORTH_TOKENS = 16
N_COMPUTED_ANEW = 1  # the last token of a prompt, for its logits


class Trim(StrEnum):
    """Where the cells of this kind of model can be cut."""

    ANYWHERE = "anywhere"
    IN_PLACE = "in place"  # sliding window: where they were computed; moved, they hold the last window only
    NOWHERE = "nowhere"  # recurrent: its state cannot be wound back


@dataclass(slots=True, eq=False)
class Run:
    """Cells, and what they hold. From the length `trims_from` on they can be cut anywhere.

    `tokens` may be longer than the cells: those of a running sequence are computed bit by bit.
    """

    tokens: list[int] = field(default_factory=list)
    n_cells: int = 0
    trims_from: int = 0

    @classmethod
    def begun(cls, trim: Trim) -> Self:
        """A run of which nothing is computed."""
        return cls(trims_from=_NEVER if trim is Trim.NOWHERE else 0)

    def moved(self, trim: Trim) -> "Run":
        """The same cells in another place."""
        return Run(self.tokens, self.n_cells, self.n_cells if trim is Trim.IN_PLACE else self.trims_from)

    def continued(self, tokens: list[int], n_cells: int) -> "Run":
        """The run cut to `n_cells`, from where `tokens` go on."""
        trims_from = self.trims_from if self.trims_from == _NEVER else min(self.trims_from, n_cells)
        return Run(tokens, n_cells, trims_from)

    def frozen(self) -> "Run":
        """The run with tokens of its own, which do not grow."""
        return Run(self.tokens[: self.n_cells], self.n_cells, self.trims_from)

    def n_usable(self, n_same: int, checkpoints: Iterable[int] = ()) -> int:
        """The longest beginning within the first `n_same` cells that the run can be cut to.

        `checkpoints` are lengths at which the state after this beginning is kept.
        """
        if n_same >= self.n_cells:
            return self.n_cells
        if n_same >= self.trims_from:
            return n_same
        return max((n for n in checkpoints if n <= n_same), default=0)

    def is_loss(self, n_kept: int) -> bool:
        """Whether something of use is lost if only the first `n_kept` cells stay."""
        n_lost = self.n_cells - n_kept
        return self.n_cells >= WORTH_TOKENS and (n_lost >= WORTH_TOKENS or 10 * n_lost > self.n_cells)

    def needs_checkpoint(self, n_tokens: int) -> bool:
        """Whether cutting it to so many takes the state kept at that length."""
        return n_tokens < min(self.n_cells, self.trims_from)


_NEVER = 1 << 62


def count_common(a: list[int], b: list[int], limit: int) -> int:
    """How many tokens both begin with, at most `limit`. Slices are compared, since that runs in C."""
    low, high = 0, min(len(a), len(b), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
