"""Streams over the real product: their events, their bytes, and that they say what whole answers say."""

import asyncio
import random
from collections.abc import AsyncIterator

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.serve.client import STORY, Client, Said, asking, chat, deltas, events
from tests.serve.process import LlmServe

pytestmark = pytest.mark.model

EMOJI = "Reply with only emoji: happy, sad, party."  # each of them takes several tokens
JAPANESE = "Repeat exactly: 日本語のテキスト"
NOTHING = "word " * 40  # answered by the end of generation as the first token
LINES = "List three colours, one per line."

QUESTIONS = [
    pytest.param(chat("hi"), id="ends by itself"),
    pytest.param(chat(STORY, max_tokens=24), id="meets its limit"),
    pytest.param(chat("hi", max_tokens=1), id="one token"),
    pytest.param(chat(EMOJI, max_tokens=7), id="ends in half a character"),
    pytest.param(chat("hi", stop=["Hello"]), id="stops before its first text"),
    pytest.param(chat("hi", stop=["assist you"]), id="stops midway"),
    pytest.param(chat(NOTHING), id="says nothing"),
    pytest.param(chat(LINES, stop="\n3."), id="stops at a line"),
    pytest.param(chat(STORY, max_tokens=16, temperature=1, seed=5), id="drawn by chance"),
]


@pytest.fixture
async def server(roomy: LlmServe) -> AsyncIterator[LlmServe]:
    yield roomy
    await roomy.quiet()


# --- what an answer says --------------------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS)
async def test_a_stream_says_what_the_whole_answer_says(client: Client, question: dict[str, object]) -> None:
    asked = {**question, "stream": True, "stream_options": {"include_usage": True}}
    stream, whole = await asyncio.gather(client.post(asked), client.post(question))
    assert Said.streamed(events(stream.text)) == Said.whole(whole.json())


async def test_no_text_of_a_stop_string_ever_leaks(client: Client) -> None:
    text = (await client.whole("hi")).text
    stops = [text[start : start + n] for start in range(0, len(text), 5) for n in (1, 5)]
    answers = await asyncio.gather(*(client.streamed("hi", stop=stop) for stop in stops))
    assert [answer.text for answer in answers] == [text[: text.index(stop)] for stop in stops]
    assert {answer.finish_reason for answer in answers} == {"stop"}


async def test_what_only_looks_like_a_stop_string_is_sent(client: Client) -> None:
    plain = await client.streamed("hi")
    assert await client.streamed("hi", stop=["Hello?", "today!", "?!"]) == plain


@pytest.mark.parametrize("question", [EMOJI, JAPANESE])
async def test_each_chunk_holds_whole_characters(client: Client, question: str) -> None:
    limits = range(1, 25, 4)
    streams = await asyncio.gather(*(client.chunks(question, max_tokens=n) for n in limits))
    longest = "".join(deltas(streams[-1]))
    assert not longest.isascii()
    for chunks in streams:
        assert "\ufffd" not in "".join(deltas(chunks))
        assert longest.startswith("".join(deltas(chunks)))


# --- its chunks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 24])
async def test_usage_comes_only_where_it_is_asked_for(client: Client, max_tokens: int) -> None:
    for chunk in await client.chunks("hi", max_tokens=max_tokens):
        assert chunk["choices"]
        assert chunk.get("usage") is None


@pytest.mark.parametrize("max_tokens", [1, 24])
async def test_usage_is_one_chunk_more_with_the_numbers_of_the_whole_answer(
    client: Client, max_tokens: int
) -> None:
    whole = await client.whole("hi", max_tokens=max_tokens)
    *others, finish, last = await client.chunks(
        "hi", max_tokens=max_tokens, stream_options={"include_usage": True}
    )
    assert last["choices"] == []
    usage = last["usage"]
    assert set(usage.pop("prompt_tokens_details")) == {"cached_tokens"}
    assert usage == whole.usage
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert finish["choices"][0]["finish_reason"] == whole.finish_reason
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in (*others, finish))


