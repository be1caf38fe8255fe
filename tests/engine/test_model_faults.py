"""Damaged model files, each given to the real command: it serves, or exits 1 with one line; no signal."""

import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest

from llm_engine.errors import ModelError
from llm_engine.trial import try_load

pytestmark = pytest.mark.model

N_FLIPS = 200
N_FLIPS_QUICK = 8
COMMAND = (
    *(sys.executable, "-m", "llm_engine.cli", "--prompt", "Hi", "--max-tokens", "2"),
    *("--ctx-size", "256", "--max-inflight", "1", "--threads", "1", "--model"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A copy of a model to damage, and where the parts of its header are."""

    path: Path
    values: dict[str, int]  # offset of each key's value
    infos: range  # the tensor infos, the header's last part

    @contextmanager
    def changed(self, offset: int, data: bytes) -> Iterator[None]:
        """Hold other bytes there for a while."""
        with self.path.open("r+b", buffering=0) as file:
            file.seek(offset)
            sound = file.read(len(data))
            file.seek(offset)
            file.write(data)
            try:
                yield
            finally:
                file.seek(offset)
                file.write(sound)


@pytest.fixture(scope="module")
def victim(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    path = tmp_path_factory.mktemp("faults") / "victim.gguf"
    shutil.copyfile(smollm2, path)
    reader = gguf.GGUFReader(path)
    values = {key: field.offset + 8 + len(key) + 4 for key, field in reader.fields.items()}
    yield Victim(path=path, values=values, infos=range(reader.tensors[0].field.offset, reader.data_offset))
    path.unlink()


def serves_or_says_why(path: Path) -> str | None:
    """Start the command anew: None if it serves, else its one line."""
    done = subprocess.run((*COMMAND, path), capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return None
    assert done.returncode == 1, f"ended with {done.returncode}: {done.stderr}"
    assert done.stdout == ""
    line, *more = done.stderr.splitlines()
    assert not more, done.stderr
    assert str(path) in line
    return line


def flip(victim: Victim, seed: int) -> tuple[int, bytes]:
    """A changed bit or byte of the header: half of them where the numbers are, not the vocabulary."""
    rng = random.Random(seed)
    numbers = rng.choice((range(4096), victim.infos))
    offset = rng.choice(rng.choice((numbers, range(victim.infos.stop))))
    with victim.path.open("rb") as file:
        file.seek(offset)
        sound = file.read(1)[0]
    return offset, bytes([rng.choice((sound ^ 1 << rng.randrange(8), rng.randrange(256)))])


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=() if n < N_FLIPS_QUICK else pytest.mark.slow) for n in range(N_FLIPS)],
)
def test_flipped_header_serves_or_says_why(victim: Victim, seed: int) -> None:
    with victim.changed(*flip(victim, seed)):
        serves_or_says_why(victim.path)


@pytest.mark.parametrize("size", [0, 3, 20, 3000, 1_000_000, 50_000_000, -100])
def test_cut_file_says_why(victim: Victim, size: int, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with victim.path.open("rb") as file:
        cut.write_bytes(file.read(size if size >= 0 else victim.path.stat().st_size + size))
    assert serves_or_says_why(cut) is not None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", struct.pack("<I", 1 << 20)),  # aborts while loading
        ("llama.attention.head_count_kv", struct.pack("<I", 3 + (4 << 24))),  # ... as the context is created
        ("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", -1e-5)),  # ... in the first decode
    ],
)
def test_number_that_aborts_llama_cpp_says_why(victim: Victim, key: str, value: bytes) -> None:
    with victim.changed(victim.values[key], value):
        line = serves_or_says_why(victim.path)
    assert line is not None
    assert "llama.cpp aborted: GGML_ASSERT(" in line


def test_sound_file_serves(victim: Victim) -> None:
    assert serves_or_says_why(victim.path) is None


def test_foreign_file_says_why(tmp_path: Path) -> None:
    foreign = tmp_path / "model.safetensors"
    foreign.write_bytes(struct.pack("<Q", 2) + b"{}" + bytes(1000))
    assert "not a GGUF file" in (serves_or_says_why(foreign) or "served")


def test_missing_file_says_why(tmp_path: Path) -> None:
    assert "no such file" in (serves_or_says_why(tmp_path / "none.gguf") or "served")


def test_llama_cpps_own_reason_is_told(victim: Victim) -> None:
    with (
        victim.changed(victim.values["general.architecture"] + 8, b"lIama"),
        pytest.raises(ModelError, match="unknown model architecture: 'lIama'"),
    ):
        try_load(victim.path)


def test_trial_that_takes_too_long_is_ended(victim: Victim) -> None:
    with pytest.raises(ModelError, match="did not load it within 0 s"):
        try_load(victim.path, timeout_s=0.001)
