"""Things put by a thread, taken on an event loop."""

import asyncio
import gc
import os
import sys
import threading
from collections import deque

import pytest

from llm_engine.doorbell import Doorbell

N_RINGS = 300


async def test_what_threads_put_is_taken_on_the_loop_in_order() -> None:
    loop, taken, all_there = asyncio.get_running_loop(), [], asyncio.Event()

    def take(n: int) -> None:
        assert asyncio.get_running_loop() is loop
        taken.append(n)
        if len(taken) == 5000:
            all_there.set()

    bell = Doorbell(loop, take)
    thread = threading.Thread(target=lambda: deque(map(bell.put, range(5000))))
    thread.start()
    await asyncio.wait_for(all_there.wait(), 10)
    thread.join()
    assert taken == list(range(5000))


async def test_it_is_heard_again_after_it_was_answered() -> None:
    taken: asyncio.Queue[str] = asyncio.Queue()
    bell = Doorbell(asyncio.get_running_loop(), taken.put_nowait)
    for word in ("one", "two", "three"):
        bell.put(word)
        assert await asyncio.wait_for(taken.get(), 10) == word


def test_putting_does_not_let_the_loop_run_before_the_thread_gives_way() -> None:
    """Else the step thread would wait for the loop, between two steps."""
    loop = asyncio.new_event_loop()
    taken: list[int] = []
    came_early = 0
    bell = Doorbell(loop, taken.append)
    thread = threading.Thread(target=loop.run_forever)
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is made to give way
    try:
        thread.start()
        while not loop.is_running():
            threading.Event().wait(0.01)
        for n in range(N_RINGS):
            bell.put(n)
            sum(range(20_000))  # long enough for a woken loop to come
            came_early += len(taken) > n
            while len(taken) <= n:
                threading.Event().wait(0.001)
    finally:
        sys.setswitchinterval(switch_interval)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert came_early == 0


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_a_closed_loop_keeps_no_file_open() -> None:
    async def ring() -> None:
        Doorbell(asyncio.get_running_loop(), print)

    asyncio.run(ring())
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        asyncio.run(ring())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
