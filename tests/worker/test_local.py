"""The ring in one process, held to the contract of every ring."""

from llm_ingress.gateway import Gateway
from llm_worker.local import LocalRing
from llm_worker.ring import Ring
from tests.worker.ring_contract import HEAD, RingContract


class TestLocalRing(RingContract):
    async def connect(self, gateway: Gateway) -> Ring:
        return LocalRing(gateway)

    async def test_what_the_worker_says_is_known_when_its_call_returns(self) -> None:
        ends = await self.attached(credit=1)
        lane = ends.open()
        (grant,) = await ends.granted()
        ends.say(lambda: ends.ring.head(grant.ref, HEAD))
        assert lane.head == HEAD
