"""What is due is called once, in the next turn of the loop."""

import asyncio
import logging

import pytest

from llm_ingress.relays import Relays


class Noted:
    """A relay that notes when it is called."""

    def __init__(self, calls: list["Noted"], fault: Exception | None = None) -> None:
        self._calls = calls
        self._fault = fault

    def pass_on(self) -> None:
        self._calls.append(self)
        if self._fault is not None:
            raise self._fault


async def test_each_is_called_once_and_in_the_order_of_coming() -> None:
    calls: list[Noted] = []
    first, second = Noted(calls), Noted(calls)
    relays = Relays()
    for relay in (first, second, first, second, first):
        relays.add(relay)
    assert calls == []
    await asyncio.sleep(0)
    assert calls == [first, second]


async def test_what_comes_later_has_a_turn_of_its_own() -> None:
    calls: list[Noted] = []
    relay = Noted(calls)
    relays = Relays()
    relays.add(relay)
    await asyncio.sleep(0)
    relays.add(relay)
    await asyncio.sleep(0)
    assert calls == [relay, relay]


async def test_one_that_fails_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Noted] = []
    faulty, other = Noted(calls, ValueError("x")), Noted(calls)
    relays = Relays()
    relays.add(faulty)
    relays.add(other)
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(0)
    assert calls == [faulty, other]
    assert "passing on a stream failed" in caplog.text
