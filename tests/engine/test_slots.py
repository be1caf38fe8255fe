"""Prefix reuse over cells that are checked: what lies where, who waits for whom.

The fake backend refuses to compute on cells that hold other tokens than their sequence says, so every answer
here is also a proof that nothing stale was used.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.budget import Allowance
from llm_engine.diskcache import DiskCache, Write
from llm_engine.errors import BackendError
from llm_engine.generation import Finished
from llm_engine.info import Tier
from llm_engine.prefix import N_COMPUTED_ANEW, WORTH_TOKENS, Trim
from llm_engine.scheduler import Scheduler
from llm_engine.sequence import Sequence
from llm_engine.slots import GENTLE_BYTES, KvCost, Slots
from llm_engine.store import Store
from tests.engine.fake_backend import END, ByteVocabulary, FakeBackend
from tests.engine.fake_disk import FakeDisk
from tests.engine.scheduling import sequence

MIB = 1 << 20
KINDS = pytest.mark.parametrize("trim", list(Trim))
END_OF_TURN = END


def next_token(tokens: Iterable[int]) -> int:
    """Depends on every token so far, so that an answer from other cells is another answer."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1009
    return state % 250


class World:
    """A scheduler over the fake backend, turned by hand."""

    def __init__(
        self,
        trim: Trim = Trim.ANYWHERE,
        *,
        n_slots: int = 4,
        ram_bytes: int = MIB,
        disk_bytes: int = 0,
        reuses: bool = True,
        ttl_s: float | None = None,
        disk: FakeDisk | None = None,
    ) -> None:
        self.now = 0.0
        self.backend = FakeBackend(next_token, n_slots=n_slots, trim=trim)
        self.disk = disk or FakeDisk()
        found = [(stored, self.now) for stored in self.disk.files]
        self.disk_cache = DiskCache(disk_bytes, self.disk.order, found)
        self.store = Store(ram_bytes, self.disk_cache)
        self.host = self.store.host
        self.slots = Slots(
            n_slots,
            self.backend,
            self.store,
            is_end_of_turn=lambda token: token == END_OF_TURN,
            reuses=reuses,
            ttl_s=ttl_s,
        )
        self.scheduler = Scheduler(self.slots, ByteVocabulary(), prompt_slice=None)
        self.ended: dict[str, Finished] = {}
        self.sequences = dict[str, Sequence]()

    def ask(self, key: str, prompt: list[int], *, resumed: Iterable[int] = (), max_tokens: int = 3) -> None:
        self.sequences[key] = sequence(key, prompt=prompt, resumed=resumed, max_tokens=max_tokens)
        self.scheduler.enqueue(self.sequences[key])

    def step(self, n_prompt_tokens: int = 64) -> bool:
        """One turn, which takes a second; whether anything was computed."""
        self.now += 1.0
        events = self.scheduler.admit(self.now, n_admissible=len(self.backend.slots))
        plans = self.scheduler.plan(Allowance(n_prompt_tokens))
        for plan in plans:
            rows = self.backend.run(plan)
            events += self.scheduler.commit(plan, [int(row.argmax()) for row in rows], self.now)
        self.ended.update({str(key): event for key, event in events if isinstance(event, Finished)})
        return bool(plans)

    def run(self) -> None:
        """Until nothing is left to do, by the disk neither."""
        for _ in range(10_000):
            computed = self.step()
            if not self.take_from_disk() and not computed:
                break
        assert not self.scheduler.all_sequences(), "somebody waits for ever"

    def take_from_disk(self) -> bool:
        """Have the disk do all it was told; whether that was anything."""
        outcomes = self.disk.do()
        for outcome in outcomes:
            self.store.take(outcome, self.now)
        return bool(outcomes)

    def answer(self, key: str, prompt: list[int], *, max_tokens: int = 3) -> Finished:
        self.ask(key, prompt, max_tokens=max_tokens)
        self.run()
        return self.ended[key]

    def cached(self, key: str) -> int:
        return self.ended[key].n_cached

    def slot_of(self, key: str) -> int | None:
        return self.sequences[key].seq_id


def words(seed: int, n: int) -> list[int]:
    """A text of `n` tokens that no other seed begins with."""
    return [seed, *((seed * 7 + i * i) % 250 for i in range(n - 1))]


