"""`llm-worker`, except that its engine does not survive one request: it ends as an abort in llama.cpp would.

Run by: test_attempts.py, as `python -m tests.network.mortal_worker`.
"""

import os
import sys
from unittest.mock import patch

from llm_engine.engine import Engine
from llm_engine.generation import GenerateRequest, Prepared
from llm_worker import cli

DEADLY = "the question that no engine survives"


class MortalEngine(Engine):
    """An engine that a prompt can kill, and its process with it."""

    def prepare(self, request: GenerateRequest) -> Prepared:
        if any(DEADLY in message["content"] for message in request.messages):
            os.abort()
        return super().prepare(request)


def main() -> int:
    """Return the exit status, if it lives so long."""
    with patch("llm_worker.cli.Engine", MortalEngine):
        return cli.main()


if __name__ == "__main__":
    sys.exit(main())
