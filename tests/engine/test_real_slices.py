"""Batch invariance on real llama.cpp: however a prompt is sliced and whatever runs beside it, its tokens are
drawn from the same logits, bit for bit.

Of prompts beyond 256 tokens, from where on a query that is alone takes another path through attention if keys
and values are of one type, as 64 and more of a sequence do at any length.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from functools import cache
from typing import TypeAlias

import numpy as np
import pytest

from llm_engine import llama
from llm_engine.backend import LlamaBackend, context_params
from llm_engine.budget import Allowance
from llm_engine.config import EngineConfig
from llm_engine.diskcache import DiskCache
from llm_engine.model import Model
from llm_engine.prefix import Trim
from llm_engine.scheduler import Scheduler
from llm_engine.sequence import Sequence
from llm_engine.slots import Slots
from llm_engine.store import Store
from tests.engine.scheduling import sequence

pytestmark = pytest.mark.model

N_CTX, N_SLOTS = 512, 3
N_PROMPT = 271  # tokens: one is left after 5 x 54 of them, and after 10 x 27
N_ANSWER = 12
USUAL = 50  # prompt tokens of a step, which leave 21


class Steps:
    """The engine's steps, taken by hand on cells that hold nothing yet."""

    def __init__(self, model: Model, backend: LlamaBackend, prompt_slice: int | None) -> None:
        for n in range(N_SLOTS):
            backend.cut(n, 0)
        store = Store(1 << 30, DiskCache())
        slots = Slots(N_SLOTS, backend, store, is_end_of_turn=model.is_end_of_generation)
        self._scheduler = Scheduler(slots, model, prompt_slice)
        self._backend = backend
        self.trim = backend.trim
        self.sequences = dict[str, Sequence]()
        self._logits: dict[str, list[llama.Logits]] = {}  # of the tokens there are

    def ask(self, key: str, prompt: Items[int], *, max_tokens: int = 1) -> None:
        self.sequences[key] = sequence(key, prompt=prompt, max_tokens=max_tokens)
        self._scheduler.enqueue(self.sequences[key])

    def first_logits(self, key: str, n_prompt_tokens: int = USUAL) -> llama.Logits:
        """Step, with so many tokens of prompts, until they are there."""
        return self.logits(key, 1, n_prompt_tokens)[0]

    def answer(self, key: str, n_tokens: int) -> list[int]:
        """What it says, greedily."""
        return [int(row.argmax()) for row in self.logits(key, n_tokens)]

    def logits(self, key: str, n_tokens: int, n_prompt_tokens: int = USUAL) -> list[llama.Logits]:
        """Those of its first tokens."""
        while len(self._logits.get(key, ())) < n_tokens:
            self._scheduler.admit(now=1.0, n_admissible=N_SLOTS)
            for plan in self._scheduler.plan(Allowance(n_prompt_tokens)):
                rows = self._backend.run(plan)
                for part, row in zip(plan.sampled, rows, strict=True):
                    self._logits.setdefault(str(part.sequence.key), []).append(row.copy())
                self._scheduler.commit(plan, rows.argmax(axis=1).tolist(), now=1.0)
        return self._logits[key][:n_tokens]


Begin: TypeAlias = Callable[[], Steps]
Alone: TypeAlias = Callable[[int, int], llama.Logits]  # of how many tokens, of which seed


@pytest.fixture(scope="module", params=["smollm2", "hybrid_model", "sliding_model"])
def begin(request: pytest.FixtureRequest) -> Iterator[Begin]:
    path = request.getfixturevalue(request.param)
    config = EngineConfig(model=str(path), max_inflight=N_SLOTS, cache_type_k="bf16")
    model = Model.load(path)
    backend = LlamaBackend.create(model, context_params(config, N_CTX), "any")
    yield lambda: Steps(model, backend, config.prompt_slice)
    backend.close()
    model.close()


def words(n_tokens: int, seed: int) -> list[int]:
    chance = np.random.default_rng(seed)
    return [int(token) for token in chance.integers(1000, 40_000, n_tokens)]


