"""Flags that many modes have."""

import argparse


def numbers(text: str) -> list[int]:
    """Whole numbers separated by commas, as a flag's type."""
    return [int(part) for part in text.split(",")]


def add_files(flags: argparse.ArgumentParser) -> None:
    """Where the figures go beside the table."""
    flags.add_argument("--json", metavar="FILE", help="file for the figures of every run")
    flags.add_argument("--png", metavar="FILE", help="file for the plot")


def add_load(flags: argparse.ArgumentParser, clients: list[int], n_tokens: int) -> None:
    """How many clients, and how long their answers; with these defaults."""
    shown = ",".join(map(str, clients))
    flags.add_argument("--clients", type=numbers, default=clients, help=f"at once, comma separated ({shown})")
    flags.add_argument("--tokens", type=int, default=n_tokens, help=f"of each answer at most ({n_tokens})")
