"""One browser and one real server for all tests of the page; a scripted server for each that needs one."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.serve.browser import ChatPage, start_chromium, why_no_browser
from tests.serve.fake_api import Answer, FakeApi


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A headless browser with an empty profile."""
    if why := why_no_browser():
        pytest.skip(why)
    driver = start_chromium(tmp_path_factory.mktemp("profile"))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def api() -> Iterator[FakeApi]:
    """A scripted server. Its port is new each time, so the browser holds nothing of an earlier test."""
    with FakeApi(Answer(pieces=("Hello", " there"))) as api:
        yield api


@pytest.fixture(scope="session")
def llm_serve(smollm2: Path) -> Iterator[str]:
    """The address of a real `llm-serve`: two slots, and no place to wait in."""
    command = Path(sys.executable).with_name("llm-serve")
    flags = ["--port", "0", "--max-inflight", "2", "--ring-streams", "2", "--drain-timeout", "1"]
    process = subprocess.Popen([command, "--model", smollm2, *flags], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture
def open_page(chromium: Chrome) -> Iterator[Callable[[str], ChatPage]]:
    """Opens the page of a server, on a desktop in daylight; leaves it afterwards so that nothing runs on."""
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    with ExitStack() as leaving:
        leaving.callback(chromium.get, "about:blank")
        yield lambda url: ChatPage(chromium, url)


@pytest.fixture
def page(open_page: Callable[[str], ChatPage], api: FakeApi) -> ChatPage:
    """The chat page of the scripted server."""
    page = open_page(api.url)
    page.fetched()
    page.complaints()
    return page
