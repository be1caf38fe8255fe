"""`llm-worker`, except that the name server it asks is that of a test.

Run by: test_discovery.py, as `python -m tests.network.resolving_worker`; the port is in the environment.
"""

import os
import sys
from unittest.mock import patch

import dns.asyncresolver

from llm_worker import cli
from tests.name_server import resolver_at

PORT_VARIABLE = "TEST_NAME_SERVER_PORT"


def resolver() -> dns.asyncresolver.Resolver:
    return resolver_at(int(os.environ[PORT_VARIABLE]))


if __name__ == "__main__":
    with patch("llm_worker.cli.system_resolver", resolver):
        sys.exit(cli.main())
