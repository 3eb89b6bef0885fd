"""Commands beside the workflow."""

from __future__ import annotations

import argparse
from pathlib import Path

from routewise.errors import report_errors
from routewise.plan import fetch_sources
from routewise.study import read_study


@report_errors
def fetch(study: Path, results: Path) -> None:
    """Bring a study's pinned sources into the results folder."""
    fetch_sources(read_study(study), results)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m routewise", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("fetch", help="bring a study's pinned sources")
    command.add_argument("study", type=Path, help="the study's YAML file")
    command.add_argument("--results", type=Path, default=Path("results"))
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    raise SystemExit(fetch(arguments.study, arguments.results))
