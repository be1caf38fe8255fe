"""The bytes of one chat completion: engine events in, chunks or one JSON out.

An answer writes to its ring as it goes, each piece together with the progress it stands for. What is constant
in a chunk is encoded once per answer, so that a token costs one JSON string and two concatenations.

Owns: the text of one answer that is not yet written.
Called by: `job.py`, on the event loop.
"""

from dataclasses import dataclass
from typing import Protocol

import orjson

from llm_engine.generation import Delta, StopReason
from llm_ingress.wire import Head, LaneRef
from llm_worker.compaction import Compaction
from llm_worker.progress import ChoiceProgress, Finish, Start, pack_finish, pack_start, pack_text, pack_tokens
from llm_worker.ring import Ring

DONE = b"data: [DONE]\n\n"

_STREAM_TYPE = ("content-type", "text/event-stream; charset=utf-8")
COMPACTION_HEADER = "x-compaction"

# JSON allows these raw inside a string, but readers that split text into lines break the line at them.
_LINE_BREAKS = tuple((c.encode(), b"\\u%04x" % ord(c)) for c in "\u0085\u2028\u2029")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str  # as the client named it
    system_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer."""

    n_prompt: int
    n_cached: int
    n_completion: int
    compaction: Compaction | None = None


class ChunkEncoder:
    """Encodes the chunks of one streamed answer."""

    def __init__(self, identity: Identity, *, include_usage: bool) -> None:
        self._opening = b"data: " + _opening(identity, "chat.completion.chunk")
        self._include_usage = include_usage
        self._closing = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._before_text = self._opening + b'[{"index":0,"delta":{"content":'
        self._after_text = b'},"logprobs":null,"finish_reason":null}]' + self._closing

    def role(self) -> bytes:
        """The first chunk: who speaks, and nothing said yet."""
        return self._choice(b'{"role":"assistant","content":""}', b"null")

    def text(self, text: str) -> bytes:
        """A chunk of new text."""
        return self._before_text + json_text(text) + self._after_text

    def ending(self, reason: StopReason, usage: Usage) -> bytes:
        """Everything after the last text: the finish chunk, usage if it was asked for, and [DONE]."""
        finish = self._choice(b"{}", json_text(reason))
        if not self._include_usage:
            return finish + DONE
        return finish + self._opening + b'[],"usage":' + usage_json(usage) + b"}\n\n" + DONE

    def _choice(self, delta: bytes, finish_reason: bytes) -> bytes:
        choice = b'[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]' % (delta, finish_reason)
        return self._opening + choice + self._closing


class CompletionEncoder:
    """Encodes one answer that is not streamed."""

    def __init__(self, identity: Identity) -> None:
        self._opening = _opening(identity, "chat.completion")

    def completion(self, text: str, reason: StopReason, usage: Usage) -> bytes:
        """The whole answer as one JSON object."""
        return b"".join(
            (
                self._opening,
                b'[{"index":0,"message":{"role":"assistant","content":',
                json_text(text),
                b',"refusal":null},"logprobs":null,"finish_reason":',
                json_text(reason),
                b'}],"usage":',
                usage_json(usage),
                b"}",
            )
        )


class Answer(Protocol):
    """One answer being written to its lane."""

    def begin(self) -> None:
        """The engine admitted it."""

    def delta(self, delta: Delta) -> None:
        """New tokens, with or without text."""

    def finish(self, reason: StopReason, usage: Usage) -> None:
        """The last token is known."""

    def record(self, reason: StopReason, usage: Usage) -> bytes:
        """What is left of it for the ingress to keep; nothing of most."""


class StreamedAnswer:
    """An answer sent chunk by chunk.

    The role chunk goes with the first token, so that nothing is sent while a failure can still be a status,
    and the time to the first byte is the time to the first token. `earlier` is what a lost attempt sent.
    """

    def __init__(
        self, ring: Ring, ref: LaneRef, encoder: ChunkEncoder, start: Start, *, earlier: ChoiceProgress | None
    ) -> None:
        self._ring = ring
        self._ref = ref
        self._encoder = encoder
        self._start = start
        self._is_new = earlier is None
        self._role_is_due = earlier is None or not earlier.tokens
        self._held = ""

    def begin(self) -> None:
        begin_stream(self._ring, self._ref, self._start, is_new=self._is_new)

    def delta(self, delta: Delta) -> None:
        self._held += delta.text
        # Text without tokens would leave no trace in the progress, and a continuation would repeat it.
        if delta.tokens:
            self._ring.body(self._ref, self._take_chunks(), pack_tokens(delta.tokens))

    def finish(self, reason: StopReason, usage: Usage) -> None:
        ending = self._encoder.ending(reason, usage)
        self._ring.body(self._ref, self._take_chunks() + ending, pack_ending(reason, usage))

    def record(self, reason: StopReason, usage: Usage) -> bytes:
        return b""

    def _take_chunks(self) -> bytes:
        """What may be sent now: the role if it is due, and a chunk of text if there is any."""
        text, self._held = self._held, ""
        chunk = self._encoder.text(text) if text else b""
        if self._role_is_due:
            self._role_is_due = False
            return self._encoder.role() + chunk
        return chunk


class WholeAnswer:
    """An answer sent as one JSON object at its end. Its text travels as progress until then."""

    def __init__(
        self,
        ring: Ring,
        ref: LaneRef,
        encoder: CompletionEncoder,
        start: Start,
        *,
        earlier: ChoiceProgress | None,
    ) -> None:
        self._ring = ring
        self._ref = ref
        self._encoder = encoder
        self._start = start
        self._is_new = earlier is None
        self._pieces = [] if earlier is None else list(earlier.pieces)
        self._held = ""

    def begin(self) -> None:
        # The head waits for the end: until then a failure can still be a status of its own.
        if self._is_new:
            self._ring.body(self._ref, b"", pack_start(self._start))

    def delta(self, delta: Delta) -> None:
        self._pieces.append(delta.text)
        if delta.tokens:
            self._ring.body(self._ref, b"", pack_tokens(delta.tokens) + pack_text(delta.text))

    def finish(self, reason: StopReason, usage: Usage) -> None:
        completion = self._encoder.completion("".join(self._pieces), reason, usage)
        self._ring.head(self._ref, json_head(200, _compaction_headers(self._start.compaction)))
        self._ring.body(self._ref, completion, pack_ending(reason, usage))

    def record(self, reason: StopReason, usage: Usage) -> bytes:
        return b""


def begin_stream(ring: Ring, ref: LaneRef, start: Start, *, is_new: bool) -> None:
    """Send what comes before the first token of an answer that is streamed."""
    ring.head(ref, Head(status=200, headers=(_STREAM_TYPE, *_compaction_headers(start.compaction))))
    if is_new:
        ring.body(ref, b"", pack_start(start))


def json_head(status: int, headers: tuple[tuple[str, str], ...] = ()) -> Head:
    """The head of an answer that is one JSON body. Its length is for the ingress to say, and only once."""
    return Head(status=status, headers=(("content-type", "application/json"), *headers))


def json_text(value: object) -> bytes:
    """JSON in which no reader finds a line break."""
    encoded = orjson.dumps(value)
    if encoded.isascii():
        return encoded
    for character, escape in _LINE_BREAKS:
        encoded = encoded.replace(character, escape)
    return encoded


def _opening(identity: Identity, kind: str) -> bytes:
    """The constant fields of a chunk or completion, up to the value of its choices."""
    constant = json_text(
        {
            "id": identity.id,
            "object": kind,
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": identity.system_fingerprint,
        }
    )
    return constant.removesuffix(b"}") + b',"choices":'


def usage_json(usage: Usage) -> bytes:
    """Tokens as the API counts them, and what became of the conversation if it was shortened."""
    counts: dict[str, int | dict[str, int]] = {
        "prompt_tokens": usage.n_prompt,
        "completion_tokens": usage.n_completion,
        "total_tokens": usage.n_prompt + usage.n_completion,
        "prompt_tokens_details": {"cached_tokens": usage.n_cached},
    }
    if usage.compaction is not None:
        counts["compaction"] = _facts_of(usage.compaction)
    return orjson.dumps(counts)


def _compaction_headers(compaction: Compaction | None) -> tuple[tuple[str, str], ...]:
    """The header of an answer to a conversation that was shortened. Source: RFC 9651, dictionaries."""
    if compaction is None:
        return ()
    return ((COMPACTION_HEADER, ", ".join(f"{name}={n}" for name, n in _facts_of(compaction).items())),)


def _facts_of(compaction: Compaction) -> dict[str, int]:
    """What a client is told."""
    return {
        "turns_replaced": compaction.n_replaced,
        "tokens_before": compaction.n_before,
        "tokens_after": compaction.n_after,
        "summaries": compaction.n_summaries,
    }


def pack_ending(reason: StopReason, usage: Usage) -> bytes:
    """The progress that goes with an answer's last byte."""
    return pack_finish(Finish(reason=reason, n_cached=usage.n_cached))
