"""What becomes of a model's text on the chat page: parsed from the stream, rendered, and never trusted.

The page's own functions are called in the browser with whatever bytes and text a server could send.
"""

import base64
import hashlib
import itertools
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.browser import ChatPage
from tests.serve.fake_api import PAGE, Answer, FakeApi

DOCUMENT = """# Title with `code`

Some **bold**, *italic*, ***both***, ~~gone~~ and a [link](https://example.com/a_b "title").
A second line, a bare https://example.com/x?y=1. And snake_case_name, 2 * 3 * 4.

1. First
   - nested
   - nested **two**

     ```js
     let a = "*not em*";
     ```
2. Second

   in two paragraphs
- [x] done
- [ ] open

> A quote
> - with a list
>
> > and a quote

| Name | `a|b` |
|:-----|:----:|
| one \\| two | 2 |

```python
def f(x):
    return x  # | not | a | table
```
---
The end<br>
--- no rule
``` no `fence`
a | b
|-|-| no table
"""

HOSTILE = [
    "<img src=x onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "</code></pre><svg onload=\"document.title='owned'\">",
    "[click](javascript:document.title='owned')",
    "[click]( JaVaScRiPt:document.title='owned')",
    "[click](java\tscript:document.title='owned')",
    "[click](data:text/html,<script>1</script>)",
    "[click](vbscript:x)",
    "[click](//evil.example/x)",
    "[click](/v1/models)",
    "<javascript:document.title='owned'>",
    "![pixel](http://evil.example/pixel.png)",
    "![pixel](javascript:document.title='owned')",
    '```html" onmouseover="x\n<img src=http://evil.example/y onerror=1>\n```',
    '| <img src=x onerror="document.title=1"> | b |\n|---|---|\n| <iframe src=http://evil.example> | c |',
    "1. <style>body{display:none}</style>\n> <base href=http://evil.example>",
    "<think><img src=http://evil.example/z></think><link rel=stylesheet href=http://evil.example/s.css>",
    "&lt;img src=x onerror=1&gt; &#106;avascript:",
]


def render(page: ChatPage, *texts: str, is_open: bool = False) -> str:
    """The markup after an answer grew through `texts`, as one view shows it."""
    return str(
        page.script(
            "const root = document.createElement('div'); const view = new Markdown(root);"
            "for (const text of arguments[0]) view.update(text, true);"
            "view.update(arguments[0].at(-1), arguments[1]); return root.innerHTML",
            list(texts),
            is_open,
        )
    )


# --- The page itself


