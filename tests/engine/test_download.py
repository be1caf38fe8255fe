"""Downloads against a hub on loopback: what is fetched, continued, refused, and never opened half-written."""

import hashlib
import os
import pty
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

from llm_engine.errors import ModelError
from llm_engine.gguf import ModelFile, resolve

REPO = "someone/Tiny-GGUF"
COMMIT = "c0ffee" + 34 * "0"
CONTENT = os.urandom(300_000)
CHUNK = 65_536  # huggingface_hub writes in steps of this size (10 MiB unless patched)

RESOLVE = """
import sys
from llm_engine.errors import ModelError
from llm_engine.gguf import resolve
try:
    print(resolve(sys.argv[1]).path)
except ModelError as error:
    sys.exit(str(error))
"""


@dataclass
class FakeHub:
    """The few endpoints of a hub that a download asks, plain files below /files/, and what can go wrong."""

    files: dict[str, bytes] = field(default_factory=dict)
    gets: list[dict[str, str]] = field(default_factory=list)  # headers of every GET of a file
    n_requests: int = 0
    error: tuple[int, str] | None = None  # status and X-Error-Code of every answer
    cut_after: int | None = None  # the next body ends after so many bytes
    hold: threading.Event | None = None  # ... and its connection stays open until this is set
    resets: bool = False  # ... and its connection is reset rather than closed
    ignores_ranges: bool = False
    swap: dict[str, bytes] = field(default_factory=dict)  # the files after the next answer of one
    etags: dict[str, str] = field(default_factory=dict)  # instead of the sha256
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def etag(self, name: str) -> str:
        return self.etags.get(name) or hashlib.sha256(self.files[name]).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.n_requests += 1
        if hub.error is not None:
            self._head(hub.error[0], {"X-Error-Code": hub.error[1], "Content-Length": "0"})
        elif path == f"/api/models/{REPO}":
            self._listing()
        else:
            self._file(path.rpartition("/files/")[2].rpartition("/resolve/")[2].partition("/")[2] or path[7:])

    def _listing(self) -> None:
        siblings = [{"rfilename": name} for name in self.hub.files]
        body = dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _file(self, name: str) -> None:
        hub = self.hub
        if name not in hub.files:
            self._head(404, {"X-Error-Code": "EntryNotFound", "Content-Length": "0"})
            return
        content, wanted, status = hub.files[name], self.headers.get("Range"), 200
        tag = f'"{hub.etag(name)}"'
        headers = {"ETag": tag, "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(content))}
        if self.command == "GET":
            hub.gets.append(dict(self.headers))
        if wanted and not hub.ignores_ranges and self.headers.get("If-Range", tag) == tag:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = int(last) + 1 if last else len(content)
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
            content, status = content[int(first) : end], 206
        hub.files |= hub.swap
        self._head(status, headers | {"Content-Length": str(len(content))})
        if self.command == "GET":
            self._body(content)

    def _body(self, content: bytes) -> None:
        hub = self.hub
        if hub.cut_after is None or len(content) < hub.cut_after:
            self.wfile.write(content)
            return
        self.wfile.write(content[: hub.cut_after])
        hub.cut_after = None
        if hub.hold is not None:
            hub.hold.wait(timeout=60)
        if hub.resets:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.wfile.flush()
            self.connection.close()
        self.close_connection = True

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with an empty cache before it; huggingface_hub in this process is pointed at both."""
    fake = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": fake}))
    fake.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", fake.endpoint)
    template = fake.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield fake
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def whole_files(folder: Path) -> list[Path]:
    """What a later start would take for a model."""
    return [p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".incomplete", ".lock", ".TAG")]


def refusal(model: str | None = None, **options: str | bool | None) -> str:
    with pytest.raises(ModelError) as refused:
        resolve(model, **options)  # type: ignore[arg-type]
    text = str(refused.value)
    assert "\n" not in text
    return text


def break_off(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
    """Start a download that the user interrupts after 200 kB."""

    def interrupt(_seconds: float) -> None:  # huggingface_hub waits a second, then asks for the rest
        raise KeyboardInterrupt

    hub.cut_after = 200_000
    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve(**options)  # type: ignore[arg-type]


def child_environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    return os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "child")}


# --- what is fetched -------------------------------------------------------------------------------------


def test_file_of_a_repository_is_fetched_once_and_then_needs_no_network(hub: FakeHub) -> None:
    hub.files["tiny.gguf"] = CONTENT
    first = resolve(f"{REPO}:tiny.gguf")
    assert first.path.read_bytes() == CONTENT
    n_requests = hub.n_requests
    assert resolve(f"{REPO}:tiny.gguf") == first
    assert resolve(f"{REPO}:tiny.gguf", download=False) == first
    assert hub.n_requests == n_requests


def test_huggingface_hub_finds_in_its_own_cache_what_was_fetched(hub: FakeHub) -> None:
    hub.files["tiny.gguf"] = CONTENT
    path = resolve(f"{REPO}:tiny.gguf").path
    assert huggingface_hub.try_to_load_from_cache(REPO, "tiny.gguf") == str(path)
    assert huggingface_hub.hf_hub_download(REPO, "tiny.gguf", local_files_only=True) == str(path)


def test_repository_stands_for_its_q4_k_m(hub: FakeHub) -> None:
    hub.files = {
        "tiny-Q8_0.gguf": b"8",
        "tiny-Q4_K_M.gguf": CONTENT,
        "mmproj-Q4_K_M.gguf": b"p",
        "README.md": b"",
    }
    found = resolve(REPO)
    assert found.path.read_bytes() == CONTENT
    assert found.name == REPO
    assert found.aliases == (f"{REPO}:tiny-Q4_K_M.gguf", "tiny-Q4_K_M")
    n_requests = hub.n_requests
    assert resolve(REPO) == found
    assert hub.n_requests == n_requests


def test_repository_stands_for_its_only_gguf(hub: FakeHub) -> None:
    hub.files = {"tiny-Q8_0.gguf": CONTENT, "mmproj.gguf": b"p", "config.json": b"{}"}
    assert resolve(REPO).path.read_bytes() == CONTENT


def test_repository_of_several_lists_them(hub: FakeHub) -> None:
    hub.files = {"tiny-Q8_0.gguf": b"8", "tiny-Q6_K.gguf": b"6"}
    text = refusal(REPO)
    assert text == f"{REPO}: choose one as REPO:FILE; the repository has tiny-Q6_K.gguf, tiny-Q8_0.gguf"


def test_repository_without_network_stands_for_what_the_cache_has(hub: FakeHub) -> None:
    hub.files = {"tiny-Q8_0.gguf": CONTENT}
    found = resolve(REPO)
    hub.error = (503, "")
    assert resolve(REPO) == found
    assert resolve(REPO, download=False) == found


def test_every_part_of_a_split_model_is_fetched(hub: FakeHub) -> None:
    names = [f"Q4_K_M/tiny-Q4_K_M-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    hub.files = {name: name.encode() for name in names}
    found = resolve(REPO)
    assert [part.read_bytes() for part in found.parts] == [name.encode() for name in names]
    assert found.path == found.parts[0]
    assert resolve(f"{REPO}:{names[1]}").path == found.path


def test_plain_url_is_fetched_once(hub: FakeHub) -> None:
    hub.files["some file.gguf"] = CONTENT
    url = f"{hub.endpoint}/files/some%20file.gguf?signature=abc"
    found = resolve(url=url)
    assert (found.path.read_bytes(), found.name) == (CONTENT, "some file")
    n_requests = hub.n_requests
    assert resolve(url=url, download=False) == found
    assert hub.n_requests == n_requests


def test_plain_url_is_kept_at_the_model_path_if_one_is_given(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["x.gguf"] = CONTENT
    target = tmp_path / "models" / "mine.gguf"
    assert resolve(str(target), url=f"{hub.endpoint}/files/x.gguf") == ModelFile(path=target, name="mine")
    assert target.read_bytes() == CONTENT


def test_every_part_of_a_split_plain_url_is_fetched(hub: FakeHub) -> None:
    names = [f"tiny-{i:05}-of-00002.gguf" for i in (1, 2)]
    hub.files = {name: name.encode() for name in names}
    found = resolve(url=f"{hub.endpoint}/files/{names[0]}")
    assert [part.read_bytes() for part in found.parts] == [name.encode() for name in names]


def test_token_goes_to_the_hub_and_nowhere_else(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.files["tiny.gguf"] = CONTENT
    resolve(f"{REPO}:tiny.gguf")
    assert hub.gets.pop()["authorization"] == "Bearer hf_secret"
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    resolve(url=f"{hub.endpoint}/files/tiny.gguf")
    assert hub.gets
    assert not any("authorization" in headers for headers in hub.gets)


# --- interruption ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True], ids=["hub", "url"])
def test_cut_connection_is_continued_where_it_ended(hub: FakeHub, plain: bool) -> None:
    hub.files["tiny.gguf"] = CONTENT
    hub.cut_after = 200_000
    found = resolve(url=f"{hub.endpoint}/files/tiny.gguf") if plain else resolve(f"{REPO}:tiny.gguf")
    assert found.path.read_bytes() == CONTENT
    assert hub.gets[-1]["Range"] == f"bytes={200_000 // CHUNK * CHUNK}-"


@pytest.mark.parametrize("plain", [False, True], ids=["hub", "url"])
def test_broken_off_download_is_continued_by_the_next_start(
    hub: FakeHub, plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["tiny.gguf"] = CONTENT
    options: dict[str, str] = (
        {"url": f"{hub.endpoint}/files/tiny.gguf"} if plain else {"model": f"{REPO}:tiny.gguf"}
    )
    break_off(hub, monkeypatch, **options)
    assert [p for p in whole_files(tmp_path) if p.stat().st_size > 100] == []
    assert resolve(**options).path.read_bytes() == CONTENT  # type: ignore[arg-type]
    assert hub.gets[-1]["Range"] == f"bytes={200_000 // CHUNK * CHUNK}-"
    assert list(tmp_path.rglob("*.incomplete")) == []


def test_killed_download_is_continued_by_the_next_process(hub: FakeHub, tmp_path: Path) -> None:
    step = constants.DOWNLOAD_CHUNK_SIZE = 10 << 20  # the child's own
    hub.files["big.gguf"] = os.urandom(step * 2 + 5)
    hub.cut_after, hub.hold = step + 1000, threading.Event()
    command = [sys.executable, "-c", RESOLVE, f"{REPO}:big.gguf"]
    environment = child_environment(hub, tmp_path)
    child = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    while not any(p.stat().st_size >= step for p in tmp_path.rglob("*.incomplete")):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    hub.hold.set()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert Path(again.stdout.strip()).read_bytes() == hub.files["big.gguf"]
    assert hub.gets[-1]["Range"] == f"bytes={step}-"


def test_reset_connection_is_continued_at_once(hub: FakeHub) -> None:
    hub.files["tiny.gguf"] = CONTENT
    hub.cut_after, hub.resets = 200_000, True
    assert resolve(f"{REPO}:tiny.gguf").path.read_bytes() == CONTENT
    assert len(hub.gets) == 2


def test_signature_in_a_url_is_not_told(hub: FakeHub) -> None:
    text = refusal(url=f"http://user:secret@127.0.0.1:{hub.port}/files/gone.gguf?signature=secret")
    assert text == f"{hub.endpoint}/files/gone.gguf: 127.0.0.1:{hub.port} answered 404 Not Found"


def test_server_that_ignores_ranges_is_asked_for_everything_anew(hub: FakeHub) -> None:
    hub.files["tiny.gguf"] = CONTENT
    hub.ignores_ranges = True
    hub.cut_after = 200_000
    assert resolve(f"{REPO}:tiny.gguf").path.read_bytes() == CONTENT


def test_rest_of_another_version_is_never_joined(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["tiny.gguf"] = CONTENT
    url = f"{hub.endpoint}/files/tiny.gguf"
    break_off(hub, monkeypatch, url=url)
    hub.files["tiny.gguf"] = newer = CONTENT[::-1]
    assert resolve(url=url).path.read_bytes() == newer
    assert list(tmp_path.rglob("*.incomplete")) == []


def test_file_that_changes_while_it_is_asked_for_is_never_joined(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["tiny.gguf"] = CONTENT
    url = f"{hub.endpoint}/files/tiny.gguf"
    break_off(hub, monkeypatch, url=url)
    hub.swap["tiny.gguf"] = CONTENT[::-1]
    assert resolve(url=url).path.read_bytes() == CONTENT[::-1]


# --- never opened half-written ---------------------------------------------------------------------------


def test_wrong_digest_never_gets_the_final_name(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["tiny.gguf"] = CONTENT
    hub.etags["tiny.gguf"] = 64 * "0"
    assert "arrived damaged" in refusal(f"{REPO}:tiny.gguf")
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size == len(CONTENT)] == []


def test_wrong_size_never_gets_the_final_name(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["tiny.gguf"] = CONTENT
    answer = _Handler._head

    def claim_more(self: _Handler, status: int, headers: dict[str, str]) -> None:
        if "X-Linked-Size" in headers:
            headers["X-Linked-Size"] = str(len(CONTENT) + 1)
        answer(self, status, headers)

    monkeypatch.setattr(_Handler, "_head", claim_more)
    assert "should be of size 300001 but has size 300000" in refusal(f"{REPO}:tiny.gguf")
    assert [p for p in whole_files(tmp_path) if p.stat().st_size > 100] == []


# --- refusals, in one line -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "RepoNotFound", "shows no such repository; if it is private, set HF_TOKEN"),
        (404, "RepoNotFound", "shows no such repository"),
        (403, "GatedRepo", "gated: accept its terms on"),
        (500, "", "answered 500"),
    ],
)
def test_refusing_hub_is_named_in_one_line(hub: FakeHub, status: int, code: str, words: str) -> None:
    hub.error = (status, code)
    for model in (REPO, f"{REPO}:tiny.gguf"):
        text = refusal(model)
        assert text.startswith(f"{model}: ")
        assert words in text


def test_unknown_file_is_answered_with_those_there_are(hub: FakeHub) -> None:
    hub.files = {"a.gguf": b"", "b.gguf": b"", "README.md": b""}
    text = refusal(f"{REPO}:c.gguf")
    assert text == f"{REPO}:c.gguf: no such file; the repository has a.gguf, b.gguf"


def test_plain_url_that_is_gone_is_one_line(hub: FakeHub) -> None:
    url = f"{hub.endpoint}/files/gone.gguf"
    assert refusal(url=url) == f"{url}: 127.0.0.1:{hub.port} answered 404 Not Found"


def test_no_network_is_one_line(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    for options in ({"model": REPO}, {"model": f"{REPO}:x.gguf"}, {"url": "http://127.0.0.1:9/x.gguf"}):
        assert "cannot reach 127.0.0.1:9" in refusal(**options)


def test_full_disk_is_one_line_before_anything_is_fetched(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["tiny.gguf"] = CONTENT
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    assert "has 0.0 MB free, the download needs 0.3 MB" in refusal(f"{REPO}:tiny.gguf")
    assert hub.gets == []


def test_forbidden_download_asks_nobody(hub: FakeHub) -> None:
    hub.files["tiny.gguf"] = CONTENT
    assert "downloads are forbidden" in refusal(f"{REPO}:tiny.gguf", download=False)
    assert "downloads are forbidden" in refusal(url=f"{hub.endpoint}/files/tiny.gguf", download=False)
    assert "the cache has no GGUF file" in refusal(REPO, download=False)
    assert hub.n_requests == 0


# --- in a process of its own: the environment, the progress bar ------------------------------------------


def test_environment_is_honoured_and_offline_needs_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["tiny.gguf"] = CONTENT
    environment = child_environment(hub, tmp_path)

    def start(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", RESOLVE, f"{REPO}:tiny.gguf"]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, check=False)

    without = start(HF_HUB_OFFLINE="1")
    assert (without.returncode, hub.n_requests) == (1, 0)
    expected = f"{REPO}:tiny.gguf: not in the cache, and HF_HUB_OFFLINE forbids the network\n"
    assert without.stderr == expected
    fetched = start(HF_TOKEN="hf_x")
    assert Path(fetched.stdout.strip()).is_relative_to(tmp_path / "child")
    assert hub.gets[-1]["authorization"] == "Bearer hf_x"
    n_requests = hub.n_requests
    assert start(HF_HUB_OFFLINE="1").stdout == fetched.stdout
    assert hub.n_requests == n_requests


def test_progress_is_shown_on_a_terminal(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["tiny.gguf"] = CONTENT
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))  # else the bar has no room to be drawn in
    command = [sys.executable, "-c", RESOLVE, f"{REPO}:tiny.gguf"]
    subprocess.run(
        command, env=child_environment(hub, tmp_path), stdout=subprocess.DEVNULL, stderr=theirs, check=True
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # Linux's word for the other side's end
        pass
    os.close(ours)
    assert b"tiny.gguf: 100%" in shown