@pytest.fixture(scope="module")
def alone(begin: Begin) -> Alone:
    """What a prompt gives in the usual slices, beside nobody."""

    @cache
    def first_logits(n_tokens: int, seed: int) -> llama.Logits:
        steps = begin()
        steps.ask("alone", words(n_tokens, seed))
        return steps.first_logits("alone")

    return first_logits


@pytest.mark.parametrize("n_prompt_tokens", [27, 128, N_PROMPT])
def test_alone_in_other_slices(begin: Begin, alone: Alone, n_prompt_tokens: int) -> None:
    steps = begin()
    steps.ask("a", words(N_PROMPT, 1))
    assert np.array_equal(steps.first_logits("a", n_prompt_tokens), alone(N_PROMPT, 1))


def test_beside_a_prompt_that_is_a_token_shorter(begin: Begin, alone: Alone) -> None:
    steps = begin()
    steps.ask("long", words(N_PROMPT, 1))
    steps.ask("short", words(N_PROMPT - 1, 2))
    assert np.array_equal(steps.first_logits("long", 2 * 90), alone(N_PROMPT, 1))
    assert np.array_equal(steps.first_logits("short", 2 * 90), alone(N_PROMPT - 1, 2))


def test_beside_a_sequence_that_decodes(begin: Begin, alone: Alone) -> None:
    """Of the prompt two tokens are left after 5 x 54."""
    steps = begin()
    steps.ask("stream", words(20, 3), max_tokens=100)
    steps.first_logits("stream")
    steps.ask("a", words(N_PROMPT + 1, 1))
    assert np.array_equal(steps.first_logits("a", 54), alone(N_PROMPT + 1, 1))


@pytest.mark.parametrize("n_prompt_tokens", [1, 2, 3, 9])
def test_in_a_hole_between_sequences_that_decode(begin: Begin, alone: Alone, n_prompt_tokens: int) -> None:
    """A token of it fills the hole in their call; the rest, if there is any, has a call of its own."""
    steps = begin()
    for key, seed, n_out in (("left", 3, 500), ("hole", 4, 1), ("right", 5, 500)):
        steps.ask(key, words(20, seed), max_tokens=n_out)
    steps.first_logits("right")
    steps.ask("a", words(N_PROMPT, 1))
    assert np.array_equal(steps.first_logits("a", n_prompt_tokens), alone(N_PROMPT, 1))


def test_asked_again_beside_a_sequence_that_decodes(begin: Begin, alone: Alone) -> None:
    steps = begin()
    steps.ask("stream", words(20, 3), max_tokens=100)
    steps.ask("a", words(N_PROMPT, 1))
    steps.first_logits("a")
    steps.ask("again", words(N_PROMPT, 1))
    assert np.array_equal(steps.first_logits("again"), alone(N_PROMPT, 1))
    # A recurrent state is no shorter than it has become.
    assert (steps.sequences["again"].n_cached > 0) == (steps.trim is not Trim.NOWHERE)


def test_decoding_alone_and_beside_others(begin: Begin) -> None:
    alone, together = begin(), begin()
    alone.ask("a", words(N_PROMPT, 1), max_tokens=N_ANSWER)
    apart = alone.logits("a", N_ANSWER)
    together.ask("a", words(N_PROMPT, 1), max_tokens=N_ANSWER)
    together.ask("b", words(N_PROMPT, 2), max_tokens=N_ANSWER)
    assert np.array_equal(together.logits("a", N_ANSWER), apart)


def test_a_turn_that_follows_an_answer_decoded_alone(begin: Begin) -> None:
    """As part of its prompt that answer is computed in slices, where nothing is kept."""
    warm, cold = begin(), begin()
    warm.ask("first", words(N_PROMPT, 1), max_tokens=N_ANSWER)
    turn = [*words(N_PROMPT, 1), *warm.answer("first", N_ANSWER), *words(5, 2)]
    for steps in (warm, cold):
        steps.ask("second", turn, max_tokens=N_ANSWER)
    assert np.array_equal(warm.logits("second", N_ANSWER), cold.logits("second", N_ANSWER))
    assert warm.sequences["second"].n_cached > N_PROMPT > cold.sequences["second"].n_cached == 0
