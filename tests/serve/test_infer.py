"""Conversations of a real `llm-serve`: asked by the two examples that come with it, kept over a restart."""

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.serve.process import PATIENCE_S, LlmServe, running

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = {"py": (sys.executable, str(EXAMPLES / "infer.py")), "sh": (str(EXAMPLES / "infer.sh"),)}
BY_BOTH = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
UNREACHABLE = "http://127.0.0.1:9"


def infer(
    command: Sequence[str], url: str, *arguments: str, conversation_id: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        env={**os.environ, "URL": url, "CONVERSATION_ID": conversation_id},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def text_of(command: Sequence[str], done: subprocess.CompletedProcess[str]) -> str:
    """The answer that was printed, as text or as events."""
    assert done.returncode == 0, done.stdout + done.stderr
    if command is COMMANDS["py"]:
        return done.stdout
    events = [json.loads(line.removeprefix("data: ")) for line in done.stdout.splitlines()]
    assert [event["seq"] for event in events] == list(range(len(events)))
    return "".join(event.get("token", "") for event in events)


def usage_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The usage in the last event that infer.sh printed."""
    usage: dict[str, Any] = json.loads(done.stdout.splitlines()[-1].removeprefix("data: "))["usage"]
    return usage


@BY_BOTH
def test_an_answer_is_printed(command: Sequence[str], roomy: LlmServe) -> None:
    done = infer(command, roomy.url, 'What is the capital of "France"?', "8")
    assert text_of(command, done).strip()
    last = done.stderr if command is COMMANDS["py"] else done.stdout.splitlines()[-1]
    assert re.search(r'\[\d+ tokens, (length|stop), |"finish_reason":"(length|stop)"', last)


@BY_BOTH
def test_a_conversation_goes_on(command: Sequence[str], roomy: LlmServe) -> None:
    mine = str(uuid.uuid4())
    text_of(command, infer(command, roomy.url, "Tell a story about a cat.", "16", conversation_id=mine))
    n_before = roomy.health()["accepted"]
    other = COMMANDS["sh"]
    done = infer(other, roomy.url, "Go on.", "4", conversation_id=mine)
    assert usage_of(done)["prompt_tokens_details"]["cached_tokens"] > 16  # the first turn and its answer
    assert roomy.health()["accepted"] == n_before + 1


@BY_BOTH
def test_a_refusal_is_shown_and_is_no_success(command: Sequence[str], roomy: LlmServe) -> None:
    done = infer(command, roomy.url, "Hi", "4", conversation_id="no-uuid")
    assert done.returncode == 1
    assert "conversation_id" in done.stdout + done.stderr


@BY_BOTH
@pytest.mark.parametrize(
    ("url", "arguments"), [(UNREACHABLE, ["Hi"]), (UNREACHABLE, []), (UNREACHABLE, list("abc"))]
)
def test_without_a_server_or_a_prompt_it_fails(
    command: Sequence[str], url: str, arguments: list[str]
) -> None:
    done = infer(command, url, *arguments)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_ends_and_starts_again_remembers(tmp_path: Path) -> None:
    command, mine = COMMANDS["sh"], str(uuid.uuid4())
    flags = ("--history", f"sqlite:{tmp_path / 'history'}", "--max-inflight", "1", "--ctx-size", "512")
    with running(*flags, log=tmp_path / "log") as server:
        first = usage_of(infer(command, server.url, "Say hi.", "4", conversation_id=mine))
    assert server.process.returncode == 0
    with running(*flags, log=tmp_path / "log") as server:
        second = usage_of(infer(command, server.url, "Say hi.", "4", conversation_id=mine))
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["completion_tokens"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--history", "disk"), "neither memory nor sqlite:PATH"),
        (("--history", "sqlite:"), "neither memory nor sqlite:PATH"),
        (("--history", "sqlite:/nowhere/at/all"), "cannot be opened"),
        (("--session-ttl", "-1"), "session-ttl is -1"),
        (("--history-conversation-bytes", "300000000"), "max_bytes is"),
    ],
)
def test_a_history_that_cannot_be_kept_is_said_before_the_model_is_loaded(
    flags: tuple[str, ...], words: str
) -> None:
    command = [sys.executable, "-m", "llm_serve", "--model", "/no/model.gguf", "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert words in done.stderr
