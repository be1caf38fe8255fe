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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from bench.flags import add_files
from bench.plots import Panel, write_png
from bench.prompts import distinct
from bench.report import print_table, spread, write_json
from bench.targets import alternate
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
Run: TypeAlias = list[dict[str, Any]]  # its turns


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    results = {name: _compare(args, name) for name in args.loads}
    rows = [row for name, runs in results.items() for row in _rows(name, runs)]
    print_table(HEADER, rows)
    write_json(args.json, "prefix", vars(args), results)
    write_png(args.png, "what is computed once", [_panel(*each) for each in results.items()])
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
    add_files(parser)
    return parser


def _compare(args: argparse.Namespace, name: str) -> dict[str, list[Run]]:
    load, n_slots, ctx_size = LOADS[name]
    measures = {
        mode: _measure(
            load,
            EngineConfig(model=args.model, max_inflight=n_slots, ctx_size=ctx_size, cache_prompt=reuses),
        )
        for mode, reuses in (("reused", True), ("anew", False))
    }
    return alternate(name, args.rounds, measures)


def _measure(load: Load, config: EngineConfig) -> Callable[[int], Run]:
    def measure(_round: int) -> Run:
        with Engine.spawn(config) as engine:
            return [asdict(turn) for turn in asyncio.run(load(engine))]

    return measure


def _rows(load: str, runs: Mapping[str, Sequence[Run]]) -> list[tuple[str, ...]]:
    """One row for each group of answers that have a name in common."""
    return [(load, name, *_figures(_named(name, runs))) for name in _names(runs)]


def _names(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    return list(dict.fromkeys(turn["name"] for turn in runs["reused"][0]))


def _named(name: str, runs: Mapping[str, Sequence[Run]]) -> dict[str, list[Run]]:
    return {
        mode: [[turn for turn in run if turn["name"] == name] for run in each] for mode, each in runs.items()
    }


def _figures(turns: Mapping[str, Sequence[Run]]) -> list[str]:
    """What is computed, and the median and the last first token of a run: reused and anew."""
    figures = [f"{statistics.median(map(_n_computed, each)):.0f}" for each in turns.values()]
    for first_ms in (_median_first_ms, _last_first_ms):
        figures += [spread([first_ms(run) for run in each], 0) for each in turns.values()]
    pairs = zip(turns["reused"], turns["anew"], strict=True)
    return [*figures, spread([_last_first_ms(a) / _last_first_ms(b) for a, b in pairs], 3)]


def _panel(load: str, runs: Mapping[str, Sequence[Run]]) -> Panel:
    """The median time to the first token of each group of answers."""
    series = {
        mode: [(name, [_median_first_ms(run) for run in _named(name, runs)[mode]]) for name in _names(runs)]
        for mode in runs
    }
    return Panel(x=load, y="TTFT p50 ms", series=series)


def _n_computed(turns: Run) -> float:
    return float(sum(turn["n_prompt"] - turn["n_cached"] for turn in turns))


def _median_first_ms(turns: Run) -> float:
    return float(1000 * statistics.median(turn["first_s"] for turn in turns))


def _last_first_ms(turns: Run) -> float:
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
