"""Bytes of tokens to text that may be sent, with nothing of a stop string in it.

Text leaves in whole characters: the start of one is held until its rest has come, and bytes that can never be
part of one are left out. What could still become a stop string is held too, and nothing else. Both depend on
the bytes alone, never on how they were split into pieces, so feeding a continuation the tokens an earlier
attempt has sent, and dropping the text, puts it where that attempt was.
Owns: the held-back bytes and text of one generation.
Called by: the scheduler's sequences, once for each token, on the step thread.
"""

import codecs
from collections import deque
from collections.abc import Iterable


class TextAssembler:
    """The text of one generation. Call `flush` when it ended otherwise than by a stop string.

    The stop string that is complete first ends the text, and of several complete at once the longest: what
    comes before it is the answer. Empty stop strings are ignored.
    """

    __slots__ = ("_bytes", "_node", "_stops", "_text", "stopped")

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stops = _StopStrings(stop) if stop else None
        self._bytes = b""  # the start of a character
        self._text = ""  # the start of a stop string
        self._node = 0  # where in the stop strings `_text` leads
        self.stopped = False

    def feed(self, piece: bytes) -> str:
        """The text that these bytes make safe to send."""
        assert not self.stopped, "fed after a stop string"
        # "ignore" leaves out what is no part of a character, and what is not decoded is the start of one.
        data = self._bytes + piece
        text, n_decoded = codecs.utf_8_decode(data, "ignore", False)
        self._bytes = data[n_decoded:]
        return text if self._stops is None else self._before_stop(text, self._stops)

    def flush(self) -> str:
        """The text held back, since no stop string will come of it. Half a character is left out."""
        text, self._text, self._node, self._bytes = self._text, "", 0, b""
        return text

    def _before_stop(self, text: str, stops: "_StopStrings") -> str:
        node = self._node
        for n_read, character in enumerate(text, start=1):
            node = stops.follow(node, character)
            if n_stop := stops.n_matched[node]:
                self.stopped = True
                known = self._text + text[:n_read]
                self._text = ""
                return known[: len(known) - n_stop]
        self._node = node
        known = self._text + text
        n_safe = len(known) - stops.n_held[node]
        self._text = known[n_safe:]
        return known[:n_safe]


class _StopStrings:
    """Several strings looked for at once, one character at a time, however long and many they are.

    A node stands for the longest end of the text so far that starts a stop string; node 0 for none.
    Source: Aho and Corasick, "Efficient string matching", 1975.
    """

    __slots__ = ("_fallback", "_next", "n_held", "n_matched")

    def __init__(self, stop: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.n_held = [0]  # characters of the text that the node stands for
        self.n_matched = [0]  # of the longest stop string that ends at the node
        for string in stop:
            self._insert(string)
        self._fallback = [0] * len(self._next)
        self._link()

    def follow(self, node: int, character: str) -> int:
        """The node after one more character."""
        while node and character not in self._next[node]:
            node = self._fallback[node]
        return self._next[node].get(character, 0)

    def _insert(self, string: str) -> None:
        node = 0
        for depth, character in enumerate(string, start=1):
            child = self._next[node].setdefault(character, len(self._next))
            if child == len(self._next):
                self._next.append({})
                self.n_held.append(depth)
                self.n_matched.append(0)
            node = child
        self.n_matched[node] = self.n_held[node]

    def _link(self) -> None:
        """Give each node, the shallow ones first, the node of the next shorter end of its text."""
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self._next[node].items():
                fallback = self.follow(self._fallback[node], character)
                self._fallback[child] = fallback
                self.n_matched[child] = self.n_matched[child] or self.n_matched[fallback]
                waiting.append(child)
