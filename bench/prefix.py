"""`python -m bench prefix`: what it saves to begin with cells that are there already.

Three loads, each on an engine that reuses and on one that computes every prompt anew, in alternating runs,
with one engine alive at a time:

- conversation: a long one; the time to its first token, turn by turn.
- shared: requests with one long system prompt, all at once; what is computed, and when they hear something.
- alternating: twice as many conversations as slots, in turns; their KV comes back from host memory.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from bench.prompts import distinct
from bench.report import print_table, spread, write_json
from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.generation import Delta, Finished, GenerateRequest, Message
from llm_engine.sampling import SamplingParams

HEADER = ("load", "turn", "tokens", "anew", "TTFT p50 ms", "anew", "last ms", "anew", "last / anew")
HISTORY_TOKENS, N_TURNS = 2000, 4
SYSTEM_TOKENS, N_AT_ONCE = 1000, 16
TALK_TOKENS, N_TALKS = 400, 8
ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer as its caller saw it. Units: seconds since it was asked, tokens."""

    name: str
    first_s: float
    n_prompt: int
    n_cached: int


Load: TypeAlias = Callable[[Engine], Coroutine[Any, Any, list[Turn]]]


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    results = {name: _compare(args, *LOADS[name]) for name in args.loads}
    print()
    rows = [row for name, runs in results.items() for row in _rows(name, runs)]
    print_table(HEADER, rows)
    write_json(args.json, "prefix", vars(args), results)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench prefix", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="as for llm-engine (smollm2)")
    parser.add_argument(
        "--loads",
        type=lambda text: text.split(","),
        default=list(LOADS),
        help=f"which of {','.join(LOADS)} (all)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of each (3)")
    parser.add_argument("--json", metavar="FILE", help="file for the raw figures")
    return parser


def _compare(args: argparse.Namespace, load: Load, n_slots: int, ctx_size: int) -> list[dict[str, Any]]:
    runs = []
    for _ in range(args.rounds):
        run = {}
        for mode, reuses in (("reused", True), ("anew", False)):
            config = EngineConfig(
                model=args.model, max_inflight=n_slots, ctx_size=ctx_size, cache_prompt=reuses
            )
            with Engine.spawn(config) as engine:
                run[mode] = [asdict(turn) for turn in asyncio.run(load(engine))]
            print(".", end="", flush=True)
        runs.append(run)
    return runs


def _rows(load: str, runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each group of answers that have a name in common."""
    names = dict.fromkeys(turn["name"] for turn in runs[0]["reused"])
    return [(load, name, *_figures(name, runs)) for name in names]


def _figures(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """What is computed, and the median and the last first token of a run: reused and anew."""
    turns = {
        mode: [[turn for turn in run[mode] if turn["name"] == name] for run in runs]
        for mode in ("reused", "anew")
    }
    figures = [f"{statistics.median(map(_n_computed, turns[mode])):.0f}" for mode in turns]
    for first_ms in (_median_first_ms, _last_first_ms):
        figures += [spread([first_ms(run) for run in turns[mode]], 0) for mode in turns]
    pairs = zip(turns["reused"], turns["anew"], strict=True)
    return [*figures, spread([_last_first_ms(a) / _last_first_ms(b) for a, b in pairs], 3)]


def _n_computed(turns: list[dict[str, Any]]) -> float:
    return float(sum(turn["n_prompt"] - turn["n_cached"] for turn in turns))


def _median_first_ms(turns: list[dict[str, Any]]) -> float:
    return float(1000 * statistics.median(turn["first_s"] for turn in turns))


def _last_first_ms(turns: list[dict[str, Any]]) -> float:
    return float(1000 * max(turn["first_s"] for turn in turns))


# --- the loads ----------------------------------------------------------------------------------------------


async def _conversation(engine: Engine) -> list[Turn]:
    chat: list[Message] = []
    question = _text(engine, min(HISTORY_TOKENS, engine.info.n_ctx * 3 // 4))
    turns = []
    for i in range(N_TURNS):
        turns.append(await _say(engine, chat, question, f"turn {i + 1}"))
        question = f"And what happened after that, in part {i + 2}?"
    return turns


async def _shared(engine: Engine) -> list[Turn]:
    system: Message = {"role": "system", "content": _text(engine, SYSTEM_TOKENS)}
    questions = distinct(N_AT_ONCE)
    return await asyncio.gather(*(_say(engine, [system], text, "all at once") for text in questions))


async def _alternating(engine: Engine) -> list[Turn]:
    chats: list[list[Message]] = [[] for _ in range(N_TALKS)]
    text = _text(engine, TALK_TOKENS)
    turns = []
    for i, question in enumerate(("And then?", "Who was there?")):
        for number, chat in enumerate(chats):
            asked = f"Talk {number}. {text}" if i == 0 else question
            turns.append(await _say(engine, chat, asked, f"turn {i + 1}"))
    return turns


LOADS: dict[str, tuple[Load, int, int]] = {  # the load, slots, context of each
    "conversation": (_conversation, 4, 4096),
    "shared": (_shared, N_AT_ONCE, 2048),
    "alternating": (_alternating, N_TALKS // 2, 1024),
}


async def _say(engine: Engine, chat: list[Message], question: str, name: str) -> Turn:
    """Another turn; its question and its answer are appended to the chat."""
    chat.append({"role": "user", "content": question})
    request = GenerateRequest(
        messages=tuple(chat), max_tokens=ANSWER_TOKENS, sampling=SamplingParams(temperature=0)
    )
    prepared = engine.prepare(request)
    asked_at, first_s, text = time.perf_counter(), 0.0, ""
    async for event in engine.submit(prepared):
        first_s = first_s or time.perf_counter() - asked_at
        if isinstance(event, Delta):
            text += event.text
    assert isinstance(event, Finished), f"an answer failed: {event}"
    chat.append({"role": "assistant", "content": text})
    return Turn(name=name, first_s=first_s, n_prompt=event.n_prompt, n_cached=event.n_cached)


def _text(engine: Engine, n_tokens: int) -> str:
    """Sentences that come to about so many tokens."""
    sentences = distinct(n_tokens // 30)
    n_all = len(engine.prepare(GenerateRequest.user(" ".join(sentences))).prompt)
    return " ".join(sentences[: max(1, len(sentences) * n_tokens // n_all)])
