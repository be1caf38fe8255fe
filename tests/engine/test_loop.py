"""The order of things in a step, turned by hand: no thread, no clock."""

import pytest

from llm_engine.budget import Budget
from llm_engine.diskcache import DiskCache
from llm_engine.errors import BackendError
from llm_engine.generation import Delta, Failed, Finished
from llm_engine.llama import Logits
from llm_engine.loop import Cancel, Loop, Start, StepStats
from llm_engine.plan import Plan
from llm_engine.scheduler import Addressed, Scheduler
from llm_engine.slots import Slots
from llm_engine.store import Store
from tests.engine.fake_backend import ByteVocabulary, FakeBackend, forever
from tests.engine.scheduling import sequence

CHUNK = 4


class Turning:
    """A loop on a backend that answers for ever, and all that happened, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[object]]] = []
        self.told: list[StepStats] = []  # what was known when events were delivered
        self.now = 100.0
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
            clock=lambda: self.now,
        )

    def ask(self, key: str, n_prompt: int) -> None:
        self.loop.commands.put(Start(sequence(key, n_prompt=n_prompt, max_tokens=100)))

    def step(self) -> list[tuple[str, list[object]]]:
        """Take one; what happened in it."""
        self.seen.clear()
        self.loop.step()
        return self.seen

    def _run(self, plan: Plan) -> Logits:
        self.seen.append(("computes", [(part.sequence.key, part.n_tokens) for part in plan.slices]))
        self.now += 0.010 if plan.n_decoding else 0.030
        return self.compute(plan)

    def _deliver(self, events: list[Addressed]) -> None:
        self.seen.append(("delivers", [(key, type(event)) for key, event in events]))
        self.told.append(self.loop.stats)


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
        ("delivers", [("stream", Delta)]),
        ("computes", [("long", CHUNK)]),
    ]


def test_how_things_stand_is_told_before_events_are_delivered(turning: Turning) -> None:
    turning.told.clear()
    turning.step()
    (first,), second = turning.told, turning.loop.stats
    assert (first.n_decoding, first.kv_promised_tokens, first.ended_at) == (1, 103 + 150, turning.now - 0.030)
    assert second.ended_at == turning.now
    assert second.step_ms == pytest.approx(first.step_ms + 0.1 * (40 - first.step_ms))


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
    assert turning.step() == [("computes", [("stream", 1)]), ("delivers", [("stream", Delta)])]


def test_a_cancel_takes_effect_at_the_next_slice(turning: Turning) -> None:
    turning.step()
    turning.loop.commands.put(Cancel("long"))
    assert turning.step() == [
        ("computes", [("stream", 1)]),
        ("delivers", [("long", Finished), ("stream", Delta)]),
    ]


def test_what_was_cancelled_before_the_loop_failed_hears_of_its_end(
    turning: Turning, monkeypatch: pytest.MonkeyPatch
) -> None:
    turning.step()
    turning.loop.commands.put(Cancel("long"))
    monkeypatch.setattr(Budget, "allowance", None)
    with pytest.raises(TypeError):
        turning.step()
    turning.seen.clear()
    turning.loop.end()
    assert turning.seen == [("delivers", [("long", Finished), ("stream", Failed)])]


def test_with_nothing_to_compute_events_are_delivered_all_the_same(turning: Turning) -> None:
    for key in ("stream", "long"):
        turning.loop.commands.put(Cancel(key))
    assert turning.step() == [("delivers", [("stream", Finished), ("long", Finished)])]
    assert turning.loop.stats.n_decoding == 0
    assert turning.step() == []
