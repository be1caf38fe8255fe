"""Drawing the next token of one sequence from its row of logits.

Order, as in llama.cpp: penalties, top_k, top_p, min_p, temperature, draw. Random numbers are keyed by
(seed, choice, token index), so that a continuation on another machine draws what this one would have drawn.
Owns: the token counts behind one sequence's penalties.
Called by: the backend, on the step thread; `SamplingParams` by everyone who makes a request.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from llm_engine.errors import RequestError

Logits: TypeAlias = npt.NDArray[np.float32]
Weights: TypeAlias = npt.NDArray[np.float32]
TokenIds: TypeAlias = npt.NDArray[np.int64]

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "seed": (-(2**63), 2**64 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repeat_penalty": (0.1, 10.0),
}

# A row is compared and summed in groups of this many before any token is looked at on its own.
_GROUP_WIDTH = 256
_HIGHEST = float(np.finfo(np.float32).max)
_COLDEST = float(np.finfo(np.float32).tiny)  # the lowest temperature a float32 can be divided by
_WORD = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Temperature 0 takes the likeliest; top_k 0 means no such limit.

    Presence and frequency penalties count generated tokens only, the repeat penalty the prompt's as well.
    Raises: RequestError for a value out of its range.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 40
    min_p: float = 0.05
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0

    def __post_init__(self) -> None:
        for field, (low, high) in RANGES.items():
            value = getattr(self, field)
            # Written so that NaN, which compares as false, is out of every range.
            if value is not None and not low <= value <= high:
                raise RequestError(f"{field} is {value}: it must be between {low} and {high}")

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repeat_penalty) != (0, 0, 1)

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the plain maximum of the logits, so that many rows can be taken at once."""
        return self.temperature == 0 and not self.has_penalties


class Sampler:
    """The choices of one sequence. A continuation is told its progress with `accept`, as if it had picked it.

    Thread: the step thread.
    """

    __slots__ = ("_choice", "_params", "_penalties", "_seed")

    def __init__(self, params: SamplingParams, seed: int, choice: int, prompt: Sequence[int]) -> None:
        self._params = params
        self._seed = seed
        self._choice = choice
        self._penalties = _Penalties(params, prompt) if params.has_penalties else None

    @property
    def is_greedy(self) -> bool:
        """Whether `argmax_rows` picks what `pick` would."""
        return self._params.is_greedy

    def accept(self, token: int) -> None:
        """Count a generated token."""
        if self._penalties is not None:
            self._penalties.count(token)

    def pick(self, row: Logits, index: int) -> int:
        """Choose the token at `index`, counted from the first generated one. The row is left as it was.

        NaN counts as impossible, infinity as certain. Of a row without one possible token the first is taken.
        Shapes: row (n_vocab,), contiguous or not, of any length.
        """
        logits = row if self._penalties is None else self._penalties.applied_to(row)
        if self._params.temperature == 0:
            return int(argmax_rows(logits[np.newaxis])[0])
        top = logits.max()
        if not np.isfinite(top):
            logits = np.nan_to_num(logits, nan=-np.inf, posinf=_HIGHEST, neginf=-np.inf)
            top = logits.max()
        if top == -np.inf:
            return 0
        return _draw(logits, top, self._params, uniform(self._seed, self._choice, index))


