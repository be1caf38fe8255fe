"""A model in several files: it is the model that it is in one, and every file of it counts."""

from pathlib import Path

import pytest

from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.errors import ModelError
from llm_engine.generation import Delta, GenerateRequest
from llm_engine.gguf import resolve
from llm_engine.layout import measure
from llm_engine.model import fingerprint
from llm_engine.sampling import SamplingParams
from tests.models import write_sliding_window

pytestmark = pytest.mark.model

TENSORS_PER_FILE = 20


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The files of `sliding_model`, split."""
    write_sliding_window(tmp_path / "split.gguf", tensors_per_file=TENSORS_PER_FILE)
    files = sorted(tmp_path.glob("split-*.gguf"))
    assert len(files) > 2
    return files


def answer(path: Path, *, mmap: bool = False) -> str:
    config = EngineConfig(model=str(path), mmap=mmap, max_inflight=1, ctx_size=256)
    request = GenerateRequest.user("Hi", max_tokens=8, sampling=SamplingParams(temperature=0))
    with Engine.spawn(config) as engine:
        return "".join(event.text for event in engine.submit(request) if isinstance(event, Delta))


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("mmap", [False, True])
def test_it_answers_as_in_one_file(parts: list[Path], sliding_model: Path, mmap: bool) -> None:
    assert answer(parts[1], mmap=mmap) == answer(sliding_model)


def test_its_weights_count_whole(parts: list[Path], sliding_model: Path) -> None:
    config = EngineConfig(max_inflight=1, ctx_size=256)
    assert measure(parts[0], config) == measure(sliding_model, config)


def test_a_part_that_is_cut_is_refused_with_llama_cpps_reason(parts: list[Path]) -> None:
    cut(parts[-1])
    with pytest.raises(ModelError, match=r"split-00001-of-.*: .*'blk\.3\..*' data is not within the file"):
        answer(parts[0])


def test_another_build_of_the_library_makes_it_another_model(
    parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_it_is = fingerprint(parts)
    monkeypatch.setattr("llm_engine.llama.build", lambda: "0123abc")
    assert fingerprint(parts) != as_it_is


def test_weights_of_any_part_make_it_another_model(parts: list[Path]) -> None:
    seen = set()
    for part in parts:
        seen.add(fingerprint(resolve(str(parts[0])).parts))
        flip_last_byte(part)
    assert len(seen) == len(parts)
