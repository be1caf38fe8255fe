"""Imports run one way, and each third-party library stays behind its fence."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "llm_engine": ROOT / "llm_engine",
    "llm_ingress": ROOT / "llm_ingress",
    "llm_worker": ROOT / "llm_worker",
    "llm_serve": ROOT / "examples" / "serve",
}

# What of the ingress a worker may know: the API's shapes and the ring's messages, none of its sockets.
SHARED = tuple(
    f"llm_ingress.{name}"
    for name in (
        *("api", "certs", "dialects", "draining", "endpoint", "errors"),
        *("frames", "labels", "outbox", "payloads", "records", "tls", "turns", "wire"),
    )
)
MAY_IMPORT = {
    "llm_engine": ("llm_engine",),
    "llm_ingress": ("llm_ingress",),
    "llm_worker": ("llm_worker", "llm_engine", *SHARED),
    "llm_serve": ("llm_serve", "llm_worker", "llm_engine", "llm_ingress"),
}
EXCEPTIONS = {("llm_worker/local.py", "llm_ingress.gateway")}

FENCES = {
    "llama_cpp": ("llm_engine/llama.py",),
    "jinja2": ("llm_engine/chat.py",),
    "huggingface_hub": ("llm_engine/download.py",),
    "starlette": ("llm_ingress/public.py", "llm_serve/"),
    "aiohttp": (
        "llm_ingress/control.py",
        "llm_worker/connection.py",
        "llm_worker/remote.py",
        "llm_worker/health.py",
    ),
    "hypercorn": (
        "llm_ingress/serving.py",
        "llm_ingress/express.py",
        "llm_ingress/h1_head.py",
        "llm_ingress/h2_flow.py",
    ),
    "argparse": (
        "llm_engine/cli.py",
        "llm_ingress/cli.py",
        "llm_ingress/flags.py",
        "llm_ingress/certs_cli.py",
        "llm_worker/cli.py",
        "llm_serve/cli.py",
    ),
    "dns": ("llm_worker/discovery.py",),
    "cryptography": ("llm_ingress/pki.py", "llm_ingress/certs.py"),
    "signal": (
        *(f"{package}/__main__.py" for package in PACKAGES),
        "llm_engine/cli.py",
        "llm_engine/trial.py",  # names the one that ended its child
        "llm_ingress/cli.py",
        "llm_worker/cli.py",
        "llm_serve/cli.py",
    ),
    "sqlite3": ("llm_ingress/history_file.py",),
    "ctypes": ("llm_engine/llama.py", "llm_engine/hugepages.py", "llm_engine/doorbell.py"),
}


def modules() -> Iterator[tuple[str, str, ast.Module]]:
    """Package, file below it, and its syntax tree."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            yield package, f"{package}/{path.relative_to(folder)}", ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def is_below(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def test_imports_run_one_way() -> None:
    wrong = [
        f"{file} imports {name}"
        for package, file, tree in modules()
        for name in imports(tree)
        if is_below(name, tuple(PACKAGES))
        and not is_below(name, MAY_IMPORT[package])
        and (file, name) not in EXCEPTIONS
    ]
    assert not wrong


@pytest.mark.parametrize("library", FENCES)
def test_a_library_stays_behind_its_fence(library: str) -> None:
    users = {file for _, file, tree in modules() for name in imports(tree) if is_below(name, (library,))}
    assert users, f"nobody uses {library}: remove its fence"
    assert not [file for file in users if not file.startswith(FENCES[library])]


@pytest.mark.parametrize("package", ["llm_ingress", "llm_worker"])
def test_a_package_has_an_empty_init(package: str) -> None:
    assert (PACKAGES[package] / "__init__.py").read_text() == ""


# What a machine without the worker's dependencies lacks: importing one of these fails.
WITHOUT_LLAMA = (
    "import sys\n"
    "for name in ('llama_cpp', 'numpy', 'jinja2', 'huggingface_hub', 'dns', 'llm_engine', 'llm_worker'):\n"
    "    sys.modules[name] = None\n"
)


def test_the_ingress_runs_without_llama_cpp_and_numpy() -> None:
    names = [
        f"llm_ingress.{path.relative_to(PACKAGES['llm_ingress']).with_suffix('')}".replace("/", ".")
        for path in PACKAGES["llm_ingress"].rglob("*.py")
        if path.name != "__init__.py"
    ]
    program = f"{WITHOUT_LLAMA}for name in {names!r}:\n    __import__(name)\n"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=ROOT)


def test_llm_ingress_is_a_command_without_llama_cpp() -> None:
    program = (
        f"{WITHOUT_LLAMA}import runpy\n"
        "sys.argv = ['llm-ingress', '--help']\n"
        "runpy.run_module('llm_ingress', run_name='__main__')\n"
    )
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert "--control-bind" in shown.stdout


def test_the_engine_package_loads_llama_cpp_only_when_it_is_used() -> None:
    program = "import sys, llm_engine, llm_engine.generation; assert 'llama_cpp' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
