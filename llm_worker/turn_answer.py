"""The bytes of one turn of a conversation: engine events in, small numbered events out.

    data: {"token":"Hel","seq":0}
    data: {"token":"lo","seq":1}
    data: {"seq":2,"finish_reason":"stop","usage":{...}}

The last event goes with the record of the turn: the client gets it once that is kept.
The text travels as progress too: another worker needs it for the record, and numbers on from its pieces.

Owns: the text of one turn. Called by: `job.py`, on the event loop.
"""

from llm_engine.generation import Delta, StopReason
from llm_ingress.turns import pack_turn
from llm_ingress.wire import LaneRef
from llm_worker.answer import Usage, begin_stream, json_text, pack_ending, usage_json
from llm_worker.conversation import Said, Turn, record_of
from llm_worker.progress import ChoiceProgress, Start, pack_text, pack_tokens
from llm_worker.ring import Ring


class TurnAnswer:
    """One turn's answer. `earlier` is what a lost attempt sent."""

    def __init__(
        self, ring: Ring, ref: LaneRef, turn: Turn, start: Start, *, earlier: ChoiceProgress | None
    ) -> None:
        self._ring = ring
        self._ref = ref
        self._turn = turn
        self._start = start
        self._is_new = earlier is None
        self._pieces = [] if earlier is None else list(earlier.pieces)  # one an event
        self._held = ""

    def begin(self) -> None:
        begin_stream(self._ring, self._ref, self._start, is_new=self._is_new)

    def delta(self, delta: Delta) -> None:
        self._held += delta.text
        # Text without tokens would leave no trace in the progress, and a continuation would repeat it.
        if delta.tokens:
            self._send(pack_tokens(delta.tokens))

    def finish(self, reason: StopReason, usage: Usage) -> None:
        self._send(b"", pack_ending(reason, usage))

    def record(self, reason: StopReason, usage: Usage) -> bytes:
        answer = Said("assistant", "".join(self._pieces))
        closing = b'data: {"seq":%d,"finish_reason":%b,"usage":%b}\n\n' % (
            len(self._pieces),
            json_text(reason),
            usage_json(usage),
        )
        does, said = self._turn.left(self._start.compaction)
        return pack_turn(record_of(does, (*said, answer), closing=closing))

    def _send(self, before: bytes, after: bytes = b"") -> None:
        """Send the text that is there as an event, with the progress it stands for."""
        text, self._held = self._held, ""
        event = b""
        if text:
            event = b'data: {"token":%b,"seq":%d}\n\n' % (json_text(text), len(self._pieces))
            self._pieces.append(text)
        self._ring.body(self._ref, event, before + pack_text(text) + after)
