"""The worker's health: what it answers, over a real socket, and metrics that a scraper can read."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from llm_ingress.endpoint import Endpoint
from llm_ingress.wire import Heartbeat, ModelCard
from llm_worker.errors import WorkerConfigError
from llm_worker.health import listen_for_health, serve_health
from llm_worker.snapshot import RingFacts, WorkerSnapshot

CAPACITY = Heartbeat(
    inflight=2,
    decoding=1,
    max_inflight=4,
    available_slots=2,
    step_ms=12.5,
    step_age_s=0.25,
    kv_promised_tokens=300,
    tokens_per_second=81.5,
)
CARD = ModelCard(name="m", aliases=("a",), file="m.gguf", n_params=1, n_ctx=10, fingerprint="f", created=1)
RING = RingFacts(name="https://a:8444", is_attached=True, is_draining=False)
WORKER = WorkerSnapshot(
    name="gpu-1", model=CARD, capacity=CAPACITY, rings=(RING,), n_jobs=2, is_draining=False, has_failed=False
)
SAMPLE = re.compile(r"(llm_worker_[a-z_]+) ([0-9.e+-]+)")


class Watched:
    """A worker whose state a test sets."""

    def __init__(self) -> None:
        self.state = WORKER

    def look(self) -> WorkerSnapshot:
        return self.state


@asynccontextmanager
async def served(worker: Watched, host: str = "127.0.0.1") -> AsyncIterator[httpx.AsyncClient]:
    listener = listen_for_health(Endpoint(host, 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serve_health(listener, worker.look), httpx.AsyncClient(base_url=url) as client:
        yield client


async def test_every_address_of_ipv6_is_every_address_of_ipv4_too() -> None:
    async with served(Watched(), "::") as client:
        assert (await client.get("/health")).status_code == 200


async def test_health_tells_capacity_model_and_every_ring() -> None:
    async with served(Watched()) as client:
        answer = await client.get("/health")
    assert answer.status_code == 200
    facts = answer.json()
    assert (facts["status"], facts["name"], facts["jobs"]) == ("ok", "gpu-1", 2)
    assert (facts["max_inflight"], facts["available_slots"], facts["step_ms"]) == (4, 2, 12.5)
    assert facts["model"]["fingerprint"] == "f"
    assert facts["rings"] == [{"name": "https://a:8444", "is_attached": True, "is_draining": False}]


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (WORKER, "ok"),
        (replace(WORKER, capacity=replace(CAPACITY, available_slots=0)), "ok"),
        (replace(WORKER, rings=(replace(RING, is_attached=False), RING)), "ok"),
        (replace(WORKER, rings=(replace(RING, is_attached=False),)), "no_ingress"),
        (replace(WORKER, rings=(replace(RING, is_draining=True),)), "no_ingress"),
        (replace(WORKER, rings=()), "no_ingress"),
        (replace(WORKER, is_draining=True), "draining"),
        (replace(WORKER, is_draining=True, has_failed=True), "failed"),
    ],
)
async def test_it_is_ready_while_an_ingress_can_grant_it_a_lane_and_alive_always(
    state: WorkerSnapshot, status: str
) -> None:
    worker = Watched()
    worker.state = state
    async with served(worker) as client:
        ready, health = await client.get("/ready"), await client.get("/health")
    assert (ready.status_code, ready.json()["status"]) == (200 if status == "ok" else 503, status)
    assert (health.status_code, health.json()["status"]) == (200, status)


async def test_metrics_are_prometheus_text_with_one_sample_for_each_type() -> None:
    async with served(Watched()) as client:
        answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.text.endswith("\n")
    helps, types, samples = [], [], {}
    for line in answer.text.splitlines():
        if line.startswith("# HELP "):
            helps.append(line.split()[2])
        elif line.startswith("# TYPE "):
            types.append(line.split()[2])
            assert line.split()[3] == "gauge"
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            samples[match[1]] = float(match[2])
    assert helps == types == list(samples)
    assert samples["llm_worker_slots"] == 4
    assert samples["llm_worker_step_seconds"] == 0.0125
    assert samples["llm_worker_attached_ingresses"] == 1
    assert samples["llm_worker_draining"] == 0


async def test_other_paths_and_methods_are_refused() -> None:
    async with served(Watched()) as client:
        assert (await client.get("/")).status_code == 404
        assert (await client.post("/health")).status_code == 405


def test_an_address_that_is_taken_is_named() -> None:
    with listen_for_health(Endpoint("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(WorkerConfigError, match=f"127.0.0.1:{port}: Address already in use"):
            listen_for_health(Endpoint("127.0.0.1", port))
