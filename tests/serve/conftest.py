"""One browser for all tests of the page; one scripted server for each."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

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
