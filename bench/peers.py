"""Other gateways in front of the fake backend, as real processes: nginx, vllm-router, LiteLLM.

Each is set up as somebody would who cares for streams: one process, connections to the backend kept alive,
nothing buffered, no access log. They are no dependencies of this project; PERFORMANCE.md says how to install
them. What is not on PATH is left out with a line that says so.
"""

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.backend import run_backend
from bench.sources import MODEL
from bench.streams import USUAL_EVENT_US, Subject

_START_S = 120.0  # LiteLLM imports for long
_SETTLE_S = 2.0  # for what it still does once it listens

# nginx keeps a hundred streams on an HTTP/2 connection by default 128.
_NGINX_CONF = """\
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream backend {{ server 127.0.0.1:{backend}; keepalive 1024; }}
  server {{
    listen 127.0.0.1:{port} {tls}; ssl_certificate {pki}/cert.pem; ssl_certificate_key {pki}/key.pem;
    location / {{
      proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 1h;
    }}
  }}
}}
"""
_LITELLM_CONF = """\
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{backend}/v1", api_key: none}}
litellm_settings: {{telemetry: false, request_timeout: 3600}}
"""
# LiteLLM looks for prices on the network otherwise, and would not start without keys.
_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """Where a peer finds what it needs, and where it is to listen."""

    folder: Path
    transport: str
    backend: int
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A gateway: its command on a site, and the transports it can serve."""

    command: Callable[[_Site], list[str]]
    transports: tuple[str, ...] = ("http1",)
    event_us: float = USUAL_EVENT_US


def _nginx(site: _Site) -> list[str]:
    conf = site.folder / "nginx.conf"
    tls = {"http1": "", "tls": "ssl", "h2": "ssl http2"}[site.transport]
    conf.write_text(
        _NGINX_CONF.format(
            folder=site.folder, backend=site.backend, port=site.port, tls=tls, pki=site.folder / "pki"
        )
    )
    return ["nginx", "-e", "stderr", "-p", str(site.folder), "-c", str(conf)]


def _vllm_router(site: _Site) -> list[str]:
    command = ["vllm-router", "--worker-urls", f"http://127.0.0.1:{site.backend}", "--policy", "round_robin"]
    return [*command, "--host", "127.0.0.1", "--port", str(site.port), "--log-level", "error"]


def _litellm(site: _Site) -> list[str]:
    conf = site.folder / "litellm.yaml"
    conf.write_text(_LITELLM_CONF.format(model=MODEL, backend=site.backend))
    return ["litellm", "--config", str(conf), "--host", "127.0.0.1", "--port", str(site.port)]


PEERS = {
    "nginx": Peer(command=_nginx, transports=("http1", "tls", "h2")),
    "vllm-router": Peer(command=_vllm_router),
    "litellm": Peer(command=_litellm, event_us=1500.0),
}


def found(names: Sequence[str]) -> list[str]:
    """Return the peers that are here; say which are not."""
    missing = [name for name in names if shutil.which(name) is None]
    for name in missing:
        print(f"{name} is left out: no such command on PATH", file=sys.stderr)
    return [name for name in names if name not in missing]


@contextmanager
def beside(folder: Path, transport: str, names: Sequence[str]) -> Iterator[list[Subject]]:
    """Start the peers that speak the transport, each with a backend of its own."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(_running(folder, transport, name))
            for name in names
            if transport in PEERS[name].transports
        ]


@contextmanager
def _running(folder: Path, transport: str, name: str) -> Iterator[Subject]:
    peer = PEERS[name]
    context = multiprocessing.get_context("spawn")
    source, source_end = context.Pipe()
    backend = context.Process(target=run_backend, args=(source_end,))
    backend.start()
    site = _Site(folder=folder, transport=transport, backend=source.recv(), port=_free_port())
    environment = {**os.environ, **_ENVIRONMENT}
    process = subprocess.Popen(
        peer.command(site), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        _wait_for(name, process, site.port)
        yield Subject(name=name, pid=process.pid, port=site.port, source=source, event_us=peer.event_us)
    finally:
        process.terminate()
        process.wait()
        source.send(None)
        backend.join()


def _wait_for(name: str, process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                time.sleep(_SETTLE_S)
                return
        time.sleep(0.1)
    raise RuntimeError(f"{name} did not start")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
