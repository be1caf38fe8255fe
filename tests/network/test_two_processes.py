"""An ingress and its workers as an operator runs them: starts, ends, losses, and clients that see none."""

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from llm_ingress.draining import SECOND_THOUGHT_S
from tests.network.chat import Chat, ask, sdk_of
from tests.network.conftest import PATIENCE_S
from tests.network.fleet import LOOPBACK, MODEL, Fleet, Ingress, Process
from tests.network.standing import Standing

pytestmark = pytest.mark.model

STORY = "Tell a story about a lighthouse."
N_TOKENS = 64  # the prompt is 40 more: within the cells for which the same text is promised
N_LONG = 150  # still running when a second signal counts
SLACK_S = 2.0  # beyond the timeouts that were asked for


async def test_a_worker_that_was_there_first_finds_its_ingress_and_says_once_that_it_was_missing(
    fleet: Fleet,
) -> None:
    ingress = fleet.new_ingress()
    worker = fleet.new_worker("gpu-1", ingress, flags=("--alias", "tiny"))
    await worker.start()
    await worker.until_says("unreachable: Connection refused")
    assert worker.status("/health") == 200
    assert worker.status("/ready") == 503
    await ingress.start()
    await worker.until_attached()
    assert ingress.status("/ready") == 200
    async with sdk_of(ingress) as sdk:
        answer = await ask(sdk, "Say hi.", max_tokens=20)
        assert answer.text
        # Names are those of the models.
        assert (await ask(sdk, "Say hi.", max_tokens=20, model="tiny")).text == answer.text
        names = [model.id async for model in sdk.models.list()]
        assert sorted(names) == sorted(set(names))
        assert {MODEL, "tiny"} <= set(names)
        with pytest.raises(openai.NotFoundError):
            await ask(sdk, "Say hi.", model="nobody")
    assert len(worker.lines("unreachable")) == 1
    assert len(worker.lines("is attached to")) == 1
    await ingress.quiet()


@pytest.mark.slow
async def test_workers_of_different_models_serve_each_its_own(fleet: Fleet, hybrid_model: Path) -> None:
    ingress = await fleet.ingress("--no-worker-timeout", "1")
    await fleet.worker("gpu-1", ingress, flags=("--alias", "real"))
    noise = fleet.new_worker("gpu-2", ingress, flags=("--model", str(hybrid_model), "--alias", "noise"))
    await noise.start()
    await noise.until_attached()
    async with sdk_of(ingress) as sdk:
        assert {"real", "noise"} <= {model.id async for model in sdk.models.list()}
        answers = [await ask(sdk, "Say hi.", max_tokens=20, model=name) for name in ("real", "noise")]
        assert answers[0].text != answers[1].text
        await noise.kill()
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(sdk, "Say hi.", max_tokens=20, model="noise")
        assert refused.value.status_code == 503
        assert (await ask(sdk, "Say hi.", max_tokens=20, model="real")).text == answers[0].text
    await ingress.quiet()


async def test_a_worker_told_to_end_finishes_its_stream_claims_nothing_more_and_exits_with_0(
    pair: Standing,
) -> None:
    ingress = pair.ingress
    before = ingress.health()
    async with sdk_of(ingress) as sdk:
        chat = await Chat.begin(sdk, STORY, max_tokens=N_TOKENS)
        await chat.read(5)
        worker = pair.holder()
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
    assert (health["finished"] - before["finished"], len(health["workers"])) == (4, 1)


async def test_a_second_signal_ends_a_worker_at_once_and_its_stream_goes_on_elsewhere(
    pair: Standing,
) -> None:
    undisturbed = await pair.undisturbed(STORY, max_tokens=N_LONG)
    async with sdk_of(pair.ingress) as sdk:
        chat = await Chat.begin(sdk, STORY, max_tokens=N_LONG)
        await chat.read(5)
        worker = pair.holder()
        worker.signal(signal.SIGTERM)
        await worker.until_says("drains: 1 lanes open")
        await asyncio.sleep(SECOND_THOUGHT_S)
        worker.signal(signal.SIGINT)
        assert await worker.exit_status() == 130
        assert (await chat.rest()).text == undisturbed.text


async def test_an_ingress_told_to_end_finishes_what_runs_and_what_is_parked(pair: Standing) -> None:
    ingress = pair.ingress
    async with sdk_of(ingress) as sdk:
        asked = [asyncio.create_task(ask(sdk, STORY, max_tokens=30)) for _ in range(6)]
        await ingress.until(lambda health: health["open"] == 6 and health["lanes"]["waiting"] == 2)
        assert await ingress.stop() == 0
        answers = [await answer for answer in asked]
    assert [answer.usage.completion_tokens for answer in answers] == [30] * 6
    for worker in pair.workers:
        await worker.until_says("this ingress goes away")
        assert worker.health()["inflight"] == 0


@pytest.mark.parametrize("end", [pytest.param(Process.stop, marks=pytest.mark.slow), Process.kill])
async def test_a_restarted_ingress_is_found_again_and_answers_as_before(
    pair: Standing, end: Callable[[Process], Awaitable[int]]
) -> None:
    ingress, workers = pair.ingress, pair.workers
    before = await pair.undisturbed("Say hi.", max_tokens=20)
    await end(ingress)
    for worker in workers:
        await worker.until_says("it is dialled until it answers")
        assert worker.status("/ready") == 503
    await ingress.start()
    await ingress.until_attached(len(workers))
    async with sdk_of(ingress) as sdk:
        assert (await ask(sdk, "Say hi.", max_tokens=20)).text == before.text
    for worker in workers:
        assert len(worker.lines("is attached to")) == 1
        assert bool(worker.lines("drains; worker", "takes no more of its lanes")) == (end is Process.stop)
    assert (await ingress.quiet())["finished"] == 1


async def test_a_model_whose_workers_are_all_away_is_waited_for_and_then_refused(lone: Standing) -> None:
    ingress = lone.ingress
    await lone.kill_all()
    await ingress.until_attached(0)
    assert ingress.status("/ready") == 503
    async with sdk_of(ingress) as sdk:
        asked_at = time.monotonic()
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(sdk, "Say hi.")
        assert PATIENCE_S <= time.monotonic() - asked_at < PATIENCE_S + SLACK_S
    assert refused.value.status_code == 503
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["reason"] == "no_workers"
    await ingress.quiet()


@pytest.mark.slow
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
