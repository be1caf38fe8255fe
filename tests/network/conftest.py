"""A private CA and two rings for the session, and for each test that wants one a fleet of its own."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.network.fleet import Fleet, certs
from tests.network.line import Line, LineUnavailable
from tests.network.standing import Standing

PAIR_HEARTBEAT_TIMEOUT_S = 3
HEARTBEAT_TIMEOUT_S, PATIENCE_S = 2, 1  # of the lone worker's ingress


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `llm-ingress certs init` makes for an ingress on loopback."""
    folder = tmp_path_factory.mktemp("ca") / "pki"
    certs("init", folder, "--san", "localhost,127.0.0.1")
    return folder


@pytest.fixture
def line() -> Iterator[Line]:
    """A line to a network of its own; list it before `fleet`, whose processes end first then."""
    try:
        line = Line.lay()
    except LineUnavailable as error:
        pytest.skip(f"no network can be cut here: {error}")
    yield line
    line.remove()


@pytest.fixture
def fleet(tmp_path: Path, pki: Path, smollm2: Path) -> Iterator[Fleet]:
    """Processes that end with the test, and have met no fault of their own."""
    fleet = Fleet(tmp_path, pki, smollm2)
    try:
        yield fleet
    finally:
        fleet.close()
    assert fleet.faults() == []


@pytest.fixture(scope="session")
def standing_pair(tmp_path_factory: pytest.TempPathFactory, pki: Path, smollm2: Path) -> Iterator[Standing]:
    fleet = Fleet(tmp_path_factory.mktemp("pair"), pki, smollm2)
    ingress = fleet.new_ingress(
        "--heartbeat-timeout", f"{PAIR_HEARTBEAT_TIMEOUT_S}", "--no-worker-timeout", "30"
    )
    try:
        yield Standing(fleet, ingress, *(fleet.new_worker(name, ingress) for name in ("gpu-1", "gpu-2")))
    finally:
        fleet.close()


@pytest.fixture(scope="session")
def standing_lone(tmp_path_factory: pytest.TempPathFactory, pki: Path, smollm2: Path) -> Iterator[Standing]:
    fleet = Fleet(tmp_path_factory.mktemp("lone"), pki, smollm2)
    ingress = fleet.new_ingress(
        "--heartbeat-timeout", f"{HEARTBEAT_TIMEOUT_S}", "--no-worker-timeout", f"{PATIENCE_S}"
    )
    try:
        yield Standing(fleet, ingress, fleet.new_worker("gpu-1", ingress))
    finally:
        fleet.close()


@pytest.fixture
async def pair(standing_pair: Standing) -> AsyncIterator[Standing]:
    """Two workers, each of which can go on for the other, and patience for one that is started again."""
    await standing_pair.restore()
    yield standing_pair
    assert standing_pair.fleet.faults() == []


@pytest.fixture
async def lone(standing_lone: Standing) -> AsyncIterator[Standing]:
    """One worker, which nobody can go on for, and little patience."""
    await standing_lone.restore()
    yield standing_lone
    assert standing_lone.fleet.faults() == []
