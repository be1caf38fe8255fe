"""What the next turn of a chat costs, over the real product: `cached_tokens` tells."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.serve.client import MODEL, Client, Json, Said, client_of
from tests.serve.process import COMMAND, LlmServe, running, spotless

pytestmark = pytest.mark.model


@pytest.fixture
async def server(roomy: LlmServe) -> AsyncIterator[LlmServe]:
    yield roomy
    await roomy.quiet()


async def say(client: Client, messages: list[Json], question: str) -> Said:
    """Another turn of a chat; the question and the answer are appended."""
    messages.append({"role": "user", "content": question})
    body = {"model": MODEL, "temperature": 0, "max_tokens": 24, "messages": messages}
    response = await client.post(body)
    assert response.status_code == 200
    said = Said.whole(response.json())
    messages.append({"role": "assistant", "content": said.text})
    return said


async def test_each_turn_of_a_chat_finds_the_turns_before_it(client: Client) -> None:
    chat: list[Json] = [{"role": "system", "content": "You keep a lighthouse and speak of nothing else."}]
    total = 0
    for turn in range(6):
        said = await say(client, chat, f"Question {turn}: what did you see in the night, and who came by?")
        assert said.n_cached >= 0.9 * total
        assert said.n_cached < said.usage["prompt_tokens"]
        total = said.usage["total_tokens"]


async def test_chats_that_share_a_system_prompt_keep_to_their_own(client: Client) -> None:
    system = {"role": "system", "content": "You repeat the last word of what you are told. " * 8}
    # Long enough to be kept: what differs in fewer than 16 tokens is computed anew.
    secrets = ("The word is lantern. " * 10, "The word is whale. " * 10)
    chats: list[list[Json]] = [[system], [system]]
    first = [await say(client, chat, secret) for chat, secret in zip(chats, secrets, strict=True)]
    assert first[1].n_cached > 0.5 * first[1].usage["prompt_tokens"]
    totals = [said.usage["total_tokens"] for said in first]
    for chat, total in zip(chats, totals, strict=True):
        assert (await say(client, chat, "Again.")).n_cached >= 0.9 * total
    assert "whale" not in str(chats[0])
    assert "lantern" not in str(chats[1])


FIRST, SECOND = "Question 0: what did you see in the night, and who came by?", "Question 1: and who else?"

KEEPERS = ("You keep bees in a garden behind the town hall", "Goats are what you have, up on a hill")


def chats_of_their_own() -> list[list[Json]]:
    return [[{"role": "system", "content": f"{who}, and speak of nothing else."}] for who in KEEPERS]


def keeping_in(folder: Path) -> tuple[str, ...]:
    """Flags; a single thread, since beside other processes two wait for each other."""
    return ("--session-dir", str(folder), "--max-inflight", "1", "--threads", "1")


async def test_a_chat_goes_on_after_a_restart(client: Client, tmp_path: Path) -> None:
    flags, chats = keeping_in(tmp_path / "sessions"), chats_of_their_own()
    with spotless(*flags, log=tmp_path / "first.log") as server:
        async with client_of(server) as before:
            totals = [(await say(before, chat, FIRST)).usage["total_tokens"] for chat in chats]
    with spotless(*flags, log=tmp_path / "second.log") as server:
        async with client_of(server) as after:
            for chat, total in zip(chats, totals, strict=True):
                undisturbed = await say(client, [*chat], SECOND)
                said = await say(after, chat, SECOND)
                assert said.n_cached >= 0.9 * total
                assert said.text == undisturbed.text


async def test_who_is_killed_loses_what_was_in_use_and_no_more(tmp_path: Path) -> None:
    flags, chats = keeping_in(tmp_path / "sessions"), chats_of_their_own()
    with spotless(*flags, log=tmp_path / "first.log") as server:
        async with client_of(server) as client:
            totals = [(await say(client, chat, FIRST)).usage["total_tokens"] for chat in chats]
    with running(*flags, log=tmp_path / "second.log") as server:
        async with client_of(server) as client:
            assert (await say(client, chats[0], SECOND)).n_cached > 0
            server.process.kill()
    with spotless(*flags, log=tmp_path / "third.log") as server:
        async with client_of(server) as client:
            said = [await say(client, chat, SECOND) for chat in chats]
    assert said[0].n_cached == 0
    assert said[1].n_cached >= 0.9 * totals[1]


async def test_a_session_directory_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [str(COMMAND), "--model", "smollm2", "--port", "0", "--session-dir", str(tmp_path / "file")]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"llm-serve: --session-dir {tmp_path / 'file'}: File exists\n"
