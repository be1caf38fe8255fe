"""What load.sh prints, counts and leaves behind."""

import asyncio
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from llm_ingress.serving import ServingConfig
from tests.certificates import issue
from tests.ingress.scripted import ScriptedWorker, serving
from tests.serve.fake_api import Answer, Ending, FakeApi, Refusal

LOAD = Path(__file__).parents[2] / "examples" / "serve" / "load.sh"
EIGHT = Answer(pieces=tuple("abcdefgh"), finish="length")
FULL = Refusal(
    status=503,
    error={"message": 'All "places" are taken.', "code": "server_is_overloaded", "reason": "ring_full"},
    headers={"Retry-After": "1"},
)
ROW = re.compile(r"^ *(\d+) +(\d+\.\d) +(\d+\.\d) +(\d+) +(\d+\.\d|-) +(\w+)$", re.MULTILINE)


def environment(api: FakeApi, settings: dict[str, object]) -> dict[str, str]:
    return {**os.environ, "URL": api.url, **{name: str(value) for name, value in settings.items()}}


def load(api: FakeApi, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LOAD], env=environment(api, settings), capture_output=True, text=True, timeout=60, check=False
    )


def start(api: FakeApi, **settings: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([LOAD], env=environment(api, settings), stdout=pipe, stderr=pipe, text=True)


def test_prints_a_row_for_each_request_then_the_whole() -> None:
    with FakeApi(EIGHT) as api:
        done = load(api, N=3, MAX_TOKENS=8)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    header, *rows, wall, inflight = done.stdout.splitlines()
    assert header.split() == ["#", "ttfb", "total", "tokens", "tok/s", "finish"]
    figures = [ROW.match(row) for row in rows]
    assert [(m[1], m[4], m[6]) for m in figures if m] == [(str(i), "8", "length") for i in (1, 2, 3)]
    assert re.fullmatch(r"wall \d+\.\d\d s · 24 tokens · \d+\.\d tok/s across all requests", wall)
    assert re.fullmatch(r"engine inflight while running: max (\d|unknown) of (4|unknown)", inflight)


def test_figures_are_the_clocks_of_curl() -> None:
    """A first byte at once and an end held back for 300 ms: total is longer than ttfb by about that."""
    hold = threading.Event()
    with FakeApi(Answer(pieces=("a", "b"), hold=hold)) as api:
        process = start(api, N=1)
        api.wait_for(lambda: api.n_inflight == 1)
        threading.Timer(0.3, hold.set).start()
        out, _ = process.communicate(timeout=30)
    found = ROW.search(out)
    assert found, out
    ttfb, total = float(found[2]), float(found[3])
    assert total - ttfb > 250
    assert float(found[5]) == pytest.approx(2000 / (total - ttfb), abs=0.06)


async def test_over_tls_the_first_byte_is_the_answers(tmp_path: Path) -> None:
    ring = issue(tmp_path).ingress
    config = ServingConfig(port=0, tls_cert=ring.cert, tls_key=ring.key, drain_timeout_s=0)
    async with serving(config=config) as server:
        worker = ScriptedWorker(server.gateway)
        settings = {**os.environ, "URL": server.url, "N": "1"}
        process = await asyncio.create_subprocess_exec(LOAD, "-k", env=settings, stdout=subprocess.PIPE)
        grant = await worker.granted()
        await asyncio.sleep(0.3)
        worker.answer(grant, "a")
        out, _ = await process.communicate()
    number, ttfb, *_ = out.splitlines()[1].split()
    assert number == b"1"
    assert float(ttfb) > 300


def test_every_request_asks_for_true_counts_and_shares_no_prefix() -> None:
    with FakeApi(EIGHT) as api:
        load(api, N=4, MAX_TOKENS=8, PROMPT='say "hi"\\\n\tthere', MODEL="small")
    contents = [body["messages"][0]["content"] for body in api.bodies]
    assert sorted(contents) == [f'{i}. say "hi"\\\n\tthere' for i in (1, 2, 3, 4)]
    for body in api.bodies:
        assert body["model"] == "small"
        assert body["max_tokens"] == 8
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}


def test_takes_the_first_model_when_none_is_named() -> None:
    with FakeApi(EIGHT, models=("first", "second")) as api:
        load(api, N=1)
    assert api.bodies[0]["model"] == "first"


def test_refused_request_says_status_and_reason_and_fails_the_run() -> None:
    with FakeApi(EIGHT, FULL, EIGHT) as api:
        done = load(api, N=3)
    assert done.returncode == 1
    assert done.stdout.count("length") == 2
    assert 'failed: 503 ring_full All "places" are taken.' in done.stdout
    assert "16 tokens" in done.stdout


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (Ending.BROKEN, "failed: curl: (18)"),
        (Ending.ERROR, "failed: error: The worker was lost."),
        (Ending.WITHOUT_DONE, "failed: cut off: no [DONE]"),
    ],
)
def test_stream_without_its_proper_end_is_a_failure(ending: Ending, words: str) -> None:
    with FakeApi(Answer(pieces=("a", "b"), ending=ending)) as api:
        done = load(api, N=1)
    assert done.returncode == 1
    assert words in done.stdout


def test_shows_the_highest_inflight_of_the_engine() -> None:
    hold = threading.Event()
    with FakeApi(Answer(pieces=("a", "b"), hold=hold)) as api:
        process = start(api, N=3)
        api.wait_for(lambda: api.n_inflight == 3)
        n_asked = api.n_health
        api.wait_for(lambda: api.n_health >= n_asked + 2)  # the first of them has been answered whole
        hold.set()
        out, _ = process.communicate(timeout=30)
    assert out.splitlines()[-1] == "engine inflight while running: max 3 of 4"


def test_arrive_spreads_the_starts() -> None:
    with FakeApi(EIGHT) as api:
        done = load(api, N=8, ARRIVE=600)
    assert done.returncode == 0
    # Eight starts at random in 600 ms all fall within 40 ms once in 10 million runs.
    assert max(api.arrivals) - min(api.arrivals) > 0.04


def test_interrupt_ends_every_request_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with FakeApi(Answer(pieces=("a", "b"), hold=threading.Event())) as api:
        process = start(api, N=4, TMPDIR=tmp_path)
        api.wait_for(lambda: api.n_inflight == 4)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        api.wait_for(lambda: api.n_left == 4)
    assert process.returncode == 130
    assert err == ""
    assert list(tmp_path.iterdir()) == []


def test_interrupt_ends_requests_that_have_not_started(tmp_path: Path) -> None:
    with FakeApi(EIGHT) as api:
        process = start(api, N=4, ARRIVE=600_000, TMPDIR=tmp_path)
        api.wait_for(lambda: api.n_health > 0)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_unreachable_server_is_said_and_is_not_a_failed_request() -> None:
    with FakeApi(EIGHT) as api:
        gone = environment(api, {})
    done = subprocess.run([LOAD], env=gone, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no list of models" in done.stderr


@pytest.mark.parametrize("setting", ["N", "MAX_TOKENS", "ARRIVE"])
def test_setting_that_is_no_number_is_refused(setting: str) -> None:
    with FakeApi(EIGHT) as api:
        done = load(api, **{setting: "lots"})
    assert done.returncode == 2
    assert setting in done.stderr
    assert api.bodies == []