def said(world: World, key: str) -> list[int]:
    """The whole conversation so far: prompt and answer."""
    return list(world.sequences[key].tokens)


@KINDS
def test_a_prompt_that_goes_on_from_an_earlier_one_computes_only_what_is_new(trim: Trim) -> None:
    world = World(trim)
    world.answer("first", words(1, 100))
    before = world.backend.n_computed
    prompt = [*said(world, "first"), *words(2, 10)]
    assert world.answer("second", prompt, max_tokens=1).n_cached == 102  # all but the last token sampled
    assert world.backend.n_computed - before == len(prompt) - 102
    assert world.backend.moves == []


def test_what_runs_and_what_is_kept_is_told_wherever_it_lies() -> None:
    world = World(n_slots=2)
    world.ask("a", words(1, 100), max_tokens=3)
    world.step(10)
    assert world.slots.running == Tier(n_sessions=1, n_bytes=10)  # a byte a token here
    assert world.slots.tier == Tier(n_sessions=0, n_bytes=0)
    world.run()
    assert world.slots.running == Tier(n_sessions=0, n_bytes=0)
    assert world.slots.tier == Tier(n_sessions=1, n_bytes=102)
    world.answer("short", words(9, WORTH_TOKENS - 5), max_tokens=2)
    assert world.slots.tier.n_sessions == 1  # what is not worth keeping is no conversation
    for n in (2, 3):
        world.answer(f"{n}", words(n, 100))
    assert (world.slots.tier.n_sessions, world.host.tier.n_sessions) == (2, 1)


@KINDS
def test_turns_of_three_conversations_on_two_slots_find_their_cells(trim: Trim) -> None:
    world = World(trim, n_slots=2)
    talk = {key: words(i, 100) for i, key in enumerate("abc", start=1)}
    for turn in range(4):
        for key in "abc":
            end = world.answer(f"{key}{turn}", talk[key])
            if turn:
                assert end.n_cached >= 0.9 * (end.n_prompt - 10)
            talk[key] = [*said(world, f"{key}{turn}"), *words(50 + turn, 10)]
    assert "restore" in world.backend.moves


@KINDS
def test_requests_that_begin_alike_compute_it_once(trim: Trim) -> None:
    world = World(trim, n_slots=16)
    system = [*words(1, 200), END_OF_TURN]
    for i in range(16):
        world.ask(str(i), [*system, *words(100 + i, 12)], max_tokens=1)
    world.run()
    assert world.backend.n_computed == len(system) + 16 * 12
    assert sorted(world.cached(str(i)) for i in range(16)) == [0, *[len(system)] * 15]


@KINDS
def test_the_same_prompt_sixteen_times_computes_it_once_but_for_its_end(trim: Trim) -> None:
    world = World(trim, n_slots=16)
    for i in range(16):
        world.ask(str(i), words(1, 200), max_tokens=1)
    world.run()
    assert world.backend.n_computed == 200 + 15 * N_COMPUTED_ANEW


@KINDS
def test_who_waits_for_one_that_is_cancelled_takes_what_it_left(trim: Trim) -> None:
    world = World(trim)
    system = words(1, 200)
    world.ask("a", [*system, *words(2, 20)])
    world.ask("b", [*system, *words(3, 20)])
    world.step(50)
    world.step(50)
    world.scheduler.cancel("a", now=2.0)
    world.run()
    assert world.cached("b") == 100
    assert world.ended["b"].n_completion == 3


@KINDS
def test_nobody_waits_for_one_that_is_paused(trim: Trim) -> None:
    world = World(trim)
    system = words(1, 200)
    world.ask("a", [*system, *words(2, 20)])
    world.ask("b", [*system, *words(3, 20)])
    world.step(50)
    world.scheduler.set_paused("a", True)
    for _ in range(20):
        world.step(50)
    assert world.ended["b"].n_completion == 3
    world.scheduler.set_paused("a", False)
    world.run()
    assert world.ended["a"].n_completion == 3


