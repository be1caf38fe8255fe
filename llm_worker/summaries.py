"""Summaries that were written, by the turns they stand for.

A client of `/v1` sends its whole conversation every time. The summary of what no longer fits is found here,
so that the next turn only needs what is new summarised, and its prompt begins as the last one did. Only who
sends the same turns finds a summary of them.

Owns: the summaries of one worker.
Touched by: `worker.py`, on the event loop; the preparation thread looks up.
"""

SUMMARIES_MAX = 1024  # of at most some 2 KiB each


class Summaries:
    """So many summaries, those that were of no use for longest out first."""

    def __init__(self, n_max: int = SUMMARIES_MAX) -> None:
        self._n_max = n_max
        self._by_digest: dict[bytes, str] = {}

    def recall(self, digest: bytes) -> str | None:
        """The summary of the turns with this digest. Thread: any; it is one look-up."""
        return self._by_digest.get(digest)

    def keep(self, digest: bytes, summary: str) -> None:
        """Keep a summary that was written, or found again."""
        self._by_digest.pop(digest, None)
        self._by_digest[digest] = summary
        if len(self._by_digest) > self._n_max:
            del self._by_digest[next(iter(self._by_digest))]
