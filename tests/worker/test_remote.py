"""The ring over mutual TLS: held to the contract of every ring, and to what only a network can do to it."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from llm_ingress.control import Control, ControlConfig, serve_control
from llm_ingress.gateway import Gateway
from llm_ingress.tls import LiveContext, control_context, worker_context
from llm_worker.remote import RemoteRing
from llm_worker.ring import Ring
from tests.certificates import Issued, issue
from tests.worker.ring_contract import RingContract


@pytest.fixture(scope="session")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    """A CA, an ingress on loopback, and the worker gpu-1."""
    return issue(tmp_path_factory.mktemp("pki"))


class TestRemoteRing(RingContract):
    @pytest.fixture(autouse=True)
    async def _network(self, issued: Issued) -> AsyncIterator[None]:
        self.issued = issued
        self.controls: list[Control] = []
        self.rings: list[RemoteRing] = []
        yield
        for ring in self.rings:
            ring.detach()
            await ring.closed()
        for control in self.controls:
            await control.close()

    async def connect(self, gateway: Gateway) -> Ring:
        now = datetime.now(UTC)
        listener = LiveContext(control_context, self.issued.ingress, now).for_listener()
        control = await serve_control(gateway, listener, ControlConfig(port=0))
        self.controls.append(control)
        tls = LiveContext(worker_context, self.issued.worker, now)
        ring = RemoteRing(f"https://localhost:{control.port}", tls)
        self.rings.append(ring)
        return ring
