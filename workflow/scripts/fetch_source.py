"""Fetch one pinned llama.cpp tree into the results folder, unless it is there.

Prints the root of the tree. Needs the network the first time, for sources of kind pypi and git.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from routewise.errors import report_errors
from routewise.source import SourceSpec, fetch_source


@report_errors
def main(name: str, source: str, results_dir: Path) -> None:
    """Fetch source ``name``; ``source`` is its entry in the study, as JSON."""
    spec = SourceSpec.from_config(name, json.loads(source))
    print(fetch_source(name, spec, results_dir, say=lambda text: print(text, file=sys.stderr)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--source", required=True, help="the source's entry in the study, as JSON")
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    sys.exit(main(**vars(parser.parse_args())))