def test_policy_names_the_script_by_its_hash() -> None:
    source = PAGE.read_text()
    [script] = re.findall(r"<script>(.*?)</script>", source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in source, f"write 'sha256-{digest}' into the page's policy"


def test_page_is_one_file_that_names_no_other() -> None:
    source = PAGE.read_text()
    assert re.findall(r"""(?:src|action)=["']|@import|url\(|import\(|<iframe""", source) == []
    assert set(re.findall(r"""https?://[\w.]+""", source)) == {"http://www.w3.org"}  # the name of SVG


@pytest.mark.browser
def test_nothing_is_fetched_but_the_page_and_the_api(page: ChatPage, api: FakeApi) -> None:
    api.then(Answer(pieces=tuple(f"{line}\n\n" for line in HOSTILE)))
    page.open()
    page.ask("Be nasty.")
    fetched = [url for url in page.fetched() if not url.startswith("data:")]
    assert fetched == [f"{api.url}{path}" for path in ("/", "/v1/models", "/v1/chat/completions")]
    assert page.complaints() == []


# --- Hostile text


@pytest.mark.browser
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(page: ChatPage, api: FakeApi, text: str) -> None:
    api.then(Answer(pieces=tuple(re.findall(r".{1,3}", text, re.DOTALL))))
    page.ask("Be nasty.")
    active = ".answer :is(img, script, style, link, iframe, base, [onerror], [onload], [onmouseover])"
    assert page.script("return document.querySelectorAll(arguments[0]).length", active) == 0
    links = page.script("return [...document.querySelectorAll('.prose a')].map((a) => [a.protocol, a.rel])")
    assert all(link == ["http:", "noopener noreferrer"] for link in links)
    assert page.script("return document.title") == "llm-ring"
    assert page.complaints() == []


@pytest.mark.browser
def test_policy_refuses_markup_from_strings_and_other_hosts(page: ChatPage) -> None:
    """The second wall: were the renderer wrong, the browser would still refuse."""
    refused = page.script(
        "try { document.body.innerHTML = '<b>x</b>'; return 'taken' } catch (error) { return error.name }"
    )
    assert refused == "TypeError"
    reached = page.driver.execute_async_script(
        "const [done] = arguments;"
        "fetch('http://127.0.0.2:9/').then(() => done('sent'), () => done('refused'))"
    )
    assert reached == "refused"
    assert any("Content Security Policy" in complaint for complaint in page.complaints())


@pytest.mark.browser
def test_mark_without_an_end_is_looked_for_once(page: ChatPage) -> None:
    n_searches = page.script(
        "const real = closingMark; let n = 0;"
        "closingMark = (...all) => { n += 1; return real(...all) };"
        "inline('**a '.repeat(100)); return n"
    )
    assert n_searches == 1


@pytest.mark.browser
@pytest.mark.parametrize(
    "text",
    [
        "[" * 40_000,
        "*a " * 20_000,
        "**a " * 20_000,
        "`" * 40_000,
        "`a``b" * 8_000,
        "> " * 20_000,
        "- " * 20_000,
        "a\n" * 200_000,
        "- a\n" + "  b\n" * 200_000,
    ],
    ids=[
        "brackets",
        "stars",
        "double stars",
        "backticks",
        "code",
        "quotes",
        "items",
        "lines",
        "item's lines",
    ],
)
def test_page_survives_text_made_to_be_slow(page: ChatPage, text: str) -> None:
    """A call inside a call for each mark would run out of stack here."""
    render(page, text)


# --- Markdown


@pytest.mark.browser
@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("plain", "<p>plain</p>"),
        ("one\ntwo", "<p>one<br>two</p>"),
        ("one\n\ntwo", "<p>one</p><p>two</p>"),
        ("## Two ##", "<h2>Two</h2>"),
        ("# On C#", "<h1>On C#</h1>"),
        ("#hashtag", "<p>#hashtag</p>"),
        ("a **b** c", "<p>a <strong>b</strong> c</p>"),
        ("***both***", "<p><strong><em>both</em></strong></p>"),
        ("*a **b***", "<p><em>a <strong>b</strong></em></p>"),
        ("snake_case_name", "<p>snake_case_name</p>"),
        ("2 * 3 * 4", "<p>2 * 3 * 4</p>"),
        ("~~gone~~", "<p><del>gone</del></p>"),
        (r"\*not\*", "<p>*not*</p>"),
        ("`` a`b ``", "<p><code>a`b</code></p>"),
        ("`<b>`", "<p><code>&lt;b&gt;</code></p>"),
        ("---", "<hr>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
        ("1. a\n   - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("1. a\n\n   b\n\n2. c", "<ol><li>a<p>b</p></li><li>c</li></ol>"),
        ("A year:\n1986. It rained.", "<p>A year:<br>1986. It rained.</p>"),
        ("> a\n> b\n\nc", "<blockquote><p>a<br>b</p></blockquote><p>c</p>"),
        ("a | b", "<p>a | b</p>"),
    ],
)
def test_markdown_becomes_the_markup_it_means(page: ChatPage, text: str, markup: str) -> None:
    assert render(page, text) == markup


@pytest.mark.browser
def test_link_leaves_no_trace_of_the_page(page: ChatPage) -> None:
    attributes = 'target="_blank" rel="noopener noreferrer"'
    expected = f'<p>See <a href="https://example.com/(a)" {attributes}>it</a>.</p>'
    assert render(page, "See [it](https://example.com/(a)).") == expected


@pytest.mark.browser
def test_code_is_kept_to_the_letter_and_can_be_copied(page: ChatPage, api: FakeApi) -> None:
    code = 'if a < b:\n\treturn "**&amp;**"\n\n    # end'
    api.then(Answer(pieces=(f"Here:\n\n```python\n{code}\n```\n",)))
    page.ask("Code, please.")
    assert page.script("return document.querySelector('pre code').textContent") == code
    assert page.texts("figcaption span") == ["python"]
    permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", permissions)
    page.click("figcaption button")
    page.until(lambda: page.script("return document.getElementById('said').textContent") == "Copied")
    read = "navigator.clipboard.readText().then(arguments[0])"
    assert page.driver.execute_async_script(read) == code


@pytest.mark.browser
def test_unfinished_marks_show_what_they_will_become(page: ChatPage) -> None:
    assert render(page, "a **bo", is_open=True) == "<p>a <strong>bo</strong></p>"
    assert render(page, "a `co", is_open=True) == "<p>a <code>co</code></p>"
    assert render(page, "a **bo") == "<p>a **bo</p>"


@pytest.mark.browser
@pytest.mark.parametrize("before", ["", "One block more.\n\n"], ids=["as it is", "a block later"])
def test_growing_text_is_shown_at_every_length_as_if_it_had_come_at_once(page: ChatPage, before: str) -> None:
    """Which blocks are still open when a boundary moves depends on how many came before."""
    differing = page.script(
        "const grown = document.createElement('div'); const view = new Markdown(grown);"
        "return [...arguments[0]].map((_, i) => arguments[0].slice(0, i + 1)).filter((text) => {"
        "  const whole = document.createElement('div'); new Markdown(whole).update(text, true);"
        "  view.update(text, true); return whole.innerHTML !== grown.innerHTML })",
        before + DOCUMENT,
    )
    assert differing == []


FRAGMENTS = [
    "a",
    " ",
    "\n",
    "\n\n",
    "- ",
    "1. ",
    "2. ",
    "  ",
    "# ",
    "> ",
    "```",
    "`",
    "*",
    "**",
    "_",
    "|",
    "|-|-|",
    "---",
]


@pytest.mark.browser
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(parts=st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join), min_size=1, max_size=8))
def test_any_split_of_the_text_gives_the_same_page(page: ChatPage, parts: list[str]) -> None:
    growing = ["".join(parts[: i + 1]) for i in range(len(parts))]
    assert render(page, *growing) == render(page, growing[-1])


