"""What a reader can do on the chat page, in a real browser against a scripted server."""

import threading
from collections.abc import Callable

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from tests.serve.browser import ChatPage
from tests.serve.fake_api import Answer, Ending, FakeApi, Refusal

pytestmark = pytest.mark.browser

OpenPage = Callable[[str], ChatPage]
LONG = "A line of an answer that goes on.\n\n" * 60


def busy(reason: str, retry_after_s: int | None = None) -> Refusal:
    error = {
        "message": "Not now.",
        "type": "service_unavailable_error",
        "param": None,
        "code": "server_is_overloaded",
        "reason": reason,
    }
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return Refusal(status=503, error=error, headers=headers)


def held(*pieces: str) -> Answer:
    """An answer that says its first piece and then waits, longer than any test runs."""
    return Answer(pieces=(*pieces, "never said"), hold=threading.Event())


# --- Asking and being answered


def test_text_shows_as_it_comes(page: ChatPage, api: FakeApi) -> None:
    hold = threading.Event()
    api.then(Answer(pieces=("First half", " and the rest."), hold=hold))
    page.say("Say something.")
    page.until(lambda: page.answers == ["First half"])
    assert page.is_answering
    assert page.find(".answer").get_attribute("aria-busy") == "true"
    hold.set()
    page.until(lambda: page.answers == ["First half and the rest."])
    page.until_idle()
    assert page.find(".answer").get_attribute("aria-busy") == "false"
    assert page.questions == ["Say something."]
    assert page.find("#prompt").get_attribute("value") == ""


def test_waiting_for_the_first_token_is_shown(page: ChatPage, api: FakeApi) -> None:
    api.then(Answer(pieces=(), hold=threading.Event()))
    page.say("Hello?")
    page.until(lambda: page.texts(".waiting") == ["Waiting for the first word"])


def test_request_asks_for_a_stream_with_usage_and_no_limit_by_default(page: ChatPage, api: FakeApi) -> None:
    page.ask("Hi")
    assert api.bodies == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]


def test_figures_count_the_tokens_of_the_usage(page: ChatPage, api: FakeApi) -> None:
    hold = threading.Event()
    api.then(Answer(pieces=("two tokens", " three tokens"), hold=hold, n_tokens=5))
    page.say("Count.")
    page.until(lambda: "1 token" in page.figures)
    hold.set()
    page.until_idle()
    rate, first, tokens = page.figures.split(" · ")
    assert float(rate.removesuffix(" tok/s")) > 0
    assert float(first.removeprefix("first token ").removesuffix(" s")) >= 0
    assert tokens == "5 tokens"


def test_answer_cut_by_the_limit_says_so(page: ChatPage, api: FakeApi) -> None:
    api.then(Answer(pieces=("Once upon",), finish="length"))
    page.ask("Tell a story.")
    assert "token limit reached" in page.figures


def test_example_prompt_is_asked_with_one_click(page: ChatPage, api: FakeApi) -> None:
    page.click("#ideas button")
    page.until(lambda: page.answers == ["Hello there"])
    assert page.questions == ["Explain in three sentences how a rainbow forms."]
    assert not page.find("#welcome").is_displayed()


def test_again_asks_the_last_question_anew(page: ChatPage, api: FakeApi) -> None:
    page.ask("Hi")
    api.then(Answer(pieces=("Another",)))
    page.click(".answer:last-child [data-do=again]")
    page.until(lambda: page.answers == ["Another"])
    assert api.bodies[1]["messages"] == api.bodies[0]["messages"]


# --- Stopping


@pytest.mark.parametrize("stop", ["button", "escape"])
def test_stop_ends_the_generation_and_keeps_what_was_said(page: ChatPage, api: FakeApi, stop: str) -> None:
    api.then(held("Once upon a time"))
    page.say("Tell a story.")
    page.until(lambda: page.answers == ["Once upon a time"])
    if stop == "button":
        page.click("#action")
    else:
        page.type(Keys.ESCAPE)
    api.wait_for(lambda: api.n_left == 1 and api.n_inflight == 0)
    page.until_idle()
    assert page.answers == ["Once upon a time"]
    assert "stopped" in page.figures
    assert page.texts(".failure") == []


