"""Conversations that the ingress keeps, over real processes: remembered, continued, deleted, kept on disk."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.network.fleet import Fleet
from tests.network.standing import Standing
from tests.network.turns import INFER, Said, Turn, body, http_of, new_id, say

pytestmark = pytest.mark.model

SECRET = "My secret word is marmalade. Say ok."
QUESTION = "What is my secret word?"
STORY = "Tell a story about a lighthouse."
OTHER_STORY = "Tell a story about a mountain."
N_TOKENS = 48


async def ask_chat(http: httpx.AsyncClient, *messages: dict[str, str]) -> Said:
    """What a client hears that keeps the conversation itself."""
    asked = {**body("", ""), "messages": messages}
    answer = (await http.post("/v1/chat/completions", json=asked)).json()
    (choice,) = answer["choices"]
    return Said(choice["message"]["content"], choice["finish_reason"], answer["usage"])


async def test_a_second_turn_remembers_the_first_and_another_conversation_does_not(pair: Standing) -> None:
    async with http_of(pair.ingress) as http:
        mine, yours = new_id(), new_id()
        await say(http, SECRET, conversation_id=mine)
        answer = await say(http, QUESTION, conversation_id=mine)
        assert "marmalade" in answer.text.lower()
        stranger = await say(http, QUESTION, conversation_id=yours)
        assert "marmalade" not in stranger.text.lower()
        assert answer.usage["prompt_tokens"] > stranger.usage["prompt_tokens"]
    await pair.ingress.quiet()


async def test_a_turn_whose_worker_is_killed_reads_on_and_is_remembered(pair: Standing) -> None:
    """The numbers of its events are checked by `rest`: none is missing, none comes twice."""
    async with http_of(pair.ingress) as http:
        undisturbed = await say(http, STORY, conversation_id=new_id(), max_tokens=N_TOKENS)
        disturbed = new_id()
        turn = await Turn.begin(http, STORY, conversation_id=disturbed, max_tokens=N_TOKENS)
        await turn.read(10)
        await pair.holder().kill()
        said = await turn.rest()
        assert (said.text, said.finish_reason) == (undisturbed.text, undisturbed.finish_reason)
        assert said.usage["completion_tokens"] == undisturbed.usage["completion_tokens"]
        # Both halves of the answer are in the history: a client that kept it itself asks the same.
        followed = await say(http, "Go on.", conversation_id=disturbed)
        told = [{"role": "user", "content": STORY}, {"role": "assistant", "content": undisturbed.text}]
        assert followed == await ask_chat(http, *told, {"role": "user", "content": "Go on."})
    await pair.ingress.quiet()


async def test_a_turn_that_nobody_can_go_on_with_ends_in_an_error_and_is_forgotten(lone: Standing) -> None:
    async with http_of(lone.ingress) as http:
        mine = new_id()
        before = await say(http, STORY, conversation_id=mine)
        turn = await Turn.begin(http, OTHER_STORY, conversation_id=mine, max_tokens=400)
        await turn.read(5)
        await lone.kill_all()
        with pytest.raises(KeyError):
            await turn.rest()
        assert turn.events[-1]["error"]["code"] in ("worker_unavailable", "server_is_overloaded")
        await lone.restore()
        after = await say(http, "Hello.", conversation_id=mine, max_tokens=1)
        alone = await say(http, "Hello.", conversation_id=new_id(), max_tokens=1)
        n_before = before.usage["prompt_tokens"] + before.usage["completion_tokens"]
        assert n_before < after.usage["prompt_tokens"] < n_before + alone.usage["prompt_tokens"] + 5


async def test_turns_sent_at_once_follow_each_other(pair: Standing) -> None:
    async with http_of(pair.ingress) as http:
        mine = new_id()
        turns = [asyncio.create_task(say(http, f"Count to {n}.", conversation_id=mine)) for n in range(4)]
        said = await asyncio.gather(*turns)
        sizes = [turn.usage["prompt_tokens"] for turn in said]
        assert len(set(sizes)) == 4  # each read the ones before it
        again = await say(http, "Thanks.", conversation_id=mine)
        assert again.usage["prompt_tokens"] > max(sizes)
    await pair.ingress.quiet()


async def test_a_client_that_leaves_takes_its_turn_with_it(lone: Standing) -> None:
    async with http_of(lone.ingress) as http:
        mine = new_id()
        first = await say(http, STORY, conversation_id=mine)
        turn = await Turn.begin(http, OTHER_STORY, conversation_id=mine, max_tokens=400)
        await turn.read(3)
        await turn.leave()
        answer = await say(http, "Go on.", conversation_id=mine)
        told = [{"role": "user", "content": STORY}, {"role": "assistant", "content": first.text}]
        assert answer == await ask_chat(http, *told, {"role": "user", "content": "Go on."})
        # What is said next finds computed what was said before: the turn that was left is not in between.
        again = await say(http, "Thanks.", conversation_id=mine)
        assert again.n_cached >= 0.9 * (answer.usage["prompt_tokens"] + answer.usage["completion_tokens"])
    await lone.ingress.quiet()


async def test_a_deleted_conversation_is_forgotten(lone: Standing) -> None:
    async with http_of(lone.ingress) as http:
        mine = new_id()
        first = await say(http, SECRET, conversation_id=mine)
        assert (await http.delete(f"/coordinator/sessions/{mine}")).status_code == 204
        assert (await http.delete(f"/coordinator/sessions/{mine}")).status_code == 404
        again = await say(http, SECRET, conversation_id=mine)
        assert again.usage["prompt_tokens"] == first.usage["prompt_tokens"]


async def test_what_outgrows_the_context_goes_on_with_a_summary_and_what_never_fits_is_refused(
    lone: Standing,
) -> None:
    async with http_of(lone.ingress) as http:
        mine, long = new_id(), "word " * 300
        await say(http, long, conversation_id=mine, max_tokens=2)
        shortened = await say(http, long, conversation_id=mine, max_tokens=2)
        assert shortened.usage["compaction"]["turns_replaced"] == 2
        too_long = await http.post(INFER, json=body("word " * 1000, mine))
        assert (too_long.status_code, too_long.json()["error"]["reason"]) == (413, "prompt_too_long")
        after = await say(http, "Hello.", conversation_id=mine, max_tokens=2)
        assert after.usage["prompt_tokens"] > 300
        assert "compaction" not in after.usage  # the summary took the place of what it stands for
    await lone.ingress.quiet()


async def test_what_is_longer_than_is_kept_goes_on_with_a_summary(fleet: Fleet) -> None:
    limit_bytes = 1200  # far less than the context holds
    ingress = await fleet.ingress("--history-conversation-bytes", f"{limit_bytes}")
    await fleet.worker("gpu-1", ingress)
    mine, n_shortened = new_id(), 0
    async with http_of(ingress) as http:
        for _ in range(8):
            said = await say(http, "Tell me about boats and lamps. " * 6, conversation_id=mine)
            n_shortened += "compaction" in said.usage
            kept = (await http.get("/coordinator/stats")).json()["history_bytes"]
            assert kept < limit_bytes + 400  # by its last turn
    assert 1 < n_shortened < 6
    await ingress.quiet()


async def test_an_ingress_that_is_killed_and_started_again_remembers(fleet: Fleet, tmp_path: Path) -> None:
    ingress = await fleet.ingress("--history", f"sqlite:{tmp_path / 'history'}")
    worker = await fleet.worker("gpu-1", ingress)
    mine, deleted = new_id(), new_id()
    async with http_of(ingress) as http:
        await say(http, SECRET, conversation_id=mine)
        await say(http, SECRET, conversation_id=deleted)
        await http.delete(f"/coordinator/sessions/{deleted}")
        turn = await Turn.begin(http, STORY, conversation_id=mine, max_tokens=400)
        await turn.read(3)
        await ingress.kill()
        await turn.leave()
    await ingress.start()
    await worker.until_attached()
    await ingress.until_attached(1)
    async with http_of(ingress) as http:
        assert (await http.get("/coordinator/stats")).json()["sessions"] == 1
        answer = await say(http, QUESTION, conversation_id=mine)
        assert "marmalade" in answer.text.lower()
        again = await say(http, "Thanks.", conversation_id=mine)
        assert again.n_cached >= 0.9 * (answer.usage["prompt_tokens"] + answer.usage["completion_tokens"])
    assert await ingress.stop() == 0