def test_a_prompt_that_shares_little_neither_waits_nor_moves_cells() -> None:
    world = World()
    start = words(1, WORTH_TOKENS - 1)
    for i in range(3):
        world.ask(str(i), [*start, *words(10 + i, 40)])
    world.step(1000)
    assert len(world.backend.plans[0]) == 3
    world.run()
    assert world.backend.moves == []


@KINDS
def test_an_answer_asked_for_again_is_computed_from_the_end_of_its_prompt(trim: Trim) -> None:
    world = World(trim)
    prompt = [*words(1, 100), END_OF_TURN, 5, 6, 7, 8]
    world.answer("first", prompt)
    n_cached = world.answer("again", prompt).n_cached
    assert n_cached == (104 if trim is not Trim.NOWHERE else 101)
    assert said(world, "again") == said(world, "first")


@pytest.mark.parametrize("ram_bytes", [0, MIB])
def test_what_was_computed_outlives_others_as_long_as_a_slot_is_empty(ram_bytes: int) -> None:
    world = World(ram_bytes=ram_bytes)
    world.ask("stream", [*range(3)], max_tokens=500)
    world.step()
    for key, start in (("x", 1000), ("y", 2000), ("z", 3000)):
        world.ask(key, [*range(start, start + 100)])
        while key not in world.ended:
            world.step()
    for key in "xyz":
        world.ask(f"{key} again", world.sequences[key].tokens)
        while f"{key} again" not in world.ended:
            world.step()
        assert world.ended[f"{key} again"].n_cached >= 100


def test_without_host_memory_what_was_unused_for_longest_gives_way() -> None:
    world = World(n_slots=2, ram_bytes=0)
    for key, start in (("x", 1000), ("y", 2000), ("z", 3000)):
        world.ask(key, [*range(start, start + 100)])
        world.run()
    world.ask("y again", world.sequences["y"].tokens)
    world.run()
    assert world.ended["y again"].n_cached >= 100


def test_a_long_run_is_not_cut_for_a_prompt_that_shares_a_part_of_it() -> None:
    world = World()
    system = words(1, 100)
    world.answer("long", [*system, *words(2, 100)])
    world.answer("other", [*system, *words(3, 20)])
    assert world.cached("other") == 100
    assert world.answer("longer", [*said(world, "long"), *words(4, 5)]).n_cached == 202


@pytest.mark.parametrize("n_slots", [1, 2])
def test_a_short_answer_outlives_another_that_shares_its_prompt(n_slots: int) -> None:
    world = World(n_slots=n_slots)
    system = words(1, 60)
    world.answer("a", [*system, *words(2, 10)])
    world.answer("b", [*system, *words(3, 10)])
    assert world.cached("b") == 60
    assert world.answer("a again", [*said(world, "a"), *words(4, 5)]).n_cached == 72


def test_with_no_slot_to_spare_the_rest_of_a_long_run_goes_to_host_memory() -> None:
    world = World(n_slots=1)
    system = words(1, 100)
    world.answer("long", [*system, *words(2, 100)])
    world.answer("other", [*system, *words(3, 20)])
    assert world.cached("other") == 100
    assert world.answer("longer", [*said(world, "long"), *words(4, 5)]).n_cached == 202


def test_a_prefix_of_a_running_sequence_is_copied() -> None:
    world = World()
    system = words(1, 100)
    world.ask("running", [*system, *words(2, 20)], max_tokens=500)
    for _ in range(10):
        world.step()
    world.ask("other", [*system, *words(3, 20)], max_tokens=1)
    world.step()
    assert world.cached("other") == 100
    assert world.backend.moves == ["copy"]


def test_cells_move_so_that_the_slots_in_use_lie_together() -> None:
    world = World(n_slots=8)
    for i in range(8):
        world.ask(f"old {i}", words(i, 100), max_tokens=1)
    world.run()
    world.ask("a", [*said(world, "old 0"), *words(20, 5)], max_tokens=100)
    world.step()
    far = next(i for i in range(8) if world.slot_of(f"old {i}") == 6)
    world.ask("b", [*said(world, f"old {far}"), *words(21, 5)], max_tokens=100)
    world.step()
    slots = sorted((world.slot_of("a") or 0, world.slot_of("b") or 0))
    assert slots[1] - slots[0] == 1
    assert world.sequences["b"].n_cached == 100


