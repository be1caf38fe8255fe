"""Commands told to take more memory than there is: one line and exit status 1, and nothing is killed.

Or to hold it faster than the system allows: one line, and they go on.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest

from tests.certificates import issue

pytestmark = pytest.mark.model

COMMANDS = Path(sys.executable).parent
PATIENCE_S = 120
ENDLESS_CONTEXT = 1 << 24  # tokens; 4 TiB of KV in 256 slots of the tests' model

# The memory controller's root of either version, and the file that limits a group.
HIERARCHIES = [
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
]
GROUP_BYTES = 1 << 30
INTO_GROUP = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"')

MAY_LOCK_LITTLE = ("prlimit", "--memlock=65536:65536")
AS_ANY_USER = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")  # root may lock all there is


@pytest.fixture(scope="module")
def endless_model(sliding_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that claims a context which no machine holds."""
    path = Path(shutil.copy(sliding_model, tmp_path_factory.mktemp("endless") / "endless.gguf"))
    field = gguf.GGUFReader(path, "r+").fields["gemma3.context_length"]
    field.parts[field.data[0]][0] = ENDLESS_CONTEXT
    return path


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group whose processes may take `GROUP_BYTES`."""
    for root, limit in HIERARCHIES:
        folder = root / f"llm-ring-tests-{os.getpid()}"
        if not (root / "cgroup.procs").exists():
            continue
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(GROUP_BYTES))
            yield folder
            return
        except OSError:
            continue
        finally:
            folder.rmdir()
    pytest.skip("no control group with a limit of memory can be made here")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize("name", ["llm-engine", "llm-serve", "llm-worker"])
def test_what_no_machine_holds_is_refused_by_every_command(
    name: str, endless_model: Path, tmp_path: Path
) -> None:
    pki = issue(tmp_path).worker.cert.parent
    own: dict[str, tuple[str | Path, ...]] = {
        "llm-engine": ("--prompt", "Say hi."),
        "llm-serve": ("--port", "0"),
        "llm-worker": ("--ingress-url", "https://127.0.0.1:1", "--pki", pki),
    }
    size = ("--max-inflight", "256", "--ctx-size", str(ENDLESS_CONTEXT), "--max-kv-mib-per-session", "16384")
    done = run(COMMANDS / name, "--model", endless_model, *size, *own[name])
    assert done.returncode == 1
    assert re.fullmatch(
        rf"{name}: no memory for 256 slots x 16,777,216 tokens: KV cache 4,096\.0 GiB, .* are free;"
        r" lower --max-inflight or --ctx-size, .*\n",
        done.stderr,
    )


def test_a_control_group_counts_as_the_machine(group: Path, smollm2: Path) -> None:
    ask = (COMMANDS / "llm-engine", "--model", smollm2, "--prompt", "Say hi.", "--max-tokens", "4")
    refused = run(*INTO_GROUP, group, *ask, "--max-inflight", "16", "--ctx-size", "8192")
    assert refused.returncode == 1
    assert re.fullmatch(
        r"llm-engine: no memory for 16 slots x 8,192 tokens: KV cache 2\.8 GiB, .* and \d+ MiB are free;.*\n",
        refused.stderr,
    )
    fits = run(*INTO_GROUP, group, *ask, "--max-inflight", "4", "--ctx-size", "1024")
    assert fits.returncode == 0
    assert re.search(
        r"KV cache: 4 slots x 1,024 tokens, 90 MiB"
        r" \(weights 92 MiB, prefix cache up to \d{3} MiB, \d{3} MiB free\)",
        fits.stderr,
    )


@pytest.mark.parametrize("mode", [(), ("--mmap",)], ids=["copied", "mapped"])
def test_weights_that_cannot_be_locked_are_said(smollm2: Path, mode: tuple[str, ...]) -> None:
    limited = (*MAY_LOCK_LITTLE, *(AS_ANY_USER if os.geteuid() == 0 else ()))
    if not all(shutil.which(name) for name in ("prlimit", "setpriv")):
        pytest.skip("no prlimit and setpriv on this machine")
    ask = ("--model", smollm2, "--prompt", "Say hi.", "--max-tokens", "1", "--max-inflight", "1")
    done = run(*limited, COMMANDS / "llm-engine", *ask, "--mlock", *mode)
    assert done.returncode == 0, done.stderr
    assert "the weights may be swapped all the same: Cannot allocate memory (ulimit -l)" in done.stderr
