"""`llm-serve` from its first moment: Ctrl-C ends it without a word while its modules are loading.

Called by: the command, and `python -m llm_serve`.
"""

import signal
import sys


def main() -> int:
    """Return the exit status."""
    # Python's own handler would print a traceback out of the middle of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from llm_serve.cli import main as run
    except ModuleNotFoundError as error:  # of the base install, which is the ingress's
        print(f"llm-serve: {error}: install llm-ring with its extra, llm-ring[serve]", file=sys.stderr)
        return 1
    except ImportError as error:  # llama.cpp's library
        print(f"llm-serve: {error}", file=sys.stderr)
        return 1

    return int(run())


if __name__ == "__main__":
    sys.exit(main())