def test_stop_before_the_first_token_leaves_no_error(page: ChatPage, api: FakeApi) -> None:
    api.then(Answer(pieces=(), hold=threading.Event()))
    page.say("Hello?")
    api.wait_for(lambda: api.n_inflight == 1)
    page.click("#action")
    api.wait_for(lambda: api.n_left == 1)
    page.until_idle()
    assert page.texts(".failure") == []
    api.then(Answer(pieces=("Now",)))
    page.ask("Again?")
    assert [message["content"] for message in api.bodies[1]["messages"]] == ["Hello?", "Again?"]


def test_enter_while_an_answer_is_written_sends_nothing_and_keeps_the_draft(
    page: ChatPage, api: FakeApi
) -> None:
    api.then(held("Once"))
    page.say("Tell a story.")
    page.until(lambda: page.answers == ["Once"])
    page.say("And another.")
    assert page.find("#prompt").get_attribute("value") == "And another."
    assert len(api.bodies) == 1


# --- The conversation


def test_every_turn_is_sent_with_the_next(page: ChatPage, api: FakeApi) -> None:
    page.ask("One")
    page.ask("Two")
    assert api.bodies[1]["messages"] == [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Hello there"},
        {"role": "user", "content": "Two"},
    ]


def test_new_conversation_forgets_the_old_one(page: ChatPage, api: FakeApi) -> None:
    page.ask("One")
    page.click("#new")
    assert page.questions == []
    assert page.find("#welcome").is_displayed()
    page.ask("Two")
    assert api.bodies[1]["messages"] == [{"role": "user", "content": "Two"}]
    page.open()
    assert page.questions == ["Two"]


def test_new_conversation_ends_the_answer_being_written(page: ChatPage, api: FakeApi) -> None:
    api.then(held("Once"))
    page.say("Tell a story.")
    page.until(lambda: page.answers == ["Once"])
    page.click("#new")
    api.wait_for(lambda: api.n_left == 1)
    page.until_idle()
    assert page.answers == []


def test_conversation_survives_a_reload(page: ChatPage, api: FakeApi) -> None:
    page.ask("One")
    page.open()
    assert (page.questions, page.answers) == (["One"], ["Hello there"])
    page.ask("Two")
    assert [message["content"] for message in api.bodies[1]["messages"]] == ["One", "Hello there", "Two"]


def test_reload_in_the_middle_keeps_what_was_said_as_stopped(page: ChatPage, api: FakeApi) -> None:
    api.then(held("Once upon"))
    page.say("Tell a story.")
    page.until(lambda: page.answers == ["Once upon"])
    page.open()
    assert page.answers == ["Once upon"]
    assert "stopped" in page.figures
    api.wait_for(lambda: api.n_left == 1)


def test_page_works_when_the_browser_kept_nonsense(page: ChatPage) -> None:
    page.script("sessionStorage.setItem('llm-ring.turns', '[1, null, {\"role\": \"robot\"}]')")
    page.script("window.addEventListener('pagehide', (e) => e.stopImmediatePropagation(), true)")
    page.script("localStorage.setItem('llm-ring.settings', '{broken')")
    page.open()
    page.ask("Hi")
    assert page.answers == ["Hello there"]


# --- Errors, in words


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("ring_full", "The server is full"),
        ("queue_timeout", "waited too long"),
        ("draining", "shutting down"),
        ("no_workers", "No worker"),
        ("a_reason_of_the_future", "too busy"),
    ],
)
def test_refusal_is_said_in_words(page: ChatPage, api: FakeApi, reason: str, words: str) -> None:
    api.then(busy(reason))
    page.ask("Hi")
    [said] = page.texts(".failure")
    assert words in said
    assert "Not now." in said
    assert page.find(".failure").get_attribute("role") == "alert"


