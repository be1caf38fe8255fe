"""What the command lines do with signals."""

import asyncio
import os
import signal
from pathlib import Path

from llm_ingress.cli import reload_on_hangup
from llm_ingress.tls import LiveContext, control_context, worker_context
from tests.certificates import TODAY, issue


async def test_a_hangup_loads_every_certificate_again_and_survives_one_that_is_gone(tmp_path: Path) -> None:
    ring = issue(tmp_path)
    lives = [
        LiveContext(control_context, ring.ingress, TODAY),
        LiveContext(worker_context, ring.worker, TODAY),
    ]
    before = [live.current for live in lives]
    ring.ingress.key.unlink()
    reload_on_hangup(lives)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(5):
            while lives[1].current is before[1]:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0)
        assert lives[0].current is before[0]
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
