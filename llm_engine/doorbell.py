"""Handing things to an event loop from the step thread, without giving up the GIL.

`call_soon_threadsafe` wakes the loop through a socket, and Python gives up the GIL around that: the woken
loop takes it, and the step thread waits until the loop has nothing left to do, while no core computes. The
byte that wakes a loop here is written with the GIL held, so that the loop has its turn when the next
`llama_decode` gives it up.

Owns: what is on its way to one event loop. Called by: `engine.py`.
"""

import asyncio
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_write = ctypes.PyDLL(None).write  # keeps the GIL, where `os.write` does not
_write.argtypes, _write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t


class Doorbell(Generic[T]):
    """One event loop's. Made on it; `take` hears there, one by one, what any thread has put."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        self._loop = weakref.ref(loop)  # which holds this
        self._take = take
        self._parcels: deque[T] = deque()
        self._is_rung = False
        self._ear, self._button = os.pipe()
        loop.add_reader(self._ear, self._answer)

    def put(self, parcel: T) -> None:
        """Hand something over; to a loop that is closed, nothing. Thread: any, one at a time."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            return
        self._parcels.append(parcel)
        if not self._is_rung:
            self._is_rung = True
            _write(self._button, b"!", 1)

    def _answer(self) -> None:
        os.read(self._ear, 1)
        self._is_rung = False  # before looking: who puts something from now on rings again
        while self._parcels:
            self._take(self._parcels.popleft())

    def __del__(self) -> None:
        os.close(self._ear)
        os.close(self._button)
