"""Model files from the Hugging Face hub or a plain URL, kept in the Hugging Face cache.

A file gets its final name only when its size (and, from the hub, its sha256) is right. What arrived before an
interruption stays beside it as `NAME.TAG.incomplete`, and the next attempt, in this process or a later one,
asks only for the rest: `hf_hub_download` alone would start over in a new process.
HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE mean what they mean to huggingface_hub.

Owns: the partial files. Called by: `gguf.py`.
"""

import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import urlsplit

from huggingface_hub import (
    HfApi,
    constants,
    errors,
    get_hf_file_metadata,
    get_session,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.file_download import http_get, repo_folder_name

# Documented names, though the package's annotations do not mark them as exported.
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    WeakFileLock,
    build_hf_headers,
    hf_raise_for_status,
)

from llm_engine.errors import ModelError

logger = logging.getLogger(__name__)

# The root of what the HTTP library raises: httpx or httpx2, as huggingface_hub was built on.
_HTTPError = errors.HTTPError  # type: ignore[attr-defined]
_TIMEOUT_S = 10.0  # for a server's first word
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remote:
    """One version of one remote file. `tag` tells versions apart; None if the server does not say."""

    url: str
    size: int | None
    tag: str | None
    headers: Mapping[str, str] = field(default_factory=dict)
    sha256: str | None = None


# --- the hub ---------------------------------------------------------------------------------------------


def cached_file(repo: str, filename: str) -> Path | None:
    """Where the cache has this file of the repository's main branch, if it does."""
    found = try_to_load_from_cache(repo, filename)
    return Path(found) if isinstance(found, str) else None


def cached_files(repo: str) -> list[str]:
    """The names of all files the cache has of the repository's main branch."""
    folder = _repo_folder(repo)
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / constants.DEFAULT_REVISION).read_text()
    except FileNotFoundError:
        return []
    return sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())


def list_files(repo: str) -> list[str]:
    """The names of all files the hub has of the repository's main branch.

    Raises: ModelError if the hub cannot be asked or does not show this repository.
    """
    with _in_plain_words(repo, constants.ENDPOINT):
        # Not list_repo_files: that one asks again and again for half a minute before it gives up.
        siblings = HfApi().model_info(repo, timeout=_TIMEOUT_S).siblings
        return sorted(sibling.rfilename for sibling in siblings or ())


def fetch_from_hub(repo: str, filename: str) -> Path:
    """Bring a file of the repository's main branch into the cache.

    The blob is brought here, under the name and the lock that the cache's documented layout gives it;
    `hf_hub_download` then finds it and makes the snapshot's link.
    Raises: ModelError.
    """
    name = f"{repo}:{filename}"
    with _in_plain_words(name, constants.ENDPOINT):
        try:
            found = get_hf_file_metadata(hf_hub_url(repo, filename))
        except errors.EntryNotFoundError as error:
            there = [other for other in list_files(repo) if other.endswith(".gguf")]
            reason = f"no such file; the repository has {', '.join(there) or 'no GGUF file'}"
            raise ModelError(name, reason) from error
        if found.etag is None or found.commit_hash is None:
            raise ModelError(name, f"{constants.ENDPOINT} does not answer like a Hugging Face hub")
        remote = _Remote(
            url=hf_hub_url(repo, filename, revision=found.commit_hash),
            size=found.size,
            tag=found.etag,
            headers=build_hf_headers(),
            sha256=found.etag if _SHA256.fullmatch(found.etag) else None,
        )
        # Beyond this size the hub serves no plain HTTP, and hf_hub_download does it all in its own way.
        if found.size is None or found.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            blob = _repo_folder(repo) / "blobs" / found.etag
            lock = Path(constants.HF_HUB_CACHE, ".locks", _repo_folder(repo).name, f"{found.etag}.lock")
            _bring(remote, blob, lock, shown=name)
        return Path(hf_hub_download(repo, filename))


def _repo_folder(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type="model"))


# --- plain URLs ------------------------------------------------------------------------------------------


def url_folder(url: str) -> Path:
    """The cache's own folder for what comes from this URL."""
    return Path(constants.HF_HOME, "llm-ring", hashlib.sha256(url.encode()).hexdigest()[:16])


def fetch_url(url: str, target: Path) -> None:
    """Bring what a plain URL gives to `target`. Raises: ModelError."""
    shown = _without_secrets(url)
    with _in_plain_words(shown, shown):
        _bring(_probe(url), target, target.with_name(f".{target.name}.lock"), shown=shown)


