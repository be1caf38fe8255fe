"""Conversations beyond the context, over the real product: shortened and told so, or refused."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.serve.client import MODEL, Client, Json, deltas, events
from tests.serve.process import LlmServe, spotless

pytestmark = pytest.mark.model

N_CTX = 256
TOLD = {"turns_replaced", "tokens_before", "tokens_after", "summaries"}


@pytest.fixture(scope="module")
def shortening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServe]:
    """A server that shortens every conversation, with one slot of few tokens."""
    log = tmp_path_factory.mktemp("shortening") / "log"
    flags = ("--max-inflight", "1", "--ctx-size", str(N_CTX), "--threads", "1", "--compaction", "summary")
    with spotless(*flags, log=log) as server:
        yield server


@pytest.fixture
async def server(shortening: LlmServe) -> AsyncIterator[LlmServe]:
    yield shortening
    await shortening.quiet()


def outgrown(**fields: Any) -> Json:
    """The body of a question after a history of some 300 tokens."""
    history = [
        {"role": role, "content": f"{says} {i}, which sleeps in a box near the old stove every day."}
        for i in range(6)
        for role, says in (("user", "I have a duck, number"), ("assistant", "How lovely is your duck"))
    ]
    last = {"role": "user", "content": "Count from one to a thousand."}
    return {"model": MODEL, "temperature": 0, "messages": [*history, last], "max_tokens": 6, **fields}


def header(headers: Any) -> dict[str, int]:
    """The header that tells of it, taken apart."""
    items = (item.split("=") for item in headers["x-compaction"].split(", "))
    return {name: int(n) for name, n in items}


async def test_it_is_told_in_header_and_usage_streamed_or_not(client: Client) -> None:
    whole = await client.post(outgrown())
    streamed = await client.post(outgrown(stream=True, stream_options={"include_usage": True}))
    assert (whole.status_code, streamed.status_code) == (200, 200)
    *chunks, usage = events(streamed.text)
    (choice,) = whole.json()["choices"]
    assert "".join(deltas(chunks)) == choice["message"]["content"]
    for response, counts in ((whole, whole.json()["usage"]), (streamed, usage["usage"])):
        told = counts["compaction"]
        assert told == header(response.headers)
        assert set(told) == TOLD
        assert told["tokens_after"] == counts["prompt_tokens"] <= N_CTX // 2 < N_CTX < told["tokens_before"]


async def test_a_conversation_that_fits_is_not_touched(client: Client) -> None:
    response = await client.post(outgrown(messages=[{"role": "user", "content": "hi"}]))
    assert "x-compaction" not in response.headers
    assert "compaction" not in response.json()["usage"]


async def test_a_client_may_refuse_it(client: Client) -> None:
    refused = await client.post(outgrown(truncation="disabled"))
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("value", ["middle", 1, []])
async def test_another_value_is_a_400_that_names_it(client: Client, value: object) -> None:
    refused = await client.post(outgrown(truncation=value))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "truncation"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_last_turn_that_does_not_fit_by_itself_is_a_400(client: Client, stream: bool) -> None:
    body = outgrown(stream=stream)
    body["messages"][-1]["content"] = "word " * N_CTX
    refused = await client.post(body)
    assert refused.status_code == 400
    assert json.loads(refused.text)["error"]["code"] == "context_length_exceeded"


async def test_an_answer_after_it_ends_at_its_limit_or_at_the_edge_of_the_context(client: Client) -> None:
    limited = (await client.post(outgrown(max_tokens=3))).json()
    assert limited["usage"]["completion_tokens"] <= 3
    unlimited = (await client.post(outgrown(max_tokens=10 * N_CTX))).json()
    assert unlimited["usage"]["total_tokens"] <= N_CTX
