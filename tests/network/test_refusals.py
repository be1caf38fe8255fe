"""What a worker says of ingresses it cannot serve: one line each, telling them apart, and it stays."""

import signal
from pathlib import Path

import pytest

from tests.network.chat import Chat, ask, sdk_of
from tests.network.fleet import Fleet, certs
from tests.network.standing import Standing

pytestmark = pytest.mark.model


async def test_each_ingress_that_cannot_be_served_is_one_line_and_the_others_are_served(
    fleet: Fleet,
) -> None:
    there = await fleet.ingress(name="there")
    away = fleet.new_ingress(name="away")
    strange = fleet.new_ingress(name="strange", pki=fleet.another_ca("127.0.0.1"))
    picky = fleet.new_ingress("--allow-worker", "gpu-7", "--allow-worker", "gpu-8", name="picky")
    named = fleet.new_ingress(name="named", pki=fleet.another_certificate("elsewhere"))
    for ingress in (strange, picky, named):
        await ingress.start()
    worker = await fleet.worker("gpu-1", there, away, strange, picky, named)
    expected = {
        away: "unreachable: Connection refused",
        strange: "its certificate is of another CA than the one given here",
        picky: "it refuses this worker for allow_list: gpu-1 is not among the workers that may attach",
        named: "its certificate is for another name",
    }
    for ingress, fault in expected.items():
        await worker.until_says(ingress.control_url, fault)
    async with sdk_of(there) as sdk:
        assert (await ask(sdk, "Say hi.", max_tokens=5)).text
    assert len(worker.lines("WARNING")) == len(expected)
    assert [ring["is_attached"] for ring in worker.health()["rings"]] == [True, False, False, False, False]
    assert picky.lines("WARNING", "gpu-1", "refused for allow_list")


async def test_a_second_process_with_the_same_certificate_waits_or_takes_over(lone: Standing) -> None:
    fleet, ingress, (first,) = lone.fleet, lone.ingress, lone.workers
    twin = fleet.new_worker("twin", ingress, identity=first.name)
    heir = fleet.new_worker("heir", ingress, identity=first.name, flags=("--takeover",))
    twin.launch()
    await twin.until_says(
        f"it refuses this worker for duplicate: another instance of {first.name} is attached"
    )
    assert (first.status("/ready"), twin.status("/ready")) == (200, 503)
    heir.launch()
    await heir.until_attached()
    await first.until_says("a newer connection of the same worker takes its place")
    await first.until_says("it refuses this worker for duplicate")
    await ingress.until_attached(1)
    for worker in (first, twin, heir):
        await worker.kill()


async def test_an_ingress_under_two_names_is_served_once(fleet: Fleet) -> None:
    ingress = await fleet.ingress()
    other_name = f"https://localhost:{ingress.control_port}"
    worker = await fleet.worker("gpu-1", ingress, flags=("--ingress-url", other_name))
    await worker.until_says("it is the ingress that this worker serves as")
    n_attached = len(worker.lines("is attached to"))
    async with sdk_of(ingress) as sdk:
        assert (await ask(sdk, "Say hi.", max_tokens=60)).text
    assert len(worker.lines("is attached to")) == n_attached
    await ingress.until_attached(1)


async def test_renewed_certificates_are_used_by_both_ends_and_cut_no_stream(
    lone: Standing, pki: Path
) -> None:
    ingress, (worker,) = lone.ingress, lone.workers
    async with sdk_of(ingress) as sdk:
        chat = await Chat.begin(sdk, "Tell a story.", max_tokens=80)
        await chat.read(5)
        certs("init", pki, "--renew")
        certs("worker", pki, worker.name, "--renew", "--out", lone.fleet.certificate(worker.name))
        for process in (ingress, worker):
            process.signal(signal.SIGHUP)
            await process.until_says("cert.pem is used for new connections")
        assert (await chat.rest()).usage.completion_tokens == 80
    assert not worker.lines("is attached to")
    # Both ends prove who they are anew.
    await ingress.kill()
    await ingress.start()
    await ingress.until_attached(1)


async def test_a_half_written_key_leaves_the_last_good_pair_in_use(fleet: Fleet) -> None:
    folder = fleet.another_certificate("127.0.0.1")
    ingress = await fleet.ingress(pki=folder)
    key = (folder / "key.pem").read_bytes()
    (folder / "key.pem").write_bytes(key[:100])
    for _ in range(2):
        ingress.signal(signal.SIGHUP)
    await ingress.until_says(
        "WARNING", "the last good certificate stays in use", "key.pem: not an unencrypted"
    )
    await fleet.worker("gpu-1", ingress)
    assert len(ingress.lines("WARNING")) == 1
    (folder / "key.pem").write_bytes(key)
    ingress.signal(signal.SIGHUP)
    await ingress.until_says("cert.pem is used for new connections")
