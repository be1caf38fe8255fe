"""What becomes of a conversation that outgrew its context: which turns stay, and which become a summary.

    system turns | older turns | recent turns, the last user's always among them
    stay         | a summary   | stay

The summary is a user's turn before the recent ones, so that nothing a user said is said by the system. What
it replaces is read by the model in pieces, oldest first, and each summary goes on from the one before: a
conversation that overflows again extends the summary it has by what came since.

How many tokens a prompt has is asked of the caller.
Pure. Called by: `overflow.py`, on the preparation thread.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeAlias

from llm_engine.generation import Message

Turns: TypeAlias = tuple[Message, ...]
# Tokens of the prompt these turns make; None for one that leaves no room in the context.
Measure: TypeAlias = Callable[[Turns], int | None]
Recall: TypeAlias = Callable[[bytes], str | None]  # the summary kept for turns of this digest

PIECES_MAX = 8  # summaries for one request; what is older than they can read is left out
OPENING = "[Summary of the conversation so far]\n"

_SHARE, _SHARE_TOKENS_MAX = 8, 512  # of the context: a summary at most, and an answer at least
_SUMMARY_TOKENS_MIN = 16  # what is shorter says nothing
_PIECE_GRAIN = 64  # a piece is as long as fits, to within this part of it
_TOKEN = "-"  # in place of a summary not written yet, whose tokens are counted beside it
_SPEAKERS = {"user": "User", "assistant": "Assistant"}
_INSTRUCTION = (
    "Summarise this conversation in a few sentences, in its own language. Keep names, numbers, facts,"
    " decisions and open questions. Write the summary and nothing else."
)


class Policy(StrEnum):
    """What is done for requests that do not say."""

    NONE = "none"
    SUMMARY = "summary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What stands for the first `n_older` turns of a conversation. Units: tokens of the prompt.

    `n_before` is a lower bound where the prompt was so long that it was not tokenised.
    """

    n_older: int
    summary: str  # empty where there is none: they are left out
    n_replaced: int  # of the older turns; the system's stay
    n_before: int
    n_after: int
    n_summaries: int  # generations that this request took


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a context allows. An answer with less than `n_room` does not fit. Units: tokens.

    `n_most` is what a prompt may have with that room: the context, or less.
    """

    n_ctx: int
    n_room: int
    n_summary: int
    n_most: int

    @classmethod
    def of(cls, n_ctx: int, max_tokens: int | None, n_most: int | None = None) -> "Bounds":
        """The bounds of a context, for an answer of at most so many tokens."""
        n_most = n_ctx if n_most is None else min(n_ctx, n_most)
        share = max(1, min(n_most // _SHARE, _SHARE_TOKENS_MAX))
        return cls(n_ctx, min(max_tokens or share, share), share, n_most)

    @property
    def n_target(self) -> int:
        """What the prompt is to shrink to, so that turns to come find room."""
        return self.n_most // 2

    def hold(self, n_prompt: int) -> bool:
        """Whether a prompt leaves the answer its room."""
        return n_prompt + self.n_room <= self.n_most


@dataclass(frozen=True, slots=True)
class Known:
    """A summary there is already, of the first `n_older` turns."""

    n_older: int = 0
    summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is to be done: a summary extended by each piece in turn, in place of the first `n_older` turns."""

    n_older: int
    summary: str = ""  # so far
    pieces: tuple[str, ...] = ()
    n_summary: int = 0  # tokens that each may have


def outline(turns: Turns, bounds: Bounds, known: Known, measure: Measure) -> Outline | None:
    """Decide what to do for a conversation that does not fit; None where nothing helps.

    1. A summary that is known does as it is, if the prompt fits with it.
    2. Else as few turns more are replaced as bring the prompt to its target; where none do, all before the
       last user's.
    3. A summary has what those and the answer's room leave. Where that is too little they are left out.
    """
    if known.summary:
        n_prompt = measure(shortened(turns, known.n_older, known.summary))
        if n_prompt is not None and bounds.hold(n_prompt):  # 1
            return Outline(n_older=known.n_older, summary=known.summary)
    places = beginnings(turns, known.n_older)
    if not places:
        return _bare(turns, known.n_older, measure)
    n_older = _place(turns, places, bounds, measure)  # 2
    n_prompt = measure(shortened(turns, n_older, _TOKEN))
    n_left = 0 if n_prompt is None else bounds.n_most - bounds.n_room - n_prompt
    n_summary = min(bounds.n_summary, n_left)
    if n_summary < min(_SUMMARY_TOKENS_MIN, bounds.n_summary):  # 3
        return _bare(turns, n_older, measure)
    return Outline(
        n_older=n_older,
        summary=known.summary,
        pieces=_pieces(turns[known.n_older : n_older], known, n_summary, bounds.n_ctx, measure),
        n_summary=n_summary,
    )


