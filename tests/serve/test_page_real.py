"""The chat page and load.sh on the real server with a real model: what they start runs, and really ends."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.request import Request, urlopen

import pytest
from selenium.webdriver.common.keys import Keys

from tests.serve.browser import ChatPage
from tests.serve.test_load import LOAD, ROW

pytestmark = [pytest.mark.browser, pytest.mark.model]

STORY = "Tell me a very long story about a lighthouse keeper and a whale."


@pytest.fixture
def page(open_page: Callable[[str], ChatPage], llm_serve: str) -> ChatPage:
    """The page of the real server, with a conversation and settings of its own."""
    page = open_page(llm_serve)
    page.script("sessionStorage.clear(); localStorage.clear(); turns.length = 0")
    page.open()
    page.fetched()
    page.complaints()
    return page


def health(url: str) -> dict[str, Any]:
    with urlopen(f"{url}/health", timeout=10) as answer:
        value: dict[str, Any] = json.load(answer)
        return value


@contextmanager
def streams(url: str, n: int) -> Iterator[None]:
    """Hold `n` places with long answers that nobody reads to the end."""
    with urlopen(f"{url}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": 4000,
    }
    headers = {"content-type": "application/json"}
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with ExitStack() as held:
        for _ in range(n):
            held.enter_context(urlopen(request, timeout=30)).readline()
        yield


def set_max_tokens(page: ChatPage, n: int) -> None:
    page.find("#max-tokens").send_keys(str(n), Keys.TAB)


def test_question_is_answered_token_by_token(page: ChatPage, llm_serve: str) -> None:
    finished = health(llm_serve)["finished"]
    set_max_tokens(page, 24)
    page.say(STORY)
    page.until(lambda: page.answers and page.answers[0] and page.is_answering)
    page.until_idle()
    assert "24 tokens · token limit reached" in page.figures
    assert re.search(r"^[\d.]+ tok/s · first token [\d.]+ s", page.figures)
    assert health(llm_serve)["finished"] == finished + 1


def test_stop_frees_the_slot(page: ChatPage, llm_serve: str) -> None:
    cancelled = health(llm_serve)["cancelled"]
    page.say(STORY)
    page.until(lambda: page.answers and page.answers[0])
    assert health(llm_serve)["inflight"] == 1
    page.type(Keys.ESCAPE)
    page.until_idle()
    page.until(lambda: health(llm_serve)["inflight"] == 0)
    assert health(llm_serve)["cancelled"] == cancelled + 1
    assert "stopped" in page.figures


def test_conversation_goes_on_and_starts_anew(page: ChatPage, llm_serve: str) -> None:
    set_max_tokens(page, 8)
    page.ask("Hello!")
    page.ask("And again, please.")
    assert len(page.answers) == 2
    assert page.texts(".failure") == []
    page.click("#new")
    page.ask("Hello!")
    assert len(page.answers) == 1


def test_full_server_is_said_and_retry_succeeds_once_there_is_room(page: ChatPage, llm_serve: str) -> None:
    set_max_tokens(page, 8)
    with streams(llm_serve, 2):
        page.ask("Hello!")
        assert "The server is full" in page.texts(".failure")[0]
    page.until(lambda: health(llm_serve)["inflight"] == 0)
    page.click(".remedy button")
    page.until(lambda: page.texts(".failure") == [] and not page.is_answering)
    assert page.answers[0]


def test_conversation_beyond_the_context_offers_a_new_one(page: ChatPage) -> None:
    page.script("setPrompt('word '.repeat(20000))")
    page.find("#prompt").send_keys(Keys.ENTER)
    page.until_idle()
    page.until(lambda: page.texts(".failure"))
    assert "no longer fits" in page.texts(".failure")[0]
    assert page.texts(".remedy button") == ["New conversation"]


def test_page_asks_its_own_server_and_nobody_else(page: ChatPage, llm_serve: str) -> None:
    set_max_tokens(page, 8)
    page.open()
    page.ask("Hello!")
    fetched = [url for url in page.fetched() if not url.startswith("data:")]
    assert {url.removeprefix(llm_serve) for url in fetched} == {"/", "/v1/models", "/v1/chat/completions"}
    assert page.complaints() == []


def test_load_measures_the_real_server(llm_serve: str) -> None:
    settings = {"URL": llm_serve, "N": "2", "MAX_TOKENS": "16"}
    done = subprocess.run([LOAD], env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    rows = [match for line in done.stdout.splitlines() if (match := ROW.match(line))]
    assert len(rows) == 2
    assert all(1 <= int(row[4]) <= 16 for row in rows)
    assert done.stdout.splitlines()[-1].endswith(" of 2")
