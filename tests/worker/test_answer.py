"""The bytes of an answer: what every chunk holds, and how a stream begins and ends."""

import warnings
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.generation import StopReason
from llm_worker.answer import ChunkEncoder, CompletionEncoder, Identity, Usage

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the client's own imports are not what is tested
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

IDENTITY = Identity(id="chatcmpl-1", created=1700000000, model="echo", system_fingerprint="fp_1")
USAGE = Usage(n_prompt=10, n_cached=4, n_completion=3)


def payloads(data: bytes) -> list[Any]:
    """The JSON of each event; a reader that splits text into lines sees the same."""
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    assert all(len(event.splitlines()) == 1 for event in events)
    return [orjson.loads(event.removeprefix("data: ")) for event in events if event != "data: [DONE]"]


def stream(encoder: ChunkEncoder, *texts: str, reason: StopReason = StopReason.STOP) -> bytes:
    return encoder.role() + b"".join(map(encoder.text, texts)) + encoder.ending(reason, USAGE)


def test_the_first_chunk_says_who_speaks_and_nothing_else() -> None:
    chunk = payloads(ChunkEncoder(IDENTITY, include_usage=False).role())[0]
    assert chunk["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]


def test_a_later_delta_holds_content_alone() -> None:
    chunk = payloads(ChunkEncoder(IDENTITY, include_usage=False).text("hi"))[0]
    assert chunk["choices"][0]["delta"] == {"content": "hi"}
    assert chunk["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize("reason", [StopReason.STOP, StopReason.LENGTH])
def test_the_finish_chunk_has_an_empty_delta_and_done_is_last(reason: StopReason) -> None:
    ending = ChunkEncoder(IDENTITY, include_usage=False).ending(reason, USAGE)
    assert ending.endswith(b"}\n\ndata: [DONE]\n\n")
    (chunk,) = payloads(ending)
    assert chunk["choices"][0]["delta"] == {}
    assert chunk["choices"][0]["finish_reason"] == reason


def test_what_is_constant_is_the_same_in_every_chunk() -> None:
    chunks = payloads(stream(ChunkEncoder(IDENTITY, include_usage=True), "a", "b"))
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert (chunk["id"], chunk["created"], chunk["model"]) == ("chatcmpl-1", 1700000000, "echo")
        assert chunk["system_fingerprint"] == "fp_1"


def test_without_being_asked_no_chunk_mentions_usage() -> None:
    chunks = payloads(stream(ChunkEncoder(IDENTITY, include_usage=False), "a"))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_asked_for_comes_once_behind_the_finish_chunk() -> None:
    chunks = payloads(stream(ChunkEncoder(IDENTITY, include_usage=True), "a"))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_stream_and_completion_give_the_same_usage() -> None:
    streamed = payloads(ChunkEncoder(IDENTITY, include_usage=True).ending(StopReason.STOP, USAGE))
    whole = orjson.loads(CompletionEncoder(IDENTITY).completion("a", StopReason.STOP, USAGE))
    assert streamed[-1]["usage"] == whole["usage"]


@given(st.text(), st.text())
def test_any_text_is_one_line_of_json(first: str, second: str) -> None:
    chunks = payloads(stream(ChunkEncoder(IDENTITY, include_usage=False), first, second))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", first, second, None]


@pytest.mark.parametrize("text", ["\u2028", "a\u2029b", "\x85", "\x0b\x0c\x1c\x1d\x1e", "\r\n", 'q"\\'])
def test_characters_that_end_a_line_for_some_readers_are_escaped(text: str) -> None:
    chunk = payloads(ChunkEncoder(IDENTITY, include_usage=False).text(text))[0]
    assert chunk["choices"][0]["delta"]["content"] == text


def test_the_openai_client_reads_every_chunk() -> None:
    for chunk in payloads(stream(ChunkEncoder(IDENTITY, include_usage=True), "a")):
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_the_openai_client_reads_a_completion() -> None:
    data = CompletionEncoder(IDENTITY).completion("a\u2028b", StopReason.LENGTH, USAGE)
    completion = ChatCompletion.model_validate_json(data, strict=True)
    assert completion.choices[0].message.content == "a\u2028b"
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.total_tokens == 13
