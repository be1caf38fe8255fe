"""`python -m bench NAME ...`: the benchmarks by name, each a module with a `main`."""

import importlib
import sys

from llm_engine.errors import EngineError

SERVERS = ("serve", "open-loop", "prefill-stall", "shared-prefix", "conversation")
ENGINE = ("engine", "mixed", "sampling", "step-target", "remote", "threads", "prefix")
RING = ("relay", "ring", "claims", "fairness", "parked", "balance", "affinity", "admission")
NAMES = (*SERVERS, *ENGINE, *RING, "random-model")


def main() -> int:
    """Hand over to the benchmark named first."""
    name, *argv = sys.argv[1:] or [""]
    if name not in NAMES:
        print(f"usage: python -m bench {{{','.join(NAMES)}}} ...", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(f"bench.{name.replace('-', '_')}").main(argv))
    except (EngineError, RuntimeError) as error:  # what a measurement can meet: the text says it all
        print(f"bench {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
