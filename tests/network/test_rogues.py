"""A worker that breaks the protocol, with a certificate as good as any: it costs nobody an answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from llm_ingress.certs import CertificateFiles
from llm_ingress.wire import Credit, Hello, LaneRef, ModelCard, Refusal, RefusedFor
from tests.misdeeds import MISDEEDS
from tests.network.chat import Chat, ask, sdk_of
from tests.network.standing import Standing
from tests.ring_network import RawWorker, raw_worker_at

pytestmark = pytest.mark.model

STORY = "Tell a story about a lighthouse."
N_TOKENS = 40
ALWAYS = ("garbage", "flood")  # the others with the slow tests


@dataclass(frozen=True, slots=True)
class Scene:
    """A rogue that holds a lane, and the answers that are on their way meanwhile."""

    rogue: RawWorker
    ref: LaneRef
    answers: asyncio.Future[list[str]]


@asynccontextmanager
async def rogue_of(lone: Standing) -> AsyncIterator[RawWorker]:
    """Whoever has a certificate of the CA can dial."""
    files = CertificateFiles.in_folder(lone.fleet.certificate("rogue"))
    async with raw_worker_at(lone.ingress.control_port, files) as rogue:
        yield rogue


def hello_of(lone: Standing) -> Hello:
    """It says that it serves what the real worker serves."""
    model = ModelCard(**lone.ingress.health()["model"], created=1)
    return Hello(worker="rogue", instance_id="rogue", model=model, max_inflight=1)


@asynccontextmanager
async def scene(lone: Standing) -> AsyncIterator[Scene]:
    async with sdk_of(lone.ingress) as sdk, rogue_of(lone) as rogue:
        # With every slot of the real worker taken, the next request is the rogue's.
        chats = [await Chat.begin(sdk, STORY, max_tokens=N_TOKENS) for _ in range(2)]
        await rogue.present(hello_of(lone))
        await rogue.say(Credit(1, 0))
        asked = asyncio.create_task(ask(sdk, STORY, max_tokens=N_TOKENS))
        ref = (await rogue.granted()).ref

        async def all_answers() -> list[str]:
            answers = await asyncio.gather(asked, *(chat.rest() for chat in chats))
            return [answer.text for answer in answers]

        yield Scene(rogue, ref, asyncio.ensure_future(all_answers()))


@pytest.mark.parametrize(
    "misdeed",
    [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in MISDEEDS],
)
async def test_a_fault_ends_its_connection_and_every_answer_is_what_it_was(
    lone: Standing, misdeed: str
) -> None:
    undisturbed = await lone.undisturbed(STORY, max_tokens=N_TOKENS)
    async with scene(lone) as the:
        await MISDEEDS[misdeed].commit(the.rogue, the.ref)
        await the.rogue.ended()
        assert await the.answers == [undisturbed.text] * 3
    (line,) = lone.ingress.lines("WARNING")
    assert "worker rogue at 127.0.0.1: " in line
    assert MISDEEDS[misdeed].reason in line
    health = await lone.ingress.quiet()
    assert [worker["name"] for worker in health["workers"]] == ["gpu-1"]
    assert not lone.workers[0].lines("WARNING")


async def test_a_claim_without_a_word_costs_as_long_as_silence_is_borne(lone: Standing) -> None:
    undisturbed = await lone.undisturbed(STORY, max_tokens=N_TOKENS)
    async with scene(lone) as the:
        assert "nothing heard from it for 2 s" in str((await the.rogue.ended()).extra)
        assert await the.answers == [undisturbed.text] * 3
    assert len(lone.ingress.lines("WARNING")) == 1
    await lone.ingress.quiet()


async def test_another_version_is_refused_and_both_are_named(lone: Standing) -> None:
    async with rogue_of(lone) as rogue:
        await rogue.say(replace(hello_of(lone), protocol=2))
        refusal = await rogue.hear()
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusedFor.VERSION
    await lone.ingress.until_says(
        "WARNING", "worker rogue at 127.0.0.1", "refused for version: it speaks version 2"
    )
    assert len(lone.ingress.health()["workers"]) == 1
