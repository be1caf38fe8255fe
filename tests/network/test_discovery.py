"""Workers that find their ingresses by DNS: what comes is served, and left again when it goes."""

import pytest

from tests.name_server import name_server
from tests.network.chat import Chat, ask, sdk_of
from tests.network.fleet import Fleet, Ingress
from tests.network.resolving_worker import PORT_VARIABLE

pytestmark = pytest.mark.model

NAME, A_NAME, B_NAME = "ring.test", "a.ring.test", "b.ring.test"
LOOK_S = "0.2"


def srv(ingress: Ingress, name: str) -> str:
    return f"0 0 {ingress.control_port} {name}."


async def test_what_the_name_server_names_is_served_and_what_it_names_no_more_is_left(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = fleet.another_certificate(f"{A_NAME},{B_NAME}")
    a = fleet.new_ingress(name="a", pki=pki)
    b = fleet.new_ingress(name="b", pki=pki, host="[::1]")
    a.launch()
    b.launch()
    async with name_server() as (server, resolver):
        monkeypatch.setenv(PORT_VARIABLE, str(resolver.port))
        records = server.records
        records[f"{NAME}.", "SRV"] = [srv(a, A_NAME)]
        records[f"{A_NAME}.", "A"] = ["127.0.0.1"]
        looking = ("--discovery-interval", LOOK_S, "--discovery-dns")
        by_service, by_address = [
            fleet.new_worker(name, flags=(*looking, what), program="tests.network.resolving_worker")
            for name, what in (("gpu-1", NAME), ("gpu-2", f"{B_NAME}:{b.control_port}"))
        ]
        by_service.launch()
        by_address.launch()
        await by_service.until_attached()
        await by_address.until_says("leads to no ingress")
        assert [worker["name"] for worker in a.health()["workers"]] == ["gpu-1"]

        # One comes, at an address of the other kind.
        records[f"{B_NAME}.", "AAAA"] = ["::1"]
        records[f"{NAME}.", "SRV"].append(srv(b, B_NAME))
        await b.until_attached(2)
        async with sdk_of(b) as sdk:
            assert (await ask(sdk, "Say hi.", max_tokens=5)).text

        # One goes: an answer that runs is finished, and nothing more is taken.
        async with sdk_of(a) as sdk:
            chat = await Chat.begin(sdk, "Tell a story.", max_tokens=40)
            await chat.read(3)
            del records[f"{NAME}.", "SRV"][0]
            await a.until(lambda health: health["workers"][0]["is_draining"])
            assert (await chat.rest()).usage.completion_tokens == 40
        await a.until_says("gpu-1", "it has left")
        assert a.health()["workers"] == []

        # The address goes, and with it whoever went by it.
        del records[f"{B_NAME}.", "AAAA"]
        await b.until_attached(0)