@pytest.mark.parametrize(
    ("token_bytes", "n_copies"), [(1, [3]), (GENTLE_BYTES // 200, [2, 3]), (GENTLE_BYTES, [1, 2, 3])]
)
def test_beside_running_streams_no_step_moves_many_bytes(token_bytes: int, n_copies: list[int]) -> None:
    world = World(n_slots=8)
    world.backend.cost = KvCost(sequence_bytes=0, token_bytes=token_bytes)
    system = words(1, 100)
    world.ask("stream", [*system, *words(2, 20)], max_tokens=500)
    for _ in range(5):
        world.step()
    for i in range(3):
        world.ask(f"{i}", [*system, *words(10 + i, 20)], max_tokens=1)
    for n in n_copies:
        world.step(1000)
        assert world.backend.moves == ["copy"] * n


def test_cells_that_moved_leave_their_old_slot_empty() -> None:
    world = World(n_slots=4)
    for i in range(4):
        world.ask(f"old {i}", words(i, 100), max_tokens=1)
    world.run()
    home = {world.slot_of(f"old {i}"): i for i in range(4)}
    world.ask("a", [*said(world, f"old {home[0]}"), *words(20, 5)], max_tokens=100)
    world.step()
    world.ask("b", [*said(world, f"old {home[3]}"), *words(21, 5)], max_tokens=100)
    world.step()
    assert (world.slot_of("a"), world.slot_of("b")) == (0, 1)
    assert world.backend.moves == ["save", "copy"]  # what lay in slot 1, and what now lies there
    assert world.backend.slots[3].tokens == []


def test_a_prefix_that_another_has_left_behind_is_not_waited_for() -> None:
    world = World(Trim.NOWHERE)
    system = words(1, 100)
    world.ask("a", [*system, *words(2, 100)], max_tokens=100)
    world.step(150)
    world.ask("b", [*system, *words(3, 20)], max_tokens=1)
    world.step(500)  # up to where it parts from a: a checkpoint is taken there
    world.step(500)
    assert world.ended["b"].n_cached == 0


def test_a_short_last_turn_has_a_checkpoint_of_its_own() -> None:
    """It goes on from the end of the answer before it, which is overwritten, and is no checkpoint."""
    world = World(Trim.NOWHERE)
    world.answer("first", [*words(1, 60), END_OF_TURN, 1], max_tokens=40)
    second = [*said(world, "first"), 2, END_OF_TURN, 1]
    world.answer("second", second)
    world.answer("again", second)
    assert world.cached("second") == len(said(world, "first")) - 1
    assert world.cached("again") == len(second) - 1


def test_a_checkpoint_is_taken_once() -> None:
    world = World(Trim.NOWHERE)
    for i in range(5):
        world.answer(f"{i}", [*words(1, 100), END_OF_TURN, *words(10 + i, 40)])
    assert [saved.run.n_cells for saved in world.host.checkpoints] == [101]
    assert world.cached("4") == 101


def test_what_was_used_last_stays_in_host_memory() -> None:
    world = World(n_slots=1)
    system = words(1, 100)
    for key, prompt in (("a", [*system, *words(2, 100)]), ("b", words(3, 200)), ("c", words(4, 200))):
        world.answer(key, prompt)
    room_for_two = world.host.n_bytes + 100
    world = World(n_slots=1, ram_bytes=room_for_two)
    for key, prompt in (("a", [*system, *words(2, 100)]), ("b", words(3, 200)), ("c", words(4, 200))):
        world.answer(key, prompt)
    world.answer("like a", [*system, *words(5, 10)])
    assert world.answer("a again", [*said(world, "a"), *words(6, 5)]).n_cached == 202


def test_a_continuation_finds_what_an_earlier_attempt_computed() -> None:
    world = World()
    prompt = words(1, 100)
    world.ask("lost", prompt, max_tokens=60)
    for _ in range(50):
        world.step()
    world.scheduler.cancel("lost", now=2.0)
    told = said(world, "lost")[100:]
    world.ask("again", prompt, resumed=told, max_tokens=60)
    world.run()
    assert world.cached("again") == 100 + len(told) - N_COMPUTED_ANEW
    assert world.ended["again"].n_completion == 60
    undisturbed = World()
    undisturbed.answer("alone", prompt, max_tokens=60)
    assert said(world, "again") == said(undisturbed, "alone")


@KINDS
def test_cells_of_a_failed_step_are_never_used_again(trim: Trim) -> None:
    world = World(trim)
    world.ask("bad", words(1, 100))
    world.step(50)
    world.scheduler.fail(world.scheduler.all_sequences(), BackendError("no"))
    assert world.answer("good", words(1, 100)).n_cached == 0


@KINDS
def test_a_state_that_llama_cpp_does_not_take_is_computed_anew(trim: Trim) -> None:
    world = World(trim, n_slots=1)
    world.answer("a", words(1, 100))
    prompt = [*said(world, "a"), *words(3, 10)]
    world.answer("b", words(2, 100))
    world.backend.takes_no_state = True
    assert world.answer("a again", prompt).n_cached == 0
    world.backend.takes_no_state = False
    assert [saved.run.tokens[0] for saved in world.host.runs] == [2]  # b's; a's is not tried a second time
    assert world.answer("b again", [*said(world, "b"), *words(4, 10)]).n_cached == 102


def test_without_reuse_every_prompt_is_computed_whole_and_nothing_stays() -> None:
    world = World(n_slots=2, reuses=False)
    for key in ("a", "b"):
        assert world.answer(key, words(1, 100)).n_cached == 0
    assert not any(cells.tokens for cells in world.backend.slots)


# --- on disk ------------------------------------------------------------------------------------------------


def crowded(trim: Trim = Trim.ANYWHERE, **options: Any) -> tuple[World, list[int]]:
    """One slot, and room for one run in host memory: the first of three talks is on disk."""
    world = World(trim)
    world.answer("a", words(1, 100))
    size = world.backend.n_state_bytes(world.slot_of("a") or 0, checkpoint=False)
    world = World(trim, n_slots=1, ram_bytes=int(1.5 * size), disk_bytes=MIB, **options)
    for i, key in enumerate("abc", start=1):
        world.answer(key, words(i, 100))
    assert [stored.run.tokens[0] for stored in world.disk.files] == [1]
    return world, [*said(world, "a"), *words(9, 10)]


@KINDS
def test_what_host_memory_has_no_room_for_comes_back_from_disk(trim: Trim) -> None:
    world, prompt = crowded(trim)
    assert world.answer("a again", prompt).n_cached == 102


def test_a_run_lies_in_one_place_only() -> None:
    world, prompt = crowded()
    world.answer("a again", prompt, max_tokens=1)
    assert sorted(stored.run.tokens[0] for stored in world.disk.files) == [2]
    assert [saved.run.tokens[0] for saved in world.host.runs] == [3]
    assert world.disk_cache.tier == Tier(1, sum(state.n_bytes for state in world.disk.files.values()))


def test_others_go_on_while_one_waits_for_the_disk() -> None:
    world = World(n_slots=2, ram_bytes=2000, disk_bytes=MIB)
    for i in range(1, 9):
        world.answer(str(i), words(i, 100))
    on_disk = next(iter(world.disk.files)).run.tokens
    world.ask("stream", words(20, 10), max_tokens=500)
    world.step()
    world.ask("back", [*on_disk, *words(21, 10)])
    for _ in range(5):
        assert world.step()
        assert world.backend.plans[-1] == [(world.slot_of("stream"), 1)]
    world.take_from_disk()
    world.step()
    assert world.sequences["back"].n_cached == len(on_disk)


def test_two_that_want_the_same_from_disk_read_it_once() -> None:
    before, prompt = crowded()
    world = World(n_slots=2, disk_bytes=MIB, disk=before.disk)
    world.ask("one", prompt)
    world.ask("two", [*prompt, 1])
    world.step()
    assert len(world.disk.orders) == 1
    world.run()
    assert world.cached("one") == 102
    assert world.cached("two") >= 102


def test_what_is_not_written_yet_is_taken_back_at_once() -> None:
    world, _ = crowded()
    world.disk.do()
    prompt = [*said(world, "b"), *words(9, 10)]
    world.ask("d", words(4, 100))
    while world.step():
        pass
    (order,) = world.disk.orders
    assert isinstance(order, Write)
    assert order.stored.run.tokens[0] == 2
    world.ask("b again", prompt)
    world.step()
    assert world.sequences["b again"].n_cached == 102
    world.run()


def test_a_file_that_is_no_good_is_computed_anew() -> None:
    world, prompt = crowded()
    world.disk.is_broken = True
    assert world.answer("a again", prompt).n_cached == 0
    assert 1 not in [stored.run.tokens[0] for stored in world.disk_cache.runs]


def test_on_a_full_disk_nothing_is_kept_and_everything_goes_on() -> None:
    world, prompt = crowded()
    world.disk.is_full = True
    for i in range(10, 14):
        world.answer(str(i), words(i, 100))
    assert len(world.disk_cache.runs) == 1
    assert world.answer("a again", prompt).n_cached == 102


def test_who_is_cancelled_while_the_disk_reads_leaves_it_in_host_memory() -> None:
    world, prompt = crowded()
    world.ask("a again", prompt)
    world.step()
    world.scheduler.cancel("a again", now=world.now)
    world.run()
    assert 1 in [saved.run.tokens[0] for saved in world.host.runs]
    assert world.answer("a once more", prompt).n_cached == 102


@KINDS
def test_what_was_put_away_is_there_for_the_next_engine(trim: Trim) -> None:
    world = World(trim, n_slots=2, disk_bytes=MIB)
    for i, key in enumerate("abcd", start=1):
        world.answer(key, words(i, 100))
    for _ in world.slots.put_away():
        world.take_from_disk()
    found = [(stored.run.tokens[0], stored.is_checkpoint) for stored in world.disk.files]
    assert sorted(found) == [(1, False), (2, False), (3, False), (4, False)]
    assert [first for first, _ in found[:2]] == [4, 3]  # those used last come first
    again = World(trim, n_slots=1, disk_bytes=MIB, disk=world.disk)
    assert again.answer("a", [*said(world, "a"), *words(9, 10)]).n_cached == 102


def test_of_two_slots_with_the_same_run_one_is_put_away() -> None:
    world = World(n_slots=2, disk_bytes=MIB)
    for key in ("a", "b"):
        world.ask(key, words(1, 100))
    world.run()
    for _ in world.slots.put_away():
        world.take_from_disk()
    assert [stored.run.n_cells for stored in world.disk.files] == [102]


# --- expiring -----------------------------------------------------------------------------------------------


@KINDS
def test_what_nobody_used_for_its_time_is_dropped_wherever_it_lies(trim: Trim) -> None:
    world, prompt = crowded(trim, ttl_s=1000)
    places = [world.slots.tier, world.host.tier, world.disk_cache.tier]
    assert [tier.n_sessions for tier in places] == [1, 1, 1]
    look_again = world.slots.expire(world.now)
    while look_again is not None and world.disk_cache.runs:
        world.now = look_again
        look_again = world.slots.expire(world.now)
        world.take_from_disk()
    assert [tier.n_sessions for tier in (world.slots.tier, world.host.tier)] == [1, 1]  # used later
    assert not world.disk.files
    world.slots.expire(world.now + 1000)
    assert [world.slots.tier, world.host.tier] == [Tier(0, 0), Tier(0, 0)]
    assert world.backend.slots[0].tokens == []
    assert world.answer("a again", prompt).n_cached == 0


def test_what_is_used_does_not_expire() -> None:
    world = World(n_slots=1, ttl_s=50)
    talk = words(1, 100)
    for turn in range(5):
        end = world.answer(str(turn), talk)
        assert turn == 0 or end.n_cached >= 100
        talk = [*said(world, str(turn)), *words(20 + turn, 10)]
        world.now += 40
        world.slots.expire(world.now)


def test_a_sequence_that_holds_its_slot_never_expires() -> None:
    world = World(ttl_s=10)
    world.ask("slow", words(1, 100), max_tokens=5)
    world.step()
    world.scheduler.set_paused("slow", True)
    world.now += 1000
    assert world.slots.expire(world.now) == world.now + 10
    world.scheduler.set_paused("slow", False)
    world.run()
    assert world.ended["slow"].n_completion == 5


def test_the_next_look_is_due_when_the_oldest_has_had_its_time() -> None:
    world = World(ttl_s=100)
    assert world.slots.expire(0.0) == 100
    world.answer("a", words(1, 100), max_tokens=1)
    used_at = world.now - 1  # its last turn had nothing left to do
    world.answer("b", words(2, 100), max_tokens=1)
    assert world.slots.expire(50.0) == used_at + 100
    assert World().slots.expire(0.0) is None


# --- any order of events ------------------------------------------------------------------------------------

BLOCKS = [words(1, 40), words(2, 70), [*words(3, 50), END_OF_TURN], words(4, 9), [5, END_OF_TURN]]
SOME_BLOCKS = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5)
ONE_OF_THEM = st.integers(0, 20)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), SOME_BLOCKS),
        st.tuples(st.just("go on"), ONE_OF_THEM, SOME_BLOCKS),
        st.tuples(st.just("resume"), ONE_OF_THEM),
        st.tuples(st.just("step"), st.integers(1, 90)),
        st.tuples(st.just("cancel"), ONE_OF_THEM),
        st.tuples(st.just("pause"), ONE_OF_THEM),
        st.tuples(st.just("fail"), ONE_OF_THEM),
        st.tuples(st.just("refuse states"), st.booleans()),
        st.tuples(st.just("disk"), st.booleans(), st.booleans()),
        st.tuples(st.just("expire"), st.integers(0, 60)),
    ),
    max_size=40,
)


