"""Sequences and a scheduler for tests, which turn it by hand."""

from collections.abc import Iterable

from llm_engine.budget import Allowance
from llm_engine.diskcache import DiskCache
from llm_engine.plan import Plan
from llm_engine.sampling import Sampler, SamplingParams
from llm_engine.scheduler import Addressed, Scheduler
from llm_engine.sequence import Sequence
from llm_engine.slots import Slots
from llm_engine.store import Store
from llm_engine.text import TextAssembler
from tests.engine.fake_backend import ByteVocabulary, FakeBackend


def sequence(
    key: str,
    *,
    n_prompt: int = 3,
    prompt: Iterable[int] | None = None,
    resumed: Iterable[int] = (),
    max_tokens: int = 8,
    stop: tuple[str, ...] = (),
) -> Sequence:
    """One that is greedy. Its prompt is the tokens 0, 1, ... unless it is given."""
    tokens = [*range(n_prompt)] if prompt is None else [*prompt]
    return Sequence(
        key=key,
        tokens=[*tokens, *resumed],
        n_prompt=len(tokens),
        max_tokens=max_tokens,
        sampler=Sampler(SamplingParams(temperature=0), seed=0, choice=0, prompt=tokens),
        text=TextAssembler(stop),
    )


def empty(n_slots: int, prompt_slice: int | None = None) -> Scheduler:
    """A scheduler whose sequences share nothing."""
    vocabulary = ByteVocabulary()
    backend, is_end = FakeBackend(n_slots=n_slots), vocabulary.is_end_of_generation
    slots = Slots(n_slots, backend, Store(0, DiskCache()), is_end_of_turn=is_end, reuses=False)
    return Scheduler(slots, vocabulary, prompt_slice=prompt_slice)


def scheduler(*sequences: Sequence, n_slots: int = 4, prompt_slice: int | None = None) -> Scheduler:
    made = empty(n_slots, prompt_slice)
    for each in sequences:
        made.enqueue(each)
    made.admit(now=1.0, n_admissible=n_slots)
    return made


def turn(made: Scheduler, token: int, *, n_prompt_tokens: int = 100, now: float = 2.0) -> list[Addressed]:
    """One step in which every sampling sequence draws `token`."""
    return compute(made, made.plan(Allowance(n_prompt_tokens)), token, now)


def compute(made: Scheduler, plans: list[Plan], token: int, now: float) -> list[Addressed]:
    return [event for plan in plans for event in made.commit(plan, [token] * len(plan.sampled), now)]


def step(made: Scheduler, allowance: Allowance | int) -> list[list[tuple[object, int]]]:
    """What each call of the next step holds, of which prompts may have so many tokens."""
    if isinstance(allowance, int):
        allowance = Allowance(allowance)
    return [shape(plan) for plan in made.plan(allowance)]


def shape(plan: Plan) -> list[tuple[object, int]]:
    return [(part.sequence.key, part.n_tokens) for part in plan.slices]