def shortened(turns: Turns, n_older: int, summary: str) -> Turns:
    """The conversation with its first `n_older` turns replaced; without a summary they are left out."""
    system = tuple(turn for turn in turns[:n_older] if turn["role"] == "system")
    stands_in: Turns = ({"role": "user", "content": OPENING + summary},) if summary else ()
    return (*system, *stands_in, *turns[n_older:])


def n_replaced(turns: Turns, n_older: int) -> int:
    """How many turns that `shortened` takes out."""
    return sum(turn["role"] != "system" for turn in turns[:n_older])


def beginnings(turns: Turns, n_older: int = 0) -> list[int]:
    """Where the recent turns may begin: at a user's, with more before it to replace than there was."""
    first = next((i for i in range(n_older, len(turns)) if turns[i]["role"] != "system"), len(turns))
    return [i for i in range(first + 1, len(turns)) if turns[i]["role"] == "user"]


def find_known(turns: Turns, recall: Recall) -> Known:
    """The furthest summary there is: one kept for these very turns, or one that stands among them."""
    digests = digests_of(turns)
    for n_older in reversed(beginnings(turns)):
        summary = recall(digests[n_older])
        if summary is not None:
            return Known(n_older, summary)
    for i, turn in enumerate(turns):
        if turn["role"] != "system":
            is_summary = turn["role"] == "user" and turn["content"].startswith(OPENING)
            return Known(i + 1, turn["content"].removeprefix(OPENING)) if is_summary else Known()
    return Known()


def digests_of(turns: Turns) -> list[bytes]:
    """For each number of turns, what tells so many of the first ones from all others."""
    running = hashlib.sha256()
    digests = [running.digest()]
    for turn in turns:
        content = turn["content"].encode()
        running.update(b"%s %d " % (turn["role"].encode(), len(content)) + content)
        digests.append(running.digest())
    return digests


def summarising(piece: str, earlier: str) -> Turns:
    """The prompt for a summary of what the earlier one says and of what came since."""
    parts = (f"{OPENING}{earlier}" if earlier else "", f"[Conversation]\n{piece}", _INSTRUCTION)
    return ({"role": "user", "content": "\n\n".join(filter(None, parts))},)


def _bare(turns: Turns, n_older: int, measure: Measure) -> Outline | None:
    """Leave the older turns out, if there are any and that helps."""
    if not n_older or measure(shortened(turns, n_older, "")) is None:
        return None
    return Outline(n_older=n_older)


def _place(turns: Turns, places: Sequence[int], bounds: Bounds, measure: Measure) -> int:
    """The first place from which the recent turns, with a whole summary, are within the target."""

    def is_within(n_places: int) -> bool:
        n_prompt = measure(shortened(turns, places[-n_places], _TOKEN))
        return n_prompt is not None and n_prompt + bounds.n_summary <= bounds.n_target

    return places[-max(1, _longest(len(places), is_within))]


def _pieces(turns: Turns, known: Known, n_summary: int, n_ctx: int, measure: Measure) -> tuple[str, ...]:
    """The turns as text, in one piece if it can be read so; else in pieces from the end on, oldest first.

    Each can be read with a summary before it, the first with the one that is known.
    """

    def fits(piece: str, earlier: str, n_others: int) -> bool:
        n_prompt = measure(summarising(piece, earlier))
        return n_prompt is not None and n_prompt + n_others <= n_ctx

    def fits_end(text: str, n_chars: int) -> bool:
        piece = text[-n_chars:]
        return fits(piece, _TOKEN, 2 * n_summary) and fits(piece, known.summary, n_summary)

    text = _transcript(turns)
    if fits(text, known.summary, n_summary):
        return (text,)
    pieces: list[str] = []
    while text and len(pieces) < PIECES_MAX:
        n_chars = _longest(len(text), partial(fits_end, text), first=n_ctx, grain=_PIECE_GRAIN)
        if not n_chars:
            break
        pieces.insert(0, text[-n_chars:])
        text = text[:-n_chars]
    return tuple(pieces)


def _transcript(turns: Turns) -> str:
    """What was said and by whom, as text."""
    said = ((turn["role"], turn["content"]) for turn in turns if turn["role"] in _SPEAKERS)
    return "\n\n".join(f"{_SPEAKERS[role]}: {content}" for role, content in said)


def _longest(n_max: int, fits: Callable[[int], bool], *, first: int = 1, grain: int = 0) -> int:
    """The greatest length that fits, 0 if none does; to within a part of it, if there is a `grain`.

    It is looked for by doubling from `first`: nothing is tried that is far longer than what fits.
    """
    low, high = 0, min(first, n_max)
    while fits(high):
        if high == n_max:
            return high
        low, high = high, min(2 * high, n_max)
    lengths = range(low, high, max(1, high // grain) if grain else 1)
    return lengths[bisect_left(lengths, True, lo=1, key=lambda n: not fits(n)) - 1]
