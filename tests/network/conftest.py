"""A private CA for the session, and for each test a fleet of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network.fleet import Fleet, certs
from tests.network.line import Line, LineUnavailable


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
