"""The order of things in a step, turned by hand: no thread, no clock."""

import pytest

from llm_engine.budget import Budget
from llm_engine.diskcache import DiskCache
from llm_engine.errors import BackendError
from llm_engine.generation import Failed, Finished
from llm_engine.llama import Logits
from llm_engine.loop import Cancel, Loop, Start
from llm_engine.sampling import Sampler, SamplingParams
from llm_engine.scheduler import Addressed, Plan, Scheduler
from llm_engine.sequence import Sequence
from llm_engine.slots import Slots
from llm_engine.store import Store
from llm_engine.text import TextAssembler
from tests.engine.fake_backend import ByteVocabulary, FakeBackend, forever

CHUNK = 4


class Turning:
    """A loop on a backend that answers for ever, and all that happened, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[object]]] = []
        self.backend = FakeBackend(forever, n_slots=4)
        self.compute = self.backend.run
        self.backend.run = self._run  # type: ignore[method-assign]
        vocabulary = ByteVocabulary()
        slots = Slots(
            4,
            self.backend,
            Store(0, DiskCache()),
            is_end_of_turn=vocabulary.is_end_of_generation,
            reuses=False,
        )
        self.loop = Loop(
            self.backend,
            slots,
            Scheduler(slots, vocabulary, prompt_slice=None),
            Budget(64, 4, chunk=CHUNK),
            self._deliver,
            lambda: None,
        )

    def ask(self, key: str, n_prompt: int) -> None:
        sequence = Sequence(
            key=key,
            tokens=[*range(n_prompt)],
            n_prompt=n_prompt,
            max_tokens=100,
            sampler=Sampler(SamplingParams(temperature=0), seed=0, choice=0, prompt=()),
            text=TextAssembler(()),
        )
        self.loop.commands.put(Start(sequence))

    def step(self) -> list[tuple[str, list[object]]]:
        """Take one; what happened in it."""
        self.seen.clear()
        self.loop.step()
        return self.seen

    def _run(self, plan: Plan) -> Logits:
        self.seen.append(("computes", [(part.sequence.key, part.n_tokens) for part in plan.slices]))
        return self.compute(plan)

    def _deliver(self, events: list[Addressed]) -> None:
        self.seen.append(("delivers", [(key, type(event)) for key, event in events if _is_end(event)]))


def _is_end(event: object) -> bool:
    return isinstance(event, Finished | Failed)


@pytest.fixture
def turning() -> Turning:
    """One sequence decodes, and a long prompt has come."""
    made = Turning()
    made.ask("stream", 3)
    made.step()
    made.ask("long", 50)
    return made


def test_tokens_leave_before_a_slice_of_a_prompt_is_computed(turning: Turning) -> None:
    assert turning.step() == [
        ("computes", [("stream", 1)]),
        ("delivers", []),
        ("computes", [("long", CHUNK)]),
        ("delivers", []),
    ]


def test_a_step_is_told_as_one_whatever_its_calls(turning: Turning) -> None:
    turning.step()
    stats = turning.loop.stats
    assert (stats.n_decoding, stats.kv_promised_tokens) == (1, 103 + 150)
    assert stats.step_ms > 0
    assert stats.tokens_per_second > 0


def test_a_call_that_fails_ends_its_sequences_and_the_step(
    turning: Turning, caplog: pytest.LogCaptureFixture
) -> None:
    turning.backend.fail_next = True
    assert turning.step() == [("computes", [("stream", 1)]), ("delivers", [("stream", Failed)])]
    assert "a step of 1 sequences failed" in caplog.text
    assert turning.step()[0] == ("computes", [("long", CHUNK)])


def test_a_slice_that_fails_is_no_matter_to_those_that_decode(
    turning: Turning, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(plan: Plan) -> Logits:
        if not plan.n_decoding:
            raise BackendError("made to fail")
        return compute(plan)

    compute = turning.compute
    monkeypatch.setattr(turning, "compute", fail)
    assert turning.step()[-1] == ("delivers", [("long", Failed)])
    assert turning.step() == [("computes", [("stream", 1)]), ("delivers", [])]


def test_a_cancel_takes_effect_at_the_next_slice(turning: Turning) -> None:
    turning.step()
    turning.loop.commands.put(Cancel("long"))
    assert turning.step() == [("computes", [("stream", 1)]), ("delivers", [("long", Finished)])]


def test_with_nothing_to_compute_events_are_delivered_all_the_same(turning: Turning) -> None:
    for key in ("stream", "long"):
        turning.loop.commands.put(Cancel(key))
    assert turning.step() == [("delivers", [("stream", Finished), ("long", Finished)])]
    assert turning.loop.stats.n_decoding == 0
    assert turning.step() == []