class _Penalties:
    """The distinct tokens of one sequence that are penalised, and how often each was generated."""

    __slots__ = ("_ids", "_n_generated", "_params", "_place")

    def __init__(self, params: SamplingParams, prompt: Iterable[int]) -> None:
        self._params = params
        counted = dict.fromkeys(prompt) if params.repeat_penalty != 1 else {}
        self._place = {token: place for place, token in enumerate(counted)}
        self._ids = np.fromiter(counted, dtype=np.int64, count=len(counted))
        self._n_generated = np.zeros(len(counted), dtype=np.float32)

    def count(self, token: int) -> None:
        """Count one generated token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            # Doubled, so that a long answer does not copy these arrays once a token.
            self._ids = np.append(self._ids, np.zeros(place + 16, dtype=np.int64))
            self._n_generated = np.append(self._n_generated, np.zeros(place + 16, dtype=np.float32))
        self._ids[place] = token
        self._n_generated[place] += 1

    def applied_to(self, row: Logits) -> Logits:
        """A copy of the row with the penalties in it.

        Source: llama.cpp, llama_sampler_penalties_apply.
        """
        ids, n_generated = self._ids[: len(self._place)], self._n_generated[: len(self._place)]
        repeat = np.float32(self._params.repeat_penalty)
        logits = row[ids]
        with np.errstate(all="ignore"):  # infinities and NaN of a broken model stay what they are
            logits = np.where(logits > 0, logits / repeat, logits * repeat)
            logits -= n_generated * np.float32(self._params.frequency_penalty)
            logits -= (n_generated > 0) * np.float32(self._params.presence_penalty)
        penalised = row.copy()
        penalised[ids] = logits
        return penalised


def argmax_rows(logits: Logits) -> TokenIds:
    """The likeliest token of each row; the lowest id where several are equal.

    NaN counts as impossible. Of a row without one possible token the first is taken.
    Shapes: (n_rows, n_vocab) -> (n_rows,).
    """
    tokens: TokenIds = logits.argmax(axis=1)
    for row, token in enumerate(tokens.tolist()):
        best = logits[row, token]
        if best != best:  # the maximum is NaN where there is one
            tokens[row] = np.where(np.isnan(logits[row]), -np.inf, logits[row]).argmax()
    return tokens


def uniform(seed: int, choice: int, index: int) -> float:
    """A random number in [0, 1) that depends on its three arguments only, the same on every machine.

    Source: the output function of SplitMix64 (Steele, Lea and Flood, 2014), applied to each argument in turn.
    """
    word = 0
    for part in (seed, choice, index):
        word = (word + part + 0x9E3779B97F4A7C15) & _WORD
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
        word ^= word >> 31
    return (word >> 11) * 2.0**-53


def _draw(logits: Logits, top: np.float32, params: SamplingParams, number: float) -> int:
    """The token that `number`, in [0, 1), stands for. `top` is the largest logit, and finite."""
    if 0 < params.top_k < len(logits):
        kept = _most_likely(logits, params.top_k)
        weights = _weights(logits[kept], top)
        kept = kept[: _n_kept(weights, weights.sum(dtype=np.float64), params)]
    elif params.top_p < 1 or params.min_p > 0:
        kept = _nucleus(logits, top, params)
    else:
        return _place_of(number, _weights(logits, top, params.temperature))
    return int(kept[_place_of(number, _weights(logits[kept], top, params.temperature))])


def _most_likely(logits: Logits, k: int) -> TokenIds:
    """The `k` likeliest tokens, likeliest first; fewer where fewer are possible.

    The k-th largest maximum of disjoint groups is at most the k-th largest logit, because k groups hold a
    logit that large. So what is below it need never be sorted.
    """
    width = max(1, min(_GROUP_WIDTH, len(logits) // (4 * k)))
    n_groups = len(logits) // width
    # A group is a column, because maxima of whole rows are the faster ones; the tail is in no group.
    maxima = logits[: n_groups * width].reshape(width, n_groups).max(axis=0)
    bound = np.partition(maxima, n_groups - k)[n_groups - k]
    return _sorted(logits, np.flatnonzero(logits >= max(bound, -_HIGHEST)))[:k]


def _nucleus(logits: Logits, top: np.float32, params: SamplingParams) -> TokenIds:
    """The tokens that top_p and min_p leave of the whole vocabulary, likeliest first.

    The tokens below (1 - top_p) / n_vocab cannot hold the mass that top_p cuts off, however many they are, so
    the others always suffice. Mostly the few that are far above it do.
    """
    weights = _weights(logits, top)
    total = weights.sum(dtype=np.float64)
    for n_below in (64, 1024, 16384, len(logits)):
        floor = max(params.min_p, min(1.0, (1 - params.top_p) * total / n_below))  # the likeliest weighs 1
        candidates = np.flatnonzero(weights >= floor)
        if floor == params.min_p or weights[candidates].sum(dtype=np.float64) >= params.top_p * total:
            break
    candidates = _sorted(logits, candidates)
    return candidates[: _n_kept(weights[candidates], total, params)]


def _sorted(logits: Logits, ids: TokenIds) -> TokenIds:
    """Ascending ids, likeliest first; the lowest id first among equals."""
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order]


def _n_kept(weights: Weights, total: np.float64, params: SamplingParams) -> int:
    """How many of the sorted candidates top_p and min_p keep, at least one. The first weight is 1."""
    n_kept = int(np.count_nonzero(weights >= params.min_p))
    if params.top_p < 1:
        mass = weights.cumsum(dtype=np.float64)
        n_kept = min(n_kept, int(np.searchsorted(mass, params.top_p * total)) + 1)
    return max(n_kept, 1)


def _weights(logits: Logits, top: np.float32, temperature: float = 1.0) -> Weights:
    """Probabilities at this temperature, in units of the likeliest token's."""
    weights: Weights = logits - top
    with np.errstate(over="ignore"):  # what overflows is minus infinity: it weighs nothing
        if temperature != 1:
            weights /= np.float32(max(temperature, _COLDEST))
        return np.exp(weights, out=weights)


def _place_of(number: float, weights: Weights) -> int:
    """The place whose share of the whole mass holds `number`, in [0, 1). Never one that weighs nothing.

    The group is found first: sums of groups are ten times faster than one running sum.
    """
    groups = np.arange(0, len(weights), _GROUP_WIDTH)
    mass = np.add.reduceat(weights, groups, dtype=np.float64).cumsum()
    group = _first_above(number * mass[-1], mass)
    before = mass[group - 1] if group else 0.0
    start = groups[group]
    within = weights[start : start + _GROUP_WIDTH].cumsum(dtype=np.float64)
    return int(start) + _first_above(number * mass[-1] - before, within)


def _first_above(point: float, mass: npt.NDArray[np.float64]) -> int:
    """The first place where a running sum exceeds `point`, which rounding may have put at its very end."""
    return int(np.searchsorted(mass, min(point, np.nextafter(mass[-1], 0)), side="right"))
