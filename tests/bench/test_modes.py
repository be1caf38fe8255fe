"""Every benchmark is told the same way where its figures go."""

import importlib

import pytest

from bench.__main__ import NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if name != "random-model"])
def test_every_mode_writes_its_figures_and_draws_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"bench.{name.replace('-', '_')}").main(["--help"])
    shown = capsys.readouterr().out
    assert "--json FILE" in shown
    assert "--png FILE" in shown
