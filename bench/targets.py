"""The servers that are measured beside each other: named URLs, and alternating runs over them.

Shared by the modes that load OpenAI-compatible servers: their flags, the order of the runs, ratios between
the servers.
"""

import argparse
import json
import secrets
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from tqdm import tqdm

from bench.answers import PATH
from bench.flags import add_files

REACH_S = 10

T = TypeVar("T")


class NamedUrl(NamedTuple):
    """What `--url` says."""

    name: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and the model it is asked for."""

    name: str = ""
    host: str = "127.0.0.1"
    port: int
    path: str = PATH
    is_tls: bool = False
    model: str


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The flags of every mode that loads servers over HTTP."""
    flags = argparse.ArgumentParser(
        prog=f"python -m bench {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--url",
        type=named_url,
        action="append",
        required=True,
        metavar="NAME=URL",
        help="an OpenAI-compatible server; repeats, and the last is what the others are compared with",
    )
    flags.add_argument("--model", help="asked for by this name (the first that each server lists)")
    flags.add_argument("--rounds", type=int, default=5, help="alternating runs of each server (5)")
    flags.add_argument(
        "--seed",
        default=secrets.token_hex(2),
        help="begins every prompt, so that no server has computed it before (random)",
    )
    add_files(flags)
    return flags


def named_url(text: str) -> NamedUrl:
    """Read `NAME=URL`, as a flag's type; the URL may end in /v1."""
    name, is_named, url = text.partition("=")
    if (
        not name
        or not is_named
        or urlsplit(url).scheme not in ("http", "https")
        or not urlsplit(url).hostname
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT")
    return NamedUrl(name, url.rstrip("/").removesuffix("/v1"))


def targets(args: argparse.Namespace) -> list[Target]:
    """Reach every server of `--url`. Raises: RuntimeError if one does not answer."""
    names = [each.name for each in args.url]
    if len(set(names)) < len(names):
        raise SystemExit(f"every --url needs a name of its own, not {', '.join(names)}")
    return [_reach(each, args.model) for each in args.url]


def _reach(named: NamedUrl, model: str | None) -> Target:
    try:
        with urllib.request.urlopen(f"{named.url}/v1/models", timeout=REACH_S) as answer:
            listed = json.load(answer)["data"][0]["id"]
    except (OSError, ValueError, LookupError) as error:
        raise RuntimeError(f"{named.url} does not list its models: {error}") from error
    parts = urlsplit(named.url)
    assert parts.hostname is not None
    is_tls = parts.scheme == "https"
    return Target(
        name=named.name,
        host=parts.hostname,
        port=parts.port or (443 if is_tls else 80),
        path=parts.path + PATH,
        is_tls=is_tls,
        model=model or listed,
    )


def alternate(what: str, rounds: int, measures: Mapping[str, Callable[[int], T]]) -> dict[str, list[T]]:
    """Take each measure once a round, in turn; each is told the round. Shows a bar on a terminal."""
    runs: dict[str, list[T]] = {name: [] for name in measures}
    with tqdm(total=rounds * len(measures), desc=what, disable=None, leave=False) as bar:
        for n in range(rounds):
            for name, measure in measures.items():
                bar.set_postfix_str(name)
                runs[name].append(measure(n))
                bar.update()
    return runs


def ratios(runs: Mapping[str, Sequence[Mapping[str, Any]]], name: str, figure: str) -> list[float]:
    """A figure of one server in parts of the last server's, round by round."""
    *_, reference = runs
    pairs = zip(runs[name], runs[reference], strict=True)
    return [run[figure] / beside[figure] for run, beside in pairs]