@pytest.mark.browser
def test_patching_keeps_the_nodes_a_reader_may_have_selected(page: ChatPage) -> None:
    kept = page.script(
        "const root = document.createElement('div'); const view = new Markdown(root);"
        "view.update('- one\\n- tw', true);"
        "const item = root.querySelector('li'); const text = item.firstChild;"
        "view.update('- one\\n- two **and** more', true);"
        "return root.querySelector('li') === item && item.firstChild === text"
    )
    assert kept is True


# --- Server-sent events

STREAM = (
    "\ufeffdata: cr\r\ndata: lf\r\n\r\n: a comment\n\ndata:no space\n\n"
    "event: x\nid: 7\ndata: two\ndata: lines\n\ndata: café ☕ 漢字 🙂\r\rdata\n\n"
    "retry: 10\n\ndata:  kept space\n\ndata: [DONE]\n\ndata: cut"
)
EVENTS = ["cr\nlf", "no space", "two\nlines", "café ☕ 漢字 🙂", "", " kept space", "[DONE]"]

READ_PARTS = """
const [parts, done] = arguments;
const stream = new ReadableStream({ start(c) {
  parts.forEach((part) => c.enqueue(Uint8Array.from(part))); c.close(); } });
(async () => { const data = []; for await (const event of sseData(stream)) data.push(event); return data })()
  .then(done, (error) => done(String(error)));
"""


def sse_events(page: ChatPage, parts: list[bytes]) -> Any:
    return page.driver.execute_async_script(READ_PARTS, [list(part) for part in parts])


@pytest.mark.browser
def test_events_are_read_as_the_standard_says(page: ChatPage) -> None:
    assert sse_events(page, [STREAM.encode()]) == EVENTS


@pytest.mark.browser
def test_events_are_the_same_when_every_byte_comes_alone(page: ChatPage) -> None:
    assert sse_events(page, [bytes([byte]) for byte in STREAM.encode()]) == EVENTS


@pytest.mark.browser
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cuts=st.lists(st.integers(0, len(STREAM.encode())), max_size=12))
def test_events_are_the_same_wherever_the_bytes_are_cut(page: ChatPage, cuts: list[int]) -> None:
    data = STREAM.encode()
    edges = [0, *sorted(cuts), len(data)]
    assert sse_events(page, [data[a:b] for a, b in itertools.pairwise(edges)]) == EVENTS
