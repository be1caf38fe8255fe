"""`llm-ingress` from its first moment: Ctrl-C ends it without a word while its modules are loading.

Called by: the command, and `python -m llm_ingress`.
"""

import signal
import sys


def main() -> int:
    """Return the exit status."""
    # Python's own handler would print a traceback out of the middle of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from llm_ingress.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
