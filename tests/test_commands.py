"""The commands as they are installed: which version they are, and what the base install lacks."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

COMMANDS = {
    "llm-engine": "llm_engine",
    "llm-ingress": "llm_ingress",
    "llm-worker": "llm_worker",
    "llm-serve": "llm_serve",
}


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_each_tells_its_version(command: str) -> None:
    done = run("-m", COMMANDS[command], "--version")
    assert (done.returncode, done.stdout) == (0, f"{command} {version('llm-ring')}\n")


@pytest.mark.parametrize(
    ("command", "extra"), [("llm-engine", "worker"), ("llm-worker", "worker"), ("llm-serve", "serve")]
)
def test_the_base_install_names_the_extra_that_a_command_needs(command: str, extra: str) -> None:
    hidden = "import sys; sys.modules['huggingface_hub'] = None"
    done = run("-c", f"{hidden}; from {COMMANDS[command]}.__main__ import main; sys.exit(main())", "--help")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{command}: ")
    assert done.stderr.endswith(f"install llm-ring with its extra, llm-ring[{extra}]\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["llm-engine", "llm-worker", "llm-serve"])
@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "Shared library with base name 'llama' not found"),
        (b"no library", "Failed to load shared library"),
    ],
)
def test_a_folder_without_a_sound_library_is_one_line_that_names_it(
    command: str, library: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library is not None:
        (tmp_path / "libllama.so").write_bytes(library)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    done = run("-m", COMMANDS[command], "--help")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{command}: llama.cpp does not load from {tmp_path}: {reason}")
    assert done.stderr.count("\n") == 1