def _without_secrets(url: str) -> str:
    """The URL for people to read: signatures in its query and passwords before its host stay out of logs."""
    parsed = urlsplit(url)
    return parsed._replace(netloc=parsed.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _probe(url: str) -> _Remote:
    """Ask for the first byte: the answer says size and version, also where signed URLs forbid HEAD."""
    headers = {"Accept-Encoding": "identity"}
    if url.startswith(f"{constants.ENDPOINT}/"):  # the token is for the hub alone
        headers |= build_hf_headers()
    first_byte = headers | {"Range": "bytes=0-0"}
    with get_session().stream("GET", url, headers=first_byte, timeout=_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        whole = response.headers.get("Content-Range", "").rpartition("/")[2]
        size = whole or response.headers.get("Content-Length", "")
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
    if tag is None or tag.startswith("W/"):  # a weak tag does not promise equal bytes
        return _Remote(url=url, size=int(size) if size.isdecimal() else None, tag=None, headers=headers)
    headers["If-Range"] = tag  # should the file change in between, the whole new one comes
    return _Remote(url=url, size=int(size) if size.isdecimal() else None, tag=tag, headers=headers)


# --- bringing --------------------------------------------------------------------------------------------


def _bring(remote: _Remote, target: Path, lock: Path, *, shown: str) -> None:
    """Fetch what is missing of `target` and give it its name once it is whole and right."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if target.exists():
            return
        part = _partial(remote, target)
        _fetch_rest(remote, part, shown=shown)
        _check_digest(remote, part, shown=shown)
        os.replace(part, target)


def _partial(remote: _Remote, target: Path) -> Path:
    """The partial file of this version. Those of other versions are of no more use and deleted."""
    tag = hashlib.sha256(remote.tag.encode()).hexdigest()[:8] if remote.tag else "untagged"
    part = target.with_name(f"{target.name}.{tag}.incomplete")
    for other in target.parent.glob(f"{target.name}.*.incomplete"):
        usable = remote.tag and (remote.size is None or other.stat().st_size <= remote.size)
        if other != part or not usable:
            other.unlink()
    return part


def _fetch_rest(remote: _Remote, part: Path, *, shown: str) -> None:
    """Append what the partial file lacks, as long as every attempt brings something."""
    with part.open("ab") as file:
        _check_room(remote, part.parent, file.tell(), shown=shown)
        while True:
            n_here = file.tell()
            logger.info("downloading %s, from byte %d of %s", shown, n_here, remote.size or "?")
            try:
                _append(remote, file, n_here, shown=shown)
                return
            except _HTTPError:  # http_get continues by itself after some of these, not after a reset
                if file.tell() <= n_here:
                    raise


def _append(remote: _Remote, file: BinaryIO, n_here: int, *, shown: str) -> None:
    http_get(
        remote.url,
        file,
        resume_size=n_here,
        headers=dict(remote.headers),
        expected_size=remote.size,
        displayed_filename=PurePosixPath(shown.rpartition(":")[2]).name,
    )


def _check_room(remote: _Remote, folder: Path, n_here: int, *, shown: str) -> None:
    n_free = shutil.disk_usage(folder).free
    n_missing = (remote.size or 0) - n_here
    if n_missing > n_free:
        reason = f"{folder} has {n_free / 1e6:.1f} MB free, the download needs {n_missing / 1e6:.1f} MB"
        raise ModelError(shown, reason)


def _check_digest(remote: _Remote, part: Path, *, shown: str) -> None:
    if remote.sha256 is None:
        return
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != remote.sha256:
        part.unlink()
        raise ModelError(
            shown, f"the download arrived damaged (sha256 {digest[:12]}…, not {remote.sha256[:12]}…)"
        )


# --- errors ----------------------------------------------------------------------------------------------


@contextmanager
def _in_plain_words(name: str, server: str) -> Iterator[None]:
    """Turn what huggingface_hub, the HTTP library and the file system raise into one line about `name`."""
    try:
        yield
    except (_HTTPError, OSError, ValueError) as error:
        host = urlsplit(server).netloc
        raise ModelError(name, _reason(error, host)) from error


def _reason(error: Exception, host: str) -> str:
    match error:
        case errors.GatedRepoError():
            return f"gated: accept its terms on {host}, then set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return f"{host} shows no such repository; if it is private, set HF_TOKEN"
        case errors.OfflineModeIsEnabled():
            return "not in the cache, and HF_HUB_OFFLINE forbids the network"
        case errors.HfHubHTTPError(response=response):
            return f"{host} answered {response.status_code} {response.reason_phrase}"
        case OSError(errno=errno.ENOSPC):
            return "the disk is full"
        case _HTTPError():
            return f"cannot reach {host}: {_first_line(error)}"
        case _:
            return _first_line(error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
