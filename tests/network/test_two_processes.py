"""An ingress and its workers as an operator runs them: starts, ends, losses, and clients that see none."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from llm_ingress.draining import SECOND_THOUGHT_S
from tests.network.chat import Chat, ask, sdk_of
from tests.network.fleet import LOOPBACK, MODEL, Fleet, Ingress, Process

pytestmark = pytest.mark.model

STORY = "Tell a story about a lighthouse."
N_TOKENS = 150  # the prompt is 40 more: within the cells for which the same text is promised


@pytest.fixture
async def ingress(fleet: Fleet) -> Ingress:
    return await fleet.ingress()


@pytest.fixture
async def sdk(ingress: Ingress) -> AsyncIterator[openai.AsyncOpenAI]:
    async with sdk_of(ingress) as sdk:
        yield sdk


async def test_a_stream_comes_through_and_names_are_those_of_the_models(
    fleet: Fleet, ingress: Ingress, sdk: openai.AsyncOpenAI
) -> None:
    assert ingress.status("/ready") == 503
    await fleet.worker("gpu-1", ingress, flags=("--alias", "tiny"))
    assert ingress.status("/ready") == 200
    answer = await ask(sdk, "Say hi.", max_tokens=20)
    assert answer.text
    assert (await ask(sdk, "Say hi.", max_tokens=20, model="tiny")).text == answer.text
    names = [model.id async for model in sdk.models.list()]
    assert sorted(names) == sorted(set(names))
    assert {MODEL, "tiny"} <= set(names)
    with pytest.raises(openai.NotFoundError):
        await ask(sdk, "Say hi.", model="nobody")
    await ingress.quiet()


async def test_a_killed_workers_stream_goes_on_at_another_and_reads_as_if_nothing_had_happened(
    fleet: Fleet, ingress: Ingress, sdk: openai.AsyncOpenAI
) -> None:
    await fleet.workers(ingress, "gpu-1", "gpu-2")
    undisturbed = await ask(sdk, STORY, max_tokens=N_TOKENS)
    chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS)
    await chat.read(10)
    await fleet.holder(ingress).kill()
    answer = await chat.rest()
    assert answer.text == undisturbed.text
    assert answer.finish_reason == undisturbed.finish_reason
    assert answer.usage == undisturbed.usage
    assert len(ingress.health()["workers"]) == 1
    await ingress.quiet()


async def test_a_worker_told_to_end_finishes_its_stream_claims_nothing_more_and_exits_with_0(
    fleet: Fleet, ingress: Ingress, sdk: openai.AsyncOpenAI
) -> None:
    await fleet.workers(ingress, "gpu-1", "gpu-2")
    chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS)
    await chat.read(5)
    worker = fleet.holder(ingress)
    worker.signal(signal.SIGTERM)
    await ingress.until(lambda health: any(worker["is_draining"] for worker in health["workers"]))
    answer, *others = await asyncio.gather(
        chat.rest(), *(ask(sdk, "Say hi.", max_tokens=5) for _ in range(3))
    )
    assert answer.usage.completion_tokens == N_TOKENS
    assert all(other.text for other in others)
    assert await worker.exit_status() == 0
    assert ingress.lines(worker.name, "it has left")
    assert not ingress.lines("WARNING")
    health = await ingress.quiet()
    assert (health["finished"], len(health["workers"])) == (4, 1)


async def test_a_second_signal_ends_a_worker_at_once_and_its_stream_goes_on_elsewhere(
    fleet: Fleet, ingress: Ingress, sdk: openai.AsyncOpenAI
) -> None:
    await fleet.workers(ingress, "gpu-1", "gpu-2")
    undisturbed = await ask(sdk, STORY, max_tokens=N_TOKENS)
    chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS)
    await chat.read(5)
    worker = fleet.holder(ingress)
    worker.signal(signal.SIGTERM)
    await worker.until_says("drains: 1 lanes open")
    await asyncio.sleep(SECOND_THOUGHT_S)
    worker.signal(signal.SIGINT)
    assert await worker.exit_status() == 130
    assert (await chat.rest()).text == undisturbed.text


async def test_a_worker_that_was_there_first_finds_its_ingress_and_says_once_that_it_was_missing(
    fleet: Fleet,
) -> None:
    ingress = fleet.new_ingress()
    worker = fleet.new_worker("gpu-1", ingress)
    await worker.start()
    await worker.until_says("unreachable: Connection refused")
    assert worker.status("/health") == 200
    assert worker.status("/ready") == 503
    await ingress.start()
    await worker.until_attached()
    async with sdk_of(ingress) as sdk:
        assert (await ask(sdk, "Say hi.", max_tokens=5)).text
    assert len(worker.lines("unreachable")) == 1
    assert len(worker.lines("is attached to")) == 1


@pytest.mark.parametrize("end", [Process.stop, Process.kill])
async def test_a_restarted_ingress_is_found_again_and_answers_as_before(
    fleet: Fleet, ingress: Ingress, sdk: openai.AsyncOpenAI, end: Callable[[Process], Awaitable[int]]
) -> None:
    worker = await fleet.worker("gpu-1", ingress)
    before = await ask(sdk, "Say hi.", max_tokens=20)
    await end(ingress)
    await worker.until_says("it is dialled until it answers")
    assert worker.status("/ready") == 503
    await ingress.start()
    await ingress.until_ready()
    async with sdk_of(ingress) as sdk_of_its_next_life:
        assert (await ask(sdk_of_its_next_life, "Say hi.", max_tokens=20)).text == before.text
    assert len(worker.lines("is attached to")) == 2
    assert bool(worker.lines("drains; worker gpu-1 takes no more of its lanes")) == (end is Process.stop)
    assert (await ingress.quiet())["finished"] == 1


async def test_an_ingress_told_to_end_finishes_what_runs_and_what_is_parked(
    fleet: Fleet, ingress: Ingress, sdk: openai.AsyncOpenAI
) -> None:
    worker = await fleet.worker("gpu-1", ingress)
    asked = [asyncio.create_task(ask(sdk, STORY, max_tokens=30)) for _ in range(4)]
    await ingress.until(lambda health: health["open"] == 4 and health["lanes"]["waiting"] == 2)
    assert await ingress.stop() == 0
    answers = [await answer for answer in asked]
    assert [answer.usage.completion_tokens for answer in answers] == [30] * 4
    await worker.until_says("this ingress goes away")
    assert worker.health()["inflight"] == 0


async def test_a_model_whose_workers_are_all_away_is_waited_for_and_then_refused(fleet: Fleet) -> None:
    ingress = await fleet.ingress("--no-worker-timeout", "1")
    worker = await fleet.worker("gpu-1", ingress)
    await worker.kill()
    await ingress.until_attached(0)
    async with sdk_of(ingress) as sdk:
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(sdk, "Say hi.")
        assert refused.value.status_code == 503
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["reason"] == "no_workers"
        waiting = asyncio.create_task(ask(sdk, "Say hi.", max_tokens=5))
        await ingress.until(lambda health: health["lanes"]["waiting"] == 1)
        with pytest.raises(openai.InternalServerError):
            await waiting
    await ingress.quiet()


async def test_https_on_both_versions_of_http_takes_streams_whole_answers_and_refusals(
    fleet: Fleet, pki: Path
) -> None:
    # With the certificate of its control listener, which has the right names and purpose.
    ingress = fleet.new_ingress("--tls-cert", str(pki / "cert.pem"), "--tls-key", str(pki / "key.pem"))
    worker = fleet.new_worker("gpu-1", ingress)
    ingress.launch()
    await worker.start()
    await worker.until_attached()
    too_long = {"messages": [{"role": "user", "content": "word " * 1000}]}
    for version in ("--http1.1", "--http2"):
        assert await curl(ingress, pki, version, max_tokens=8) == 200
        assert await curl(ingress, pki, version, max_tokens=8, stream=True) == 200
        assert await curl(ingress, pki, version, **too_long) == 400


async def curl(ingress: Ingress, pki: Path, version: str, **fields: Any) -> int:
    """The status of a chat request to `ingress` over TLS; curl fails if anything of the answer is amiss."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Say hi."}], **fields}
    url = f"https://{LOOPBACK}:{ingress.port}/v1/chat/completions"
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sS", version, "--cacert", str(pki / "ca.pem"), "-H", "content-type: application/json"),
        *("-d", json.dumps(body), "-o", "/dev/null", "-w", "%{http_code}", url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, complaints = await process.communicate()
    assert process.returncode == 0, complaints
    return int(out)
