"""One of our commands, with a real engine whose step loop fails once a file is there.

Run as `python -m tests.faulty_loop FLAGS`: the package is in FAULTY_COMMAND, the file in FAULT_FILE.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from llm_engine.loop import Loop

PROGRAM = "tests.faulty_loop"


def environment(package: str, fault: Path) -> dict[str, str]:
    """What the program is told by."""
    return {"FAULTY_COMMAND": package, "FAULT_FILE": str(fault)}


def main() -> int:
    """Return the exit status."""
    fault = Path(os.environ["FAULT_FILE"])
    step = Loop.step

    def fail_in_time(loop: Loop) -> bool:
        if fault.exists():
            raise RuntimeError("made to fail")
        return step(loop)

    with patch.object(Loop, "step", fail_in_time):
        return int(import_module(f"{os.environ['FAULTY_COMMAND']}.cli").main())


if __name__ == "__main__":
    sys.exit(main())
