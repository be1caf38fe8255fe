"""`llm-serve` from its first moment: Ctrl-C ends it without a word while its modules are loading.

Called by: the command, and `python -m llm_serve`.
"""

import signal
import sys


def main() -> int:
    """Return the exit status."""
    # Python's own handler would print a traceback out of the middle of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from llm_serve.cli import main as run

    return int(run())


if __name__ == "__main__":
    sys.exit(main())
