"""Commands beside the workflow."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from routewise.before_after import add_compare_parser
from routewise.claims_view import print_claims
from routewise.endpoint import add_agree_parser, add_batched_parser
from routewise.errors import report_errors
from routewise.plan import fetch_sources
from routewise.store_view import add_store_parser
from routewise.study import read_study


def run_fetch(arguments: argparse.Namespace) -> None:
    """Bring a study's pinned sources into the results folder."""
    fetch_sources(read_study(arguments.study), arguments.results)


def run_claims(arguments: argparse.Namespace) -> None:
    """Show who holds which device, since when, and who waits."""
    print_claims(sys.stdout, arguments.folder)


@report_errors
def run(arguments: argparse.Namespace) -> int | None:
    """Run the command that was asked for; return its exit code."""
    code: int | None = arguments.run(arguments)
    return code


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or ``words`` in its place."""
    parser = argparse.ArgumentParser(prog="python -m routewise", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("fetch", help="bring a study's pinned sources")
    command.add_argument("study", type=Path, help="the study's YAML file")
    command.add_argument("--results", type=Path, default=Path("results"))
    command.set_defaults(run=run_fetch)
    command = commands.add_parser("claims", help="who holds which device, and who waits")
    command.add_argument("--folder", type=Path, help="where claims are kept, if elsewhere")
    command.set_defaults(run=run_claims)
    add_agree_parser(commands)
    add_batched_parser(commands)
    add_store_parser(commands)
    add_compare_parser(commands)
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(run(parse()))
