"""The ring in one process, held to the contract of every ring."""

import asyncio

import pytest

from llm_ingress.gateway import Gateway, GatewayConfig, LaneState
from llm_worker.local import LocalRing
from llm_worker.ring import Ring
from tests.worker.ring_contract import HEAD, RingContract, until


class TestLocalRing(RingContract):
    async def connect(self, gateway: Gateway) -> Ring:
        return LocalRing(gateway)

    async def test_what_the_worker_says_is_known_when_its_call_returns(self) -> None:
        ends = await self.attached(credit=1)
        lane = ends.open()
        (grant,) = await ends.granted()
        ends.say(lambda: ends.ring.head(grant.ref, HEAD))
        assert lane.head == HEAD

    async def test_a_gateway_that_lets_go_of_its_worker_gets_it_back(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        ends = await self.attached(GatewayConfig(claim_timeout_s=0.01, heartbeat_interval_s=0.005), credit=1)
        lane = ends.open()
        await ends.granted()
        await asyncio.sleep(0.02)
        ends.gateway.tick()
        assert lane.state is LaneState.WAITING
        await until(lambda: [what for what, _ in ends.worker.heard][-2:] == ["detached", "attached"])
        ends.say(lambda: ends.ring.credit(1))
        assert (await ends.granted(2))[1].ref.claim == 2
        assert "has let go of its worker: it holds lane 1" in caplog.text