@KINDS
@given(
    actions=ACTIONS,
    n_slots=st.integers(1, 4),
    ram_bytes=st.sampled_from([0, 1500, 4000, MIB]),
    disk_bytes=st.sampled_from([0, 3000, MIB]),
)
def test_nothing_stale_is_used_and_everybody_ends_in_any_order_of_events(
    trim: Trim, actions: list[tuple[Any, ...]], n_slots: int, ram_bytes: int, disk_bytes: int
) -> None:
    world = World(trim, n_slots=n_slots, ram_bytes=ram_bytes, disk_bytes=disk_bytes, ttl_s=50)
    for number, (verb, *details) in enumerate(actions):
        act(world, str(number), verb, details)
        assert world.host.n_bytes <= ram_bytes
        assert world.disk_cache.n_bytes <= disk_bytes
    for each in world.scheduler.all_sequences():
        each.paused = False
    world.run()
    assert world.host.n_bytes == sum(s.state.n_bytes for s in (*world.host.runs, *world.host.checkpoints))
    world.take_from_disk()
    assert {*world.disk.files} == {*world.disk_cache.runs, *world.disk_cache.checkpoints}
    assert world.disk_cache.n_bytes == sum(state.n_bytes for state in world.disk.files.values())
    for each in world.sequences.values():
        tokens = each.tokens
        assert each.n_cached <= max(0, len(tokens) - N_COMPUTED_ANEW)
        assert all(tokens[n] == next_token(tokens[:n]) for n in range(each.n_prompt, len(tokens)))