@pytest.mark.parametrize("stream", [{"stream": False}, {"stream": None}, {}])
async def test_stream_options_without_a_stream_are_refused(client: Client, stream: dict[str, object]) -> None:
    refused = await client.post(chat("hi", stream_options={"include_usage": True}, **stream))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize("question", QUESTIONS[:6])
async def test_the_first_chunk_says_who_speaks_and_the_last_why_it_ended(
    client: Client, question: dict[str, object]
) -> None:
    chunks = events((await client.post({**question, "stream": True})).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(choice["delta"].keys() == {"content"} for choice in choices[1:-1])
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] in ("stop", "length")
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


async def test_every_chunk_is_of_one_answer_and_of_the_sdks_shape(client: Client) -> None:
    chunks = await client.chunks("hi", stream_options={"include_usage": True})
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    named = ("id", "object", "created", "model", "system_fingerprint")
    assert len({tuple(chunk[name] for name in named) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["model"] == "smollm2"


@pytest.mark.parametrize("n_rounds", [2, pytest.param(25, marks=pytest.mark.slow)])
async def test_every_stream_ends_with_one_finish_reason(client: Client, n_rounds: int) -> None:
    chance = random.Random(4)
    questions = ("Reply with nothing", NOTHING, "hi", EMOJI, JAPANESE)
    for _ in range(n_rounds):
        asked = [
            client.chunks(
                chance.choice(questions),
                max_tokens=chance.randint(1, 8),
                temperature=chance.choice((0, 1)),
                seed=chance.getrandbits(32),
                stop=chance.choice((None, "e", ["🌟", " "])),
            )
            for _ in range(8)
        ]
        for chunks in await asyncio.gather(*asked):
            assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 1


async def test_the_sdk_streams_and_collects(sdk: openai.AsyncOpenAI, client: Client) -> None:
    stream = await sdk.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "hi"}], temperature=0, stream=True
    )
    streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    whole = await sdk.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "hi"}], temperature=0
    )
    assert streamed == whole.choices[0].message.content == (await client.whole("hi")).text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


# --- its bytes ------------------------------------------------------------------------------------------


async def test_the_last_bytes_are_done_and_a_clean_end(server: LlmServe) -> None:
    async with asking(server, chat("hi", stream=True)) as connection:
        status, headers = await connection.head()
        body = b"".join([piece async for piece in connection.pieces()])
        assert await connection.rest() == b""
    assert status == 200
    assert body.endswith(b"}\n\ndata: [DONE]\n\n")
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["transfer-encoding"] == "chunked"
    assert not headers.keys() & {"content-length", "content-encoding"}


async def test_each_event_is_one_line_whatever_the_answer_holds(client: Client) -> None:
    response = await client.post(chat(LINES, stream=True))
    assert "\n" in "".join(deltas(events(response.text)))
    lines = response.text.splitlines()
    assert all(line.startswith("data: ") for line in lines[::2])
    assert set(lines[1::2]) == {""}


async def test_each_token_is_sent_while_the_next_is_computed(server: LlmServe) -> None:
    async with asking(server, chat(STORY, stream=True, max_tokens=48)) as connection:
        await connection.head()
        pieces = connection.pieces()
        await anext(pieces)
        assert server.health()["lanes"]["streaming"] == 1
        n_later = len([piece async for piece in pieces if piece.endswith(b"\n\n")])
    # The finish comes with the last token; a busy event loop may join a few.
    assert n_later > 36


# --- what cannot be answered ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "messages"),
        ({"n": 2}, 400, "n"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"max_tokens": 0}, 400, "max_tokens"),
    ],
)
async def test_what_is_known_beforehand_is_a_status_whether_streamed_or_not(
    client: Client, fields: dict[str, object], status: int, param: str
) -> None:
    streamed = await client.post(chat("hi", stream=True) | fields)
    whole = await client.post(chat("hi", stream=False) | fields)
    assert streamed.status_code == whole.status_code == status
    assert streamed.json() == whole.json()
    assert whole.json()["error"]["param"] == param
    assert whole.headers["content-type"] == streamed.headers["content-type"] == "application/json"