def test_retry_waits_as_long_as_the_server_asks_then_sends_the_same(page: ChatPage, api: FakeApi) -> None:
    api.then(busy("ring_full", retry_after_s=2), Answer(pieces=("At last",)))
    page.ask("Hi")
    assert page.find(".remedy button").text == "Try again in 2 s"
    assert not page.find(".remedy button").is_enabled()
    page.click(".remedy button")
    page.until(lambda: page.answers == ["At last"])
    assert page.texts(".failure") == []
    assert api.bodies[1] == api.bodies[0]
    assert api.arrivals[1] - api.arrivals[0] >= 1.9


def test_conversation_too_long_for_the_model_offers_a_new_one(page: ChatPage, api: FakeApi) -> None:
    too_long = {
        "message": "The prompt has 5000 tokens.",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    api.then(Refusal(status=400, error=too_long))
    page.ask("Hi")
    assert "no longer fits" in page.texts(".failure")[0]
    assert "5000 tokens" in page.texts(".failure")[0]
    page.click(".remedy button")
    assert page.questions == []


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (Ending.ERROR, "The worker was lost."),
        (Ending.WITHOUT_DONE, "cut off"),
        (Ending.BROKEN, "connection broke"),
    ],
)
def test_stream_that_fails_keeps_its_text_and_says_why(
    page: ChatPage, api: FakeApi, ending: Ending, words: str
) -> None:
    hold = threading.Event()
    api.then(Answer(pieces=("Half an answer",), ending=ending, hold=hold))
    page.say("Hi")
    page.until(lambda: page.answers == ["Half an answer"])
    hold.set()
    page.until_idle()
    assert words in page.texts(".failure")[0]
    assert page.answers == ["Half an answer"]
    api.then(Answer(pieces=("A whole answer",)))
    page.click(".remedy button")
    page.until(lambda: page.answers == ["A whole answer"])


def test_answer_that_cannot_be_laid_out_is_shown_as_written_and_the_page_goes_on(
    page: ChatPage, api: FakeApi
) -> None:
    api.then(Answer(pieces=("**one", "\ntwo**")))
    page.script(
        "const real = blocksOf; blocksOf = () => { blocksOf = real; throw new RangeError('too deep') }"
    )
    page.ask("Hello")
    assert page.answers == ["**one\ntwo**"]
    assert page.texts(".failure strong") == ["The page could not lay out this answer."]
    page.open()
    assert page.answers == ["one\ntwo"]
    assert not page.is_answering


def test_unreachable_server_is_said(open_page: OpenPage) -> None:
    with FakeApi(Answer(pieces=("Hello",))) as api:
        page = open_page(api.url)
    page.ask("Hi")
    assert "cannot be reached" in page.texts(".failure")[0]


def test_error_page_of_a_proxy_is_no_riddle(page: ChatPage, api: FakeApi) -> None:
    api.then(Refusal(status=502, error={}))
    page.ask("Hi")
    assert "worker was lost" in page.texts(".failure")[0]


def test_server_without_a_model_says_so_and_can_be_asked_again(open_page: OpenPage) -> None:
    with FakeApi(Answer(pieces=("Hello",)), models=()) as api:
        page = open_page(api.url)
        assert "offers no model" in page.texts("#notice")[0]
        page.say("Hi")
        assert page.questions == []
        api.models = ("late",)
        page.click("#notice button")
        page.until(lambda: page.texts("#notice") == [])
        page.say("")
        page.until(lambda: page.answers == ["Hello"])
        assert api.bodies[0]["model"] == "late"


# --- Settings


