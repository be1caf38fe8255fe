"""A line to a network of its own, which can be cut and healed without either end being told.

    line = Line.lay()                 # raises LineUnavailable where this machine does not allow it
    line.command([...])               # the same command, to be run at the far end
    line.cut(); line.cut_outward(); line.heal(); line.remove()
    line.slow_inward(kbit_per_s=16_000)

A network namespace at the end of a virtual cable. Cut, its ends drop every packet they are given, as a pulled
plug somewhere between would: connections stay open, and nothing is refused.
Called by: conftest.py, which lays one for a test; fleet.py, which runs workers at its end.
"""

import os
import random
import subprocess
from collections.abc import Sequence

# For private use, and rarely used: the /30s of 10.213.0.0/16.
SUBNETS = range(2**14)
DROPS_EVERYTHING = ("pfifo", "limit", "0")
COMMAND_S = 10.0


class LineUnavailable(Exception):
    """Network namespaces, or cables to them, cannot be had here."""


class Line:
    """One line: `near` is the address of this end, `far` that of the other."""

    def __init__(self, subnet: int) -> None:
        third, fourth = divmod(subnet * 4, 256)
        self.near, self.far = (f"10.213.{third}.{fourth + host}" for host in (1, 2))
        self._namespace = f"llm-{os.getpid()}-{subnet}"
        self._near_end, self._far_end = f"llmn{subnet}", f"llmf{subnet}"
        self._is_cut_inward = False

    @classmethod
    def lay(cls) -> "Line":
        """Raises: LineUnavailable."""
        line = cls(random.choice(SUBNETS))
        try:
            line._lay()
        except LineUnavailable:
            line.remove()
            raise
        return line

    def _lay(self) -> None:
        _run("ip", "netns", "add", self._namespace)
        far_end = ("peer", "name", self._far_end, "netns", self._namespace)
        _run("ip", "link", "add", self._near_end, "type", "veth", *far_end)
        _run("ip", "address", "add", f"{self.near}/30", "dev", self._near_end)
        _run("ip", "link", "set", self._near_end, "up")
        _run(*self.command(["ip", "address", "add", f"{self.far}/30", "dev", self._far_end]))
        _run(*self.command(["ip", "link", "set", self._far_end, "up"]))
        # That it can be cut is known before anything depends on it.
        self.cut()
        self.heal()

    def command(self, arguments: Sequence[str]) -> list[str]:
        """A command line, run at the far end."""
        return ["ip", "netns", "exec", self._namespace, *arguments]

    def cut(self) -> None:
        """Let nothing through."""
        self.cut_outward()
        _run("tc", "qdisc", "add", "dev", self._near_end, "root", *DROPS_EVERYTHING)
        self._is_cut_inward = True

    def cut_outward(self) -> None:
        """Let nothing through that the far end sends; what is sent to it arrives."""
        _run(*self.command(["tc", "qdisc", "add", "dev", self._far_end, "root", *DROPS_EVERYTHING]))

    def slow_inward(self, kbit_per_s: int) -> None:
        """Let no more than that through to the far end, from now on; little is queued on the way."""
        rate = ("rate", f"{kbit_per_s}kbit", "burst", "32kb", "latency", "50ms")
        _run("tc", "qdisc", "add", "dev", self._near_end, "root", "tbf", *rate)

    def heal(self) -> None:
        """Let everything through again."""
        _run(*self.command(["tc", "qdisc", "del", "dev", self._far_end, "root"]))
        if self._is_cut_inward:
            _run("tc", "qdisc", "del", "dev", self._near_end, "root")
            self._is_cut_inward = False

    def remove(self) -> None:
        """Take it away; its processes must have ended."""
        subprocess.run(["ip", "netns", "del", self._namespace], capture_output=True, check=False)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_S)
    except FileNotFoundError as error:
        raise LineUnavailable(f"there is no `{command[0]}` command") from error
    except subprocess.CalledProcessError as error:
        raise LineUnavailable(f"`{' '.join(command)}`: {error.stderr.strip()}") from error
