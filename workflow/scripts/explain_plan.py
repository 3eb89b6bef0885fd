"""Say of every cell that would run which of its inputs changed. Plans, and runs nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from routewise.errors import report_errors
from routewise.explain import damaged_cells, explain_cells
from routewise.plan import plan_study
from routewise.study import check_study


@report_errors
def main(study: dict[str, Any], results_dir: Path, root: Path) -> None:
    """Explain the plan of ``study``, as one JSON object, against what is in ``results_dir``."""
    plan = plan_study(check_study(study, "--study"), results_dir, root)
    cells = plan.named_cells()
    sweeps: Counter[str] = Counter()
    for reason in explain_cells(cells, results_dir):
        print(reason.line())
        sweeps[cells[reason.path]["sweep"]] += 1
    for build in plan.builds.values():
        if not (build.engine_dir / "build.json").is_file():
            print(f"build {build.name}: its engine has not been compiled from this source yet")
    for path in damaged_cells(cells):
        print(f"{path}: cannot be read: remove it, and it is measured again")
    told = ", ".join(f"{n} {sweep}" for sweep, n in sorted(sweeps.items()))
    print(f"{sum(sweeps.values())} of {len(cells)} cells would run{f' ({told})' if told else ''}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=json.loads, required=True, help="the study, as JSON")
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    parser.add_argument("--root", type=Path, default=Path(), help="where patches and scripts lie")
    arguments = parser.parse_args()
    sys.exit(main(arguments.study, arguments.results_dir, arguments.root))