def test_chosen_model_is_asked_and_remembered(page: ChatPage, api: FakeApi) -> None:
    picker = Select(page.find("#model"))
    assert [option.text for option in picker.options] == ["tiny", "small"]
    picker.select_by_visible_text("small")
    page.ask("Hi")
    page.open()
    page.ask("Hi")
    assert [body["model"] for body in api.bodies] == ["small", "small"]


def test_thinking_switch_is_sent_and_remembered(page: ChatPage, api: FakeApi) -> None:
    page.click("label:has(#think)")
    page.ask("Hi")
    page.open()
    page.ask("Hi")
    assert [body["chat_template_kwargs"] for body in api.bodies] == [{"enable_thinking": True}] * 2


@pytest.mark.parametrize("opening", ["<think>", ""], ids=["opened by the model", "opened in the prompt"])
def test_thought_is_folded_and_not_sent_back(page: ChatPage, api: FakeApi, opening: str) -> None:
    page.click("label:has(#think)")
    api.then(Answer(pieces=(f"{opening}Let me", " see.</th", "ink>\n\nYes.")))
    page.ask("Is it?")
    assert page.answers == ["Yes."]
    assert page.texts(".thought summary") == ["Thought"]
    assert page.texts(".thought p") == []
    page.click(".thought summary")
    assert page.texts(".thought p") == ["Let me see."]
    page.ask("Sure?")
    assert api.bodies[1]["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_thought_being_written_is_folded_too(page: ChatPage, api: FakeApi) -> None:
    api.then(held("<think>Let me see"))
    page.say("Is it?")
    page.until(lambda: page.texts(".thought summary") == ["Thinking"])
    assert page.answers in ([], [""])
    assert page.texts(".waiting") == []


def test_max_tokens_is_sent_as_a_number(page: ChatPage, api: FakeApi) -> None:
    page.find("#max-tokens").send_keys("32")
    page.ask("Hi")
    assert api.bodies[0]["max_tokens"] == 32


@pytest.mark.parametrize("value", ["0", "-1", "1.5"])
def test_max_tokens_out_of_range_sends_nothing(page: ChatPage, api: FakeApi, value: str) -> None:
    page.find("#max-tokens").send_keys(value)
    page.say("Hi")
    assert page.questions == []
    assert page.find("#prompt").get_attribute("value") == "Hi"
    assert api.bodies == []


def test_system_prompt_goes_first(page: ChatPage, api: FakeApi) -> None:
    page.click("#guide")
    page.type("Be brief.")
    page.ask("Hi")
    assert api.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}


# --- By keyboard, on a phone, in the dark


def focus_name(page: ChatPage) -> str:
    source = "const a = document.activeElement; return a.id || a.dataset.do || a.dataset.copy || a.tagName"
    return str(page.script(source))


def test_everything_is_reached_by_keyboard_and_the_focus_is_seen(page: ChatPage) -> None:
    page.ask("Hi")
    page.find("#prompt").send_keys("A draft")
    page.script("document.getElementById('model').focus()")
    reached = []
    for _ in range(10):
        reached.append(focus_name(page))
        outline = page.script(
            "const a = document.activeElement;"
            "const ring = [a, a.closest('label'), a.closest('form')].filter((n) => n);"
            "return ring.some((n) => getComputedStyle(n).outlineStyle !== 'none') || a.matches('textarea')"
        )
        assert outline, f"no visible focus on {reached[-1]}"
        page.type(Keys.TAB)
    answer, composer = ["answer", "again"], ["prompt", "think", "guide", "max-tokens", "action"]
    assert reached == ["model", "new", "log", *answer, *composer]


def test_keyboard_alone_asks_writes_lines_and_switches(page: ChatPage, api: FakeApi) -> None:
    assert focus_name(page) == "prompt"
    page.type("One", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two", Keys.TAB)
    page.type(Keys.SPACE)
    page.type(Keys.SHIFT, Keys.TAB)
    page.type(Keys.ENTER)
    page.until(lambda: page.answers == ["Hello there"])
    assert api.bodies[0]["messages"][0]["content"] == "One\ntwo"
    assert api.bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}


