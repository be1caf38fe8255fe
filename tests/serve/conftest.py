"""One browser, and a few real servers that tests share; a scripted server for each that needs one.

A test module of the contract names the real server it is about by its fixture `server`, and gets a `client`
and an `sdk` of it.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from selenium.webdriver import Chrome

from tests.serve.browser import ChatPage, start_chromium, why_no_browser
from tests.serve.client import Client, client_of
from tests.serve.fake_api import Answer, FakeApi
from tests.serve.process import PATIENCE_S, LlmServe, running, spotless


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
def llm_serve(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real `llm-serve`: two slots, and no place to wait in."""
    log = tmp_path_factory.mktemp("llm-serve") / "log"
    flags = ("--max-inflight", "2", "--ring-streams", "2")
    with running("--model", str(smollm2), *flags, log=log) as server:
        yield server.url


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServe]:
    """A server as it is by default, with more places to wait in."""
    log = tmp_path_factory.mktemp("roomy") / "log"
    with spotless("--ring-streams", "256", log=log) as server:
        yield server


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServe]:
    """A server with one slot of 512 tokens, and three places to wait in."""
    log = tmp_path_factory.mktemp("narrow") / "log"
    flags = ("--max-inflight", "1", "--ring-streams", "4", "--ctx-size", "512")
    with spotless(*flags, log=log) as server:
        yield server


@pytest.fixture(scope="session")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServe]:
    """A server with two slots that waits two seconds for whatever it waits for."""
    log = tmp_path_factory.mktemp("impatient") / "log"
    limits = ("--queue-timeout", "2", "--body-timeout", "2", "--stall-timeout", "2")
    with spotless("--max-inflight", "2", "--response-buffer", "4096", *limits, log=log) as server:
        yield server


@pytest.fixture
async def client(server: LlmServe) -> AsyncIterator[Client]:
    """A client of the server that the test module is about."""
    async with client_of(server) as client:
        yield client


@pytest.fixture
async def sdk(server: LlmServe) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, unchanged, except that it does not hide a refusal by trying again."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as sdk:
        yield sdk


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
