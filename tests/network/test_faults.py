"""A worker whose engine fails ends, for a supervisor to start it again; its lanes go on elsewhere."""

from pathlib import Path

import pytest

from tests import faulty_loop
from tests.network.chat import Chat, ask, sdk_of
from tests.network.fleet import Fleet

pytestmark = pytest.mark.model

STORY = "Tell a story about a lighthouse."


async def test_a_worker_whose_engine_has_failed_ends_with_status_1_and_its_lanes_go_on(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingress, faults = await fleet.ingress(), {name: tmp_path / name for name in ("gpu-1", "gpu-2")}
    for name, fault in faults.items():
        for variable, value in faulty_loop.environment("llm_worker", fault).items():
            monkeypatch.setenv(variable, value)
        fleet.new_worker(name, ingress, program=faulty_loop.PROGRAM).launch()
    await ingress.until_attached(2)
    async with sdk_of(ingress) as sdk:
        undisturbed = await ask(sdk, STORY, max_tokens=100)
        chat = await Chat.begin(sdk, STORY, max_tokens=100)
        await chat.read(10)
        faulty = fleet.holder(ingress)
        faults.pop(faulty.name).touch()
        assert (await chat.rest()).text == undisturbed.text
    assert await faulty.exit_status() == 1
    (told,) = faulty.lines("its engine has failed")
    assert "RuntimeError('made to fail')" in told
    assert [worker["name"] for worker in (await ingress.quiet())["workers"]] == list(faults)
    fleet.processes.remove(faulty)  # its log holds the fault that was asked for
