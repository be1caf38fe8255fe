"""Every benchmark is told the same way where its figures go, and says in one line what it met."""

import importlib
import subprocess
import sys

import pytest

from bench.__main__ import NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if name != "random-model"])
def test_every_mode_writes_its_figures_and_draws_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"bench.{name.replace('-', '_')}").main(["--help"])
    shown = capsys.readouterr().out
    assert "--json FILE" in shown
    assert "--png FILE" in shown


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (
            "serve --url ours=http://127.0.0.1:1",
            "http://127.0.0.1:1 does not list its models: <urlopen error [Errno 111] Connection refused>",
        ),
        ("engine --model no/such.gguf", "no/such.gguf: no such file or directory"),
        ("sampling --model no/such.gguf", "no/such.gguf: no such file or directory"),
    ],
)
def test_what_cannot_be_measured_is_one_line(command: str, complaint: str) -> None:
    name, *_ = command.split()
    done = subprocess.run(
        [sys.executable, "-m", "bench", *command.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"bench {name}: {complaint}\n"
