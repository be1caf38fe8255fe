"""What one end of a connection has yet to send, and in which order.

Short messages first, in the order they were put; a long one goes frame by frame behind them, long ones of
several lanes in turn, so that a CANCEL never waits for somebody else's 10 MiB. Within one lane, what was put
first is sent first.

Owns: the unsent frames of one connection. Pure. Called by: `control.py` and the worker's `remote.py`, whose
writer takes one WebSocket message after the other.
"""

from collections import OrderedDict, deque

from llm_ingress.frames import MAX_PAYLOAD_BYTES, Frame, cut, pack_body
from llm_ingress.payloads import pack_payload
from llm_ingress.wire import Body, LaneRef, Message

# A WebSocket message may have so many bytes; one ends behind the frame with which it is full.
MAX_MESSAGE_BYTES = 256 * 1024
FULL_MESSAGE_BYTES = 128 * 1024
# A BODY above it is left to the general way, which may cut it.
_SHORT_BODY_BYTES = MAX_PAYLOAD_BYTES - 4


class Outbox:
    """The unsent frames of one connection."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._short: list[bytes] = []
        self._long: OrderedDict[int, deque[Frame]] = OrderedDict()  # by lane id; first is next

    def put(self, message: Message) -> None:
        """Send a message after those of its lane, and soon."""
        packed = pack_payload(message)
        frames = cut(packed)
        lane_id = packed.ref.lane_id
        self.n_bytes += sum(len(header) + len(payload) for header, payload in frames)
        if lane_id in self._long:
            self._long[lane_id].extend(frames)
        elif len(frames) > 1:
            self._long[lane_id] = deque(frames)
        else:
            self._short.append(b"".join(frames[0]))

    def put_body(self, ref: LaneRef, data: bytes, progress: bytes) -> None:
        """Send a BODY. Cheap: this runs for every token."""
        if len(data) + len(progress) > _SHORT_BODY_BYTES or ref[0] in self._long:
            self.put(Body(ref, data, progress))
            return
        frame = pack_body(ref, data, progress)
        self.n_bytes += len(frame)
        self._short.append(frame)

    def take(self) -> bytes:
        """Return the next WebSocket message, whole frames; empty if there is nothing to send."""
        if self.n_bytes <= FULL_MESSAGE_BYTES and not self._long:
            message = b"".join(self._short)
            self._short.clear()
        else:
            message = self._fill()
        self.n_bytes -= len(message)
        return message

    def _fill(self) -> bytes:
        parts: list[bytes | memoryview] = []
        n_bytes = n_short = 0
        for frame in self._short:
            if n_bytes >= FULL_MESSAGE_BYTES:
                break
            parts.append(frame)
            n_bytes += len(frame)
            n_short += 1
        del self._short[:n_short]
        while self._long and n_bytes < FULL_MESSAGE_BYTES:
            header, payload = self._next_long()
            parts += (header, payload)
            n_bytes += len(header) + len(payload)
        return b"".join(parts)

    def _next_long(self) -> Frame:
        """Take a frame of the lane whose turn it is."""
        lane_id, frames = next(iter(self._long.items()))
        frame = frames.popleft()
        if frames:
            self._long.move_to_end(lane_id)
        else:
            del self._long[lane_id]
        return frame
