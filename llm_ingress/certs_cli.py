"""`llm-ingress certs`: the private CA of a ring, from the command line.

Called by: `cli.py`.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeAlias

from llm_ingress.certs import (
    CA_NAME,
    CERT_NAME,
    KEY_NAME,
    WARN_AHEAD,
    CertificateFacts,
    read_facts,
)
from llm_ingress.errors import CertificateFault, ConfigError
from llm_ingress.pki import CA_DAYS, Period, parse_names
from llm_ingress.pki_folder import (
    CA_KEY_NAME,
    certificates_in,
    init,
    issue_worker,
    renew_ingress,
    renew_worker,
)

Command: TypeAlias = Callable[[argparse.Namespace, datetime], int]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

DEFAULT_DAYS = 365
EXIT_FAULT = 1
DAY = timedelta(days=1)

LAYOUT = f"""\
PKI holds {CA_NAME}, {CERT_NAME} and {KEY_NAME}, which an ingress on another machine needs copied, and
{CA_KEY_NAME}, which signs workers' certificates and is best kept in one place."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table of certificates."""

    cells: tuple[str, str, str, str]
    is_usable: bool = True


HEADING = Row(("certificate", "names", "expires", ""))


def add_certs_command(commands: Commands) -> None:
    """Add `certs`; parsed, `args.run(args)` runs it and returns the exit status."""
    parser = commands.add_parser(
        "certs",
        help="issue and renew the certificates of ingresses and workers",
        description="Issue and renew the certificates of ingresses and workers.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_init(commands)
    _add_worker(commands)
    _add_status(commands)


def _add_init(commands: Commands) -> None:
    command = commands.add_parser(
        "init", help="make a private CA, and the certificate of an ingress", epilog=LAYOUT
    )
    command.add_argument("pki", type=Path, metavar="PKI", help="folder to make")
    command.add_argument(
        "--san",
        metavar="NAME,...",
        help="DNS names and addresses that workers dial, separated by commas (with --renew: as before)",
    )
    _add_period(command, "keep the CA, certify the ingress's key anew")
    command.set_defaults(run=partial(_run, _init))


def _add_worker(commands: Commands) -> None:
    command = commands.add_parser("worker", help="issue the certificate of a worker")
    command.add_argument("pki", type=Path, metavar="PKI", help="folder that `certs init` made")
    command.add_argument("name", metavar="NAME", help="the worker's name, which is its identity in the ring")
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to make, for the worker's --pki (default: ./NAME)"
    )
    _add_period(command, "certify the worker's key anew; it need not be on this machine")
    command.set_defaults(run=partial(_run, _worker))


def _add_status(commands: Commands) -> None:
    command = commands.add_parser(
        "status", help="show what expires when; exit status 1 if anything cannot be used now"
    )
    command.add_argument("pki", type=Path, metavar="PKI", help="folder of a CA, or of a worker")
    command.set_defaults(run=partial(_run, _status))


def _add_period(command: argparse.ArgumentParser, renewal: str) -> None:
    command.add_argument(
        "--days",
        type=int,
        default=DEFAULT_DAYS,
        metavar="N",
        help=f"days the certificate is valid, at most {CA_DAYS}, as the CA is (default: %(default)s)",
    )
    command.add_argument("--renew", action="store_true", help=renewal)


def _run(command: Command, args: argparse.Namespace, now: datetime | None = None) -> int:
    """Run a command; `now` is this machine's time unless a test says otherwise."""
    try:
        # Certificates know no fractions of a second.
        return command(args, now or datetime.now(UTC).replace(microsecond=0))
    except ConfigError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}")


def _init(args: argparse.Namespace, now: datetime) -> int:
    names = None if args.san is None else parse_names(args.san)
    period = Period(now, args.days)
    if args.renew:
        renew_ingress(args.pki, names, period)
    elif names is None:
        raise ConfigError("give --san: the DNS names and addresses that workers dial")
    else:
        init(args.pki, names, period)
    _print_table([args.pki / CA_NAME, args.pki / CERT_NAME], now)
    return 0


def _worker(args: argparse.Namespace, now: datetime) -> int:
    out = Path(args.name) if args.out is None else args.out
    (renew_worker if args.renew else issue_worker)(args.pki, args.name, out, Period(now, args.days))
    _print_table([out / CERT_NAME], now)
    if not (out / KEY_NAME).exists():
        print(f"copy {out / CA_NAME} and {out / CERT_NAME} to the worker's folder: its key is not here")
    return 0


def _status(args: argparse.Namespace, now: datetime) -> int:
    paths = certificates_in(args.pki)
    if not paths:
        raise ConfigError(f"{args.pki}: no certificates there")
    return 0 if _print_table(paths, now) else EXIT_FAULT


def _print_table(paths: Iterable[Path], now: datetime) -> bool:
    """Print a line for each certificate; return whether all can be used now."""
    rows = [_row(path, now) for path in paths]
    widths = [max(len(row.cells[column]) for row in (HEADING, *rows)) for column in range(len(HEADING.cells))]
    for row in (HEADING, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row.cells, widths, strict=True)).rstrip())
    return all(row.is_usable for row in rows)


def _row(path: Path, now: datetime) -> Row:
    try:
        facts = read_facts(path)
    except CertificateFault as fault:
        return Row((str(path), "", "", str(fault).removeprefix(f"{path}: ")), is_usable=False)
    names = ", ".join(facts.names) or "(a CA)"
    cells = (str(path), names, f"{facts.not_after:%Y-%m-%d}", _remark(facts, now))
    return Row(cells, is_usable=facts.is_valid_at(now))


def _remark(facts: CertificateFacts, now: datetime) -> str:
    if now < facts.not_before:
        return f"not valid before {facts.not_before:%Y-%m-%d %H:%M} UTC"
    left = facts.not_after - now
    if left <= timedelta(0):
        return f"EXPIRED {-left // DAY} days ago"
    return f"in {-(-left // DAY)} days" + (", renew it soon" if left <= WARN_AHEAD else "")


def _fail(message: str) -> int:
    print(f"llm-ingress certs: {message}", file=sys.stderr)
    return EXIT_FAULT
