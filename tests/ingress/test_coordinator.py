"""The coordinator's API over a real hypercorn and the real gateway; only the worker is scripted."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from llm_ingress.conversations import Conversations
from llm_ingress.gateway import AtCap, Budgets, Gateway, GatewayConfig
from llm_ingress.history import HistoryConfig
from llm_ingress.public import PublicConfig
from llm_ingress.tenants import Tenancy, TenantBy
from llm_ingress.turns import TurnRecord, pack_turn, unpack_asked
from llm_ingress.wire import FinishReason, Grant, Head
from tests.ingress.scripted import JSON_HEAD, ScriptedWorker, Server, serving

INFER = "/coordinator/infer"
ID = "550e8400-e29b-41d4-a716-446655440000"
OTHER_ID = "650e8400-e29b-41d4-a716-446655440000"
CLOSING = b'data: {"seq":1,"finish_reason":"stop","usage":{}}\n\n'


def turn(prompt: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"conversation_id": ID, "prompt": prompt, "model": "m", "max_tokens": 5, **fields}


def token(text: str, seq: int = 0) -> bytes:
    return b"data: " + json.dumps({"token": text, "seq": seq}).encode() + b"\n\n"


@dataclass(slots=True, eq=False)
class Ring:
    """A server, its worker, and a client."""

    server: Server
    worker: ScriptedWorker
    client: httpx.AsyncClient

    def ask(self, prompt: str = "hi", **fields: Any) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.client.post(INFER, json=turn(prompt, **fields)))

    def answer(self, grant: Grant, text: str = "hello") -> None:
        self.worker.begin(grant)
        self.worker.say(grant, token(text))
        self.leave(grant, text)

    def leave(self, grant: Grant, text: str) -> None:
        record = pack_turn(TurnRecord(closing=CLOSING, content=text.encode()))
        self.worker.end(grant, record=record)
        self.worker.offer(4)

    async def talk(self, prompt: str = "hi", text: str = "hello", **fields: Any) -> list[bytes]:
        """A whole turn; returns what its worker was told of those before it."""
        asked = self.ask(prompt, **fields)
        grant = await self.worker.granted()
        self.answer(grant, text)
        response = await asked
        assert (response.status_code, response.content) == (200, token(text) + CLOSING)
        return list(unpack_asked(grant.body).history)

    async def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = (await self.client.get("/coordinator/stats")).json()
        return stats

    async def until(self, field: str, value: int) -> None:
        async with asyncio.timeout(5):
            while (await self.stats())[field] != value:
                pass

    async def has_sessions(self, n: int) -> None:
        """Wait until so many are counted to the budget."""
        async with asyncio.timeout(5):
            while (await self.stats())["budgets"]["sessions"] != n:
                pass


@asynccontextmanager
async def ringing(
    *, history: HistoryConfig | None = None, public: PublicConfig | None = None, **bounds: Any
) -> AsyncIterator[Ring]:
    gateway = Gateway(GatewayConfig(**bounds))
    async with (
        serving(gateway, public=public, conversations=Conversations(history)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=10) as client,
    ):
        yield Ring(server, ScriptedWorker(gateway), client)


@pytest.fixture
async def ring() -> AsyncIterator[Ring]:
    async with ringing() as ring:
        yield ring


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


# --- answers


async def test_a_turn_reaches_a_worker_as_it_was_asked_and_ends_with_what_its_record_says(ring: Ring) -> None:
    asked = ring.ask("Who?", temperature=0)
    grant = await ring.worker.granted()
    assert grant.path == INFER
    request = unpack_asked(grant.body)
    assert json.loads(request.request) == turn("Who?", temperature=0)
    assert request.history == ()
    ring.answer(grant)
    response = await asked
    assert response.headers["content-type"] == "text/event-stream"
    assert response.content == token("hello") + CLOSING
    assert await ring.server.counts() == (1, 1, 0, 0)


async def test_a_turn_carries_what_those_before_it_left_and_no_other_conversations(ring: Ring) -> None:
    assert await ring.talk(text="one") == []
    assert await ring.talk(text="two") == [b"one"]
    assert await ring.talk(conversation_id=OTHER_ID, text="other") == []
    assert await ring.talk(text="three", conversation_id=ID.upper()) == [b"one", b"two"]


async def test_the_end_comes_only_when_the_turn_is_kept(ring: Ring) -> None:
    asked = ring.ask()
    grant = await ring.worker.granted()
    ring.worker.begin(grant)
    ring.worker.say(grant, token("a"))
    ring.worker.end(grant, record=b"")  # a worker that leaves none
    response = await asked
    assert response.content.startswith(token("a"))
    error = json.loads(response.content.removeprefix(token("a")).removeprefix(b"data: "))["error"]
    assert "could not be kept" in error["message"]
    ring.worker.offer(4)
    assert await ring.talk() == []


# --- turns that are not kept


async def test_a_failed_turn_leaves_the_history_as_it_was(ring: Ring) -> None:
    await ring.talk(text="one")
    for is_begun in (False, True):
        asked = ring.ask()
        grant = await ring.worker.granted()
        if is_begun:
            ring.worker.begin(grant)
            ring.worker.say(grant, token("half"))
            await ring.stats()  # by when the client has it
        ring.worker.fail(grant)
        ring.worker.offer(4)
        response = await asked
        assert response.status_code == (200 if is_begun else 502)
        assert b"worker_failed" in response.content
    assert await ring.talk(text="two") == [b"one"]


async def test_a_turn_whose_client_leaves_leaves_the_history_as_it_was(ring: Ring) -> None:
    await ring.talk(text="one")
    asked = ring.ask()
    grant = await ring.worker.granted()
    ring.worker.begin(grant)
    ring.worker.say(grant, token("half"))
    asked.cancel()
    assert await ring.worker.cancelled() == grant.ref
    ring.worker.offer(4)
    assert await ring.talk(text="two") == [b"one"]
    assert await ring.server.counts() == (3, 2, 1, 0)


async def test_a_refusal_by_the_worker_keeps_its_status_and_the_history_is_as_it_was(ring: Ring) -> None:
    await ring.talk(text="one")
    asked = ring.ask()
    grant = await ring.worker.granted()
    ring.worker.begin(grant, Head(status=409, headers=JSON_HEAD.headers))
    ring.worker.say(grant, b'{"error":{}}')
    ring.worker.end(grant, FinishReason.REFUSED)
    ring.worker.offer(4)
    assert (await asked).status_code == 409
    assert await ring.talk(text="two") == [b"one"]


# --- one after the other


async def test_turns_of_one_conversation_run_in_order_of_arrival(ring: Ring) -> None:
    asked = []
    for i in range(4):
        asked.append(ring.ask(f"{i}"))
        await ring.until("queued_turns", max(0, i))
    for i in range(4):
        grant = await ring.worker.granted()
        request = unpack_asked(grant.body)
        assert json.loads(request.request)["prompt"] == f"{i}"
        assert list(request.history) == [f"a{j}".encode() for j in range(i)]
        assert (await ring.stats())["in_flight_decodes"] == 1
        ring.answer(grant, f"a{i}")
    for response in await asyncio.gather(*asked):
        assert response.status_code == 200
    assert await ring.server.counts() == (4, 4, 0, 0)


async def test_a_queued_turn_whose_client_leaves_takes_no_lane(ring: Ring) -> None:
    first = ring.ask("first")
    grant = await ring.worker.granted()
    second = ring.ask("second")
    await ring.until("queued_turns", 1)
    third = ring.ask("third")
    await ring.until("queued_turns", 2)
    second.cancel()
    await ring.until("queued_turns", 1)
    ring.answer(grant)
    await first
    grant = await ring.worker.granted()
    assert json.loads(unpack_asked(grant.body).request)["prompt"] == "third"
    ring.answer(grant)
    assert (await third).status_code == 200
    assert await ring.server.counts() == (2, 2, 0, 0)


async def test_a_turn_behind_one_that_takes_too_long_is_refused() -> None:
    async with ringing(queue_timeout_s=0.3) as ring:
        first = ring.ask()
        grant = await ring.worker.granted()
        response = await ring.ask()
        assert (response.status_code, error_of(response)["reason"]) == (503, "queue_timeout")
        assert 1 <= int(response.headers["retry-after"]) <= 30
        ring.answer(grant)
        assert (await first).status_code == 200


async def test_a_line_that_is_full_is_refused(ring: Ring) -> None:
    asked = [ring.ask() for _ in range(9)]
    await ring.until("queued_turns", 8)
    response = await ring.ask()
    assert (response.status_code, error_of(response)["reason"]) == (503, "ring_full")
    for task in asked:
        task.cancel()
    await ring.until("queued_turns", 0)


async def test_a_turn_that_waits_when_the_server_drains_is_refused_once_it_would_begin(ring: Ring) -> None:
    first = ring.ask()
    grant = await ring.worker.granted()
    second = ring.ask()
    await ring.until("queued_turns", 1)
    ring.server.gateway.drain()
    ring.answer(grant)
    assert (await first).status_code == 200
    response = await second
    assert (response.status_code, error_of(response)["reason"]) == (503, "draining")


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_clients_and_workers_do_every_history_is_whole_and_nothing_is_held(
    ring: Ring, seed: int
) -> None:
    """Each kept turn says how many were before it: a history out of order, or with a hole, would show."""
    chance = random.Random(seed)
    ids = [ID.replace("550e", f"550{n}") for n in range(3)]

    async def work() -> None:
        while True:
            grant = await ring.worker.granted()
            await asyncio.sleep(chance.choice((0, 0.005)))
            if chance.random() < 0.15:
                ring.worker.fail(grant)
                ring.worker.offer(4)
            else:
                ring.answer(grant, f"{len(unpack_asked(grant.body).history)}")

    async def ask() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.choice((0.003, 0.02, 5))):
                await ring.client.post(INFER, json=turn(conversation_id=chance.choice(ids)))

    working = asyncio.create_task(work())
    await asyncio.gather(*(ask() for _ in range(40)))
    await ring.server.counts()
    assert (await ring.stats())["queued_turns"] == 0
    working.cancel()
    histories = [await ring.talk(conversation_id=one) for one in ids]
    assert any(histories)
    for history in histories:
        assert history == [f"{n}".encode() for n in range(len(history))]


# --- refusals


async def test_wrong_bodies_are_named(ring: Ring) -> None:
    for param, value in (("conversation_id", "x"), ("prompt", None), ("max_tokens", 0)):
        response = await ring.client.post(INFER, json={**turn(), param: value})
        assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert await ring.server.counts() == (0, 0, 0, 0)


async def test_an_unknown_model_is_a_404_and_no_conversation(ring: Ring) -> None:
    response = await ring.ask(model="nope")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    assert (await ring.stats())["sessions"] == 0


async def test_without_workers_a_turn_is_refused() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post(INFER, json=turn())
        assert (response.status_code, error_of(response)["reason"]) == (503, "no_workers")


@pytest.mark.parametrize(
    ("spent", "reason"),
    [
        ({"max_in_flight_decodes": 1}, "system_in_flight_decode_full"),
        ({"max_in_flight_decodes_per_worker": 1}, "all_workers_decode_busy"),
        ({"max_sessions": 1}, "system_sessions_full"),
        ({"max_sessions_per_worker": 1}, "all_workers_at_capacity"),
    ],
)
async def test_over_a_budget_a_turn_is_refused_at_once_and_has_never_been(
    spent: dict[str, int], reason: str
) -> None:
    async with ringing(budgets=Budgets(**spent)) as ring:
        first = ring.ask()
        grant = await ring.worker.granted()
        refused = await ring.ask(conversation_id=OTHER_ID)
        assert (refused.status_code, error_of(refused)["reason"]) == (503, reason)
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert (await ring.stats())["sessions"] == 1
        ring.answer(grant)
        assert (await first).status_code == 200


async def test_over_a_budget_a_turn_waits_where_the_operator_has_it_so() -> None:
    async with ringing(budgets=Budgets(max_in_flight_decodes=1), at_cap=AtCap.PARK) as ring:
        first = ring.ask()
        grant = await ring.worker.granted()
        second = ring.ask(conversation_id=OTHER_ID)
        await ring.server.has_open(2)
        ring.answer(grant)
        ring.answer(await ring.worker.granted())
        assert [(await each).status_code for each in (first, second)] == [200, 200]


async def test_a_worker_is_told_of_a_conversation_that_is_too_long_and_at_twice_that_it_is_full() -> None:
    async with ringing(history=HistoryConfig(max_conversation_bytes=400)) as ring:
        await ring.talk(text="x" * 390)
        asked = ring.ask()
        grant = await ring.worker.granted()
        turn = unpack_asked(grant.body)
        assert (turn.limit_bytes, turn.history) == (400, (b"x" * 390,))
        assert turn.n_bytes > turn.limit_bytes
        ring.answer(grant, "y" * 390)  # nor does it shorten anything
        assert (await asked).status_code == 200
        response = await ring.ask()
        error = error_of(response)
        assert (response.status_code, error["reason"], error["code"]) == (409, "session_full", "session_full")
        assert response.headers["x-should-retry"] == "false"


async def test_a_prompt_that_no_conversation_could_keep_is_too_long() -> None:
    async with ringing(history=HistoryConfig(max_conversation_bytes=400)) as ring:
        response = await ring.ask("y" * 400)
        assert (response.status_code, error_of(response)["reason"]) == (413, "prompt_too_long")


async def test_a_conversation_that_expired_is_gone_until_it_is_deleted() -> None:
    async with ringing(history=HistoryConfig(ttl_s=0.2)) as ring:
        await ring.talk(text="one")
        await ring.until("sessions", 0)
        response = await ring.ask()
        assert (response.status_code, error_of(response)["reason"]) == (409, "session_gone")
        assert (await ring.client.delete(f"/coordinator/sessions/{ID}")).status_code == 404
        assert await ring.talk(text="two") == []


async def test_a_conversation_beyond_their_number_makes_the_oldest_end() -> None:
    async with ringing(history=HistoryConfig(max_conversations=1)) as ring:
        await ring.talk(text="one")
        await ring.talk(text="other", conversation_id=OTHER_ID)
        assert (await ring.ask()).status_code == 409


async def test_a_turn_that_is_refused_costs_nobody_a_conversation() -> None:
    async with ringing(history=HistoryConfig(max_conversations=1), budgets=Budgets(max_sessions=1)) as ring:
        await ring.talk(text="one")
        assert (await ring.ask(conversation_id=OTHER_ID)).status_code == 503
        assert await ring.talk() == [b"one"]


async def test_a_conversation_that_made_room_for_others_is_no_session_any_more() -> None:
    async with ringing(history=HistoryConfig(max_conversations=2)) as ring:
        for n in range(5):
            await ring.talk(conversation_id=ID.replace("550e", f"550{n}"))
        await ring.has_sessions(2)


async def test_a_conversation_of_which_nothing_is_left_is_no_session_any_more(ring: Ring) -> None:
    asked = ring.ask()
    grant = await ring.worker.granted()
    await ring.has_sessions(1)
    ring.worker.fail(grant)
    ring.worker.offer(4)
    await asked
    await ring.has_sessions(0)  # its first turn has never been
    await ring.talk()
    asked = ring.ask()
    ring.worker.fail(await ring.worker.granted())
    ring.worker.offer(4)
    await asked
    await ring.has_sessions(1)
    asked = ring.ask()
    grant = await ring.worker.granted()
    await ring.client.delete(f"/coordinator/sessions/{ID}")
    ring.answer(grant)
    assert (await asked).status_code == 200
    await ring.has_sessions(0)  # it was deleted meanwhile


# --- whose conversation it is


async def test_conversations_belong_to_one_tenant() -> None:
    async with ringing(public=PublicConfig(tenancy=Tenancy(by=TenantBy.USER))) as ring:
        await ring.talk(text="mine", user="me")
        assert await ring.talk(text="yours", user="you") == []
        assert (await ring.client.delete(f"/coordinator/sessions/{ID}")).status_code == 404
        assert (await ring.client.delete(f"/coordinator/sessions/{ID}?user=you")).status_code == 204
        assert await ring.talk(text="more", user="me") == [b"mine"]
        assert await ring.talk(text="new", user="you") == []


async def test_a_deleted_conversation_begins_anew(ring: Ring) -> None:
    await ring.talk(text="one")
    assert (await ring.client.delete(f"/coordinator/sessions/{ID.upper()}")).status_code == 204
    again = await ring.client.delete(f"/coordinator/sessions/{ID}")
    assert (again.status_code, error_of(again)["code"]) == (404, "session_not_found")
    assert (await ring.client.delete("/coordinator/sessions/no-uuid")).status_code == 404
    assert await ring.talk(text="two") == []


async def test_a_deleted_conversation_ends_the_turns_that_wait_and_not_the_one_under_way(ring: Ring) -> None:
    await ring.talk(text="one")
    first = ring.ask()
    grant = await ring.worker.granted()
    second = ring.ask()
    await ring.until("queued_turns", 1)
    assert (await ring.client.delete(f"/coordinator/sessions/{ID}")).status_code == 204
    response = await second
    assert (response.status_code, error_of(response)["reason"]) == (409, "session_gone")
    ring.answer(grant)
    assert (await first).content.endswith(CLOSING)
    assert await ring.talk() == []


# --- what is told


async def test_health_workers_and_stats(ring: Ring) -> None:
    await ring.talk()
    asked = ring.ask(conversation_id=OTHER_ID)
    grant = await ring.worker.granted()
    health = (await ring.client.get("/coordinator/health")).json()
    assert (health["status"], health["workers_alive"]) == ("ok", 1)
    assert health["capacity"]["max_inflight"] == 4
    assert health["capacity"]["sessions"] == 2
    (worker,) = (await ring.client.get("/coordinator/health/workers")).json()["workers"]
    assert (worker["id"], worker["alive"], worker["in_flight_decodes"]) == ("w", True, 1)
    stats = await ring.stats()
    assert (stats["in_flight_decodes"], stats["sessions"], stats["queued_turns"]) == (1, 2, 0)
    assert stats["history_bytes"] == len("hello") + 4
    assert stats["budgets"]["in_flight_decodes"] == 1
    assert stats["budgets"]["max_in_flight_decodes"] == 32
    assert stats["budgets"]["max_in_flight_decodes_per_worker"] is None
    assert stats["workers"] == [{**worker, "heard_ago_s": stats["workers"][0]["heard_ago_s"]}]
    ring.answer(grant)
    await asked
    assert (await ring.stats())["in_flight_decodes"] == 0


async def test_health_is_told_without_a_worker() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        response = await client.get("/coordinator/health")
        assert (response.status_code, response.json()["status"]) == (200, "no_workers")
        assert (await client.get("/coordinator/health/workers")).json() == {"workers": []}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", INFER, 405),
        ("OPTIONS", INFER, 204),
        ("GET", f"/coordinator/sessions/{ID}", 405),
        ("POST", "/coordinator/stats", 405),
        ("GET", "/coordinator/nope", 404),
    ],
)
async def test_other_methods_and_paths(ring: Ring, method: str, path: str, status: int) -> None:
    assert (await ring.client.request(method, path)).status_code == status


async def test_a_client_that_reads_nothing_of_the_end_leaves_the_history_as_it_was(ring: Ring) -> None:
    """It is cut off in mid-answer, its worker none the wiser: the END comes all the same."""
    body = json.dumps(turn()).encode()
    wire = socket.create_connection((ring.server.host, ring.server.port))
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    wire.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    grant = await ring.worker.granted()
    wire.close()
    await ring.worker.cancelled()
    ring.answer(grant)
    assert await ring.talk() == []