def act(world: World, key: str, verb: str, details: list[Any]) -> None:
    """Do one thing; `key` names whatever begins by it."""
    if verb in ("go on", "resume", "cancel", "pause", "fail"):
        if not world.sequences:
            return
        old = list(world.sequences.values())[details[0] % len(world.sequences)]
    match verb:
        case "ask":
            world.ask(key, [*chain(*details[0])], max_tokens=4)
        case "go on":
            world.ask(key, [*old.tokens, *chain(*details[1])], max_tokens=40)
        case "resume":
            n_told = old.n_generated // 2
            prompt, told = old.tokens[: old.n_prompt], old.tokens[old.n_prompt :][:n_told]
            world.ask(key, prompt, resumed=told, max_tokens=n_told + 5)
        case "step":
            world.step(details[0])
        case "cancel":
            world.scheduler.cancel(old.key, now=2.0)
        case "pause":
            world.scheduler.set_paused(old.key, not old.paused)
        case "fail":
            if old in world.scheduler.all_sequences():
                world.scheduler.fail([old], BackendError("made to fail"))
        case "refuse states":
            world.backend.takes_no_state = details[0]
        case "disk":
            world.disk.is_full, world.disk.is_broken = details
            world.take_from_disk()
        case "expire":
            world.now += details[0]
            world.slots.expire(world.now)