def test_enter_that_ends_a_composed_character_does_not_send(page: ChatPage, api: FakeApi) -> None:
    page.find("#prompt").send_keys("ni")
    page.script(
        "document.getElementById('prompt').dispatchEvent(new KeyboardEvent('keydown',"
        " { key: 'Enter', isComposing: true, bubbles: true, cancelable: true }))"
    )
    assert page.questions == []


@pytest.mark.parametrize("width", [320, 360, 390])
def test_phone_has_nothing_to_scroll_sideways(page: ChatPage, api: FakeApi, width: int) -> None:
    page.resize(width, 780)
    page.open()
    assert page.script("return document.body.scrollWidth") == width
    wide = "word" * 60
    api.then(Answer(pieces=(f"{wide}\n\n```\n{wide}\n```\n\n| a | b |\n|---|---|\n| {wide} | `{wide}` |\n",)))
    page.ask(wide)
    api.then(busy("ring_full"))
    page.ask("Hi")
    page.click("#guide")
    over = page.script(
        "const boxes = 'body, header, main, .dock, #composer, .question, .prose, .failure';"
        "return [...document.querySelectorAll(boxes)]"
        ".filter((n) => n.scrollWidth > n.clientWidth + 1 || n.getBoundingClientRect().right > innerWidth)"
        ".map((n) => n.id || n.className || n.tagName)"
    )
    assert over == []
    assert page.script("return document.documentElement.scrollWidth") == width


CONTRAST = """
const light = (color) => color.match(/[0-9.]+/g).slice(0, 3).map((v) => v / 255)
  .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const ground = (n) => { for (; n; n = n.parentElement) { const c = getComputedStyle(n).backgroundColor;
  if (!/, 0\\)$/.test(c)) return c; } };
return [...document.querySelectorAll(arguments[0])].map((n) => {
  const [a, b] = [light(getComputedStyle(n).color), light(ground(n))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05); });
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(page: ChatPage, api: FakeApi, scheme: str) -> None:
    page.prefer("prefers-color-scheme", scheme)
    api.then(Answer(pieces=("Text, `code`, [a link](https://example.com)\n\n> a quote\n\n```\ncode\n```\n",)))
    page.ask("Hi")
    api.then(busy("ring_full"))
    page.ask("Hi")
    answer = ".question, .prose p, .prose code, .prose a, blockquote p, figcaption span, .facts li"
    contrasts = page.script(CONTRAST, f"{answer}, .failure strong, .failure p, .quiet, .pill, .hint, #model")
    assert len(contrasts) > 15
    assert min(contrasts) >= 4.5
    ground = page.script(
        "return getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
    )
    assert (sum(ground) < 150) == (scheme == "dark")


def test_nothing_moves_for_a_reader_who_asked_for_that(page: ChatPage, api: FakeApi) -> None:
    page.prefer("prefers-reduced-motion", "reduce")
    api.then(Answer(pieces=(), hold=threading.Event()))
    page.say("Hi")
    page.until(lambda: page.texts(".waiting"))
    assert page.script("return document.getAnimations().length") == 0


# --- Scrolling along


def test_page_follows_the_answer_only_while_the_reader_is_at_its_end(page: ChatPage, api: FakeApi) -> None:
    hold = threading.Event()
    api.then(Answer(pieces=(LONG, LONG), hold=hold))
    at_end = "return log.scrollHeight - log.scrollTop - log.clientHeight < 2"
    page.say("A long one.")
    page.until(lambda: page.answers and page.script(at_end))
    assert not page.find("#latest").is_displayed()
    page.script("log.scrollTop = 100")
    page.until(lambda: page.find("#latest").is_displayed())
    hold.set()
    page.until_idle()
    assert page.script("return log.scrollTop") == 100
    page.click("#latest")
    page.until(lambda: page.script(at_end))
