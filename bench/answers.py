"""What a client saw of one streamed answer: when each piece of its text came, and the usage.

While a load runs, what is read is only stamped; it is taken apart once the load is over, so that clients cost
little when they are many. Pure: no socket, no clock.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import h11

PATH = "/v1/chat/completions"
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, or a refusal. Units: seconds of the clients' clock, tokens."""

    status: int
    asked_at: float  # when it was sent, or due
    text_at: tuple[float, ...]  # each event with text in it; one is a token, seldom more
    ended_at: float
    text: str
    n_prompt: int
    n_cached: int  # of the prompt, and not computed
    n_tokens: int

    @property
    def is_refused(self) -> bool:
        return self.status != 200

    @property
    def first_s(self) -> float:
        """From the request to the first text, or to the end of an answer that has none."""
        return (self.text_at[0] if self.text_at else self.ended_at) - self.asked_at

    @property
    def last_s(self) -> float:
        return self.ended_at - self.asked_at

    @property
    def gaps_s(self) -> list[float]:
        """Between one text and the next."""
        return [later - earlier for earlier, later in pairwise(self.text_at)]


class Exchange:
    """A request as bytes, and what was read in answer to it so far."""

    def __init__(self, host: str, path: str, body: Mapping[str, Any], asked_at: float) -> None:
        self.asked_at = asked_at
        self.sent, self._connection = _request(host, path, body)
        self.reads: list[tuple[float, bytes]] = []  # when, what; an empty one is the server's end
        self.is_left = False  # by the client, before the end

    def answer(self) -> Answer:
        """Take it apart, once.

        Raises: RuntimeError for an answer that failed in mid-stream, or ended early unless its client left.
        """
        status, ended_at, data = 0, self.asked_at, []
        lines = _Lines()
        try:
            for ended_at, event in self._events():
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    data += [(ended_at, line[6:]) for line in lines.feed(event.data) if line[:6] == b"data: "]
        except h11.RemoteProtocolError as error:
            raise RuntimeError(f"an answer was cut short: {error}") from error
        is_done = bool(data) and data[-1][1] == DONE
        if status == 200 and not is_done and not self.is_left:
            raise RuntimeError(f"an answer was not complete; its end is {data[-1:]}")
        return _answer(status, self.asked_at, ended_at, data[:-1] if is_done else data)

    def served(self) -> Answer:
        """As `answer`, of a request that must not be refused. Raises: RuntimeError if it was."""
        answer = self.answer()
        if answer.is_refused:
            raise RuntimeError(f"a request was refused with {answer.status}: {self.reads[0][1][-300:]!r}")
        return answer

    def _events(self) -> Iterator[tuple[float, Any]]:
        """What HTTP makes of the reads, each with its time, as far as the end of the message."""
        for at, data in self.reads:
            self._connection.receive_data(data)
            while (event := self._connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                yield at, event
                if isinstance(event, h11.EndOfMessage):
                    return


def _request(host: str, path: str, body: Mapping[str, Any]) -> tuple[bytes, h11.Connection]:
    """A streaming request, the last of its connection."""
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    headers = [("Host", host), ("Content-Type", "application/json"), ("Connection", "close")]
    head = h11.Request(method="POST", target=path, headers=[*headers, ("Content-Length", str(len(content)))])
    connection = h11.Connection(h11.CLIENT)
    parts = [connection.send(event) for event in (head, h11.Data(data=content), h11.EndOfMessage())]
    return b"".join(part or b"" for part in parts), connection


class _Lines:
    """Lines of bytes that come in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        """Return the lines that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.rstrip(b"\r") for line in lines]


def _answer(status: int, asked_at: float, ended_at: float, data: list[tuple[float, bytes]]) -> Answer:
    """Put together what the chunks of a completion say. Raises: RuntimeError for an error among them."""
    texts: list[tuple[float, str]] = []
    usage: dict[str, Any] = {}
    for at, line in data:
        chunk = json.loads(line)
        if "error" in chunk:
            raise RuntimeError(f"an answer failed: {chunk['error']}")
        usage = chunk.get("usage") or usage
        texts += [(at, text) for choice in chunk["choices"] if (text := _text(choice["delta"]))]
    return Answer(
        status=status,
        asked_at=asked_at,
        text_at=tuple(at for at, _ in texts),
        ended_at=ended_at,
        text="".join(text for _, text in texts),
        n_prompt=usage.get("prompt_tokens", 0),
        n_cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        n_tokens=usage.get("completion_tokens", 0),
    )


def _text(delta: Mapping[str, Any]) -> str:
    """What a person would see appear; llama-server keeps thoughts in a field of their own."""
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")
