"""A repository and a study of the miniature llama.cpp, to be changed and planned again."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from routewise.plan import StudyPlan, fetch_sources, plan_study
from routewise.study import check_study
from small_tree import make_tree

DOT = "ggml/src/ggml-cpu/dot.cpp"
SHAPES = ["ragged", "rollback", "neighbours"]


class House:
    """A repository and a study of the miniature llama.cpp, to be changed and planned again."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        self.root = root
        self.results = folder / "results"
        self.tree = make_tree(folder / "tree")
        (folder / "small.gguf").write_bytes(b"a model as far as a plan is concerned")
        self.prompts = folder / "prompts.jsonl"
        self.add_prompt("a")
        self.study: dict[str, Any] = {
            "schema_version": 1,
            "study": "made",
            "sources": {"tree": {"kind": "path", "path": str(self.tree)}},
            "builds": {
                "cpu-stock": {"source": "tree", "backend": "cpu"},
                "cpu-twice": {"source": "tree", "backend": "cpu", "patch": "twice"},
            },
            "models": {
                "small": {"kind": "path", "path": str(folder / "small.gguf")},
                "smaller": {
                    "kind": "quantize",
                    "from": "small",
                    "type": "Q4_0",
                    "build": "cpu-stock",
                },
            },
            "prompts": {"few": {"file": str(self.prompts)}},
            "routes": {
                "cpu-stock": {"build": "cpu-stock"},
                "cpu-twice": {"build": "cpu-twice", "reference": "cpu-stock"},
            },
            "sweeps": {
                "replay": {
                    "routes": ["cpu-stock", "cpu-twice"],
                    "models": ["small", "smaller"],
                    "prompts": "few",
                    "widths": [2, 4],
                    "shapes": list(SHAPES),
                },
                "cost": {"routes": ["cpu-stock", "cpu-twice"], "models": ["smaller"]},
            },
        }

    def own_root(self) -> Path:
        """Have a copy of the measuring code and the patches that may be edited; return it."""
        ignored = shutil.ignore_patterns("__pycache__")
        self.root = Path(shutil.copytree(self.root, self.folder / "repository", ignore=ignored))
        return self.root

    def plan(self, **replay: Any) -> StudyPlan:
        document = copy.deepcopy(self.study)
        document["sweeps"].get("replay", {}).update(replay)
        return plan_study(check_study(document, "study.yaml"), self.results, self.root)

    def fetch_and_plan(self) -> StudyPlan:
        """Do all that the Snakefile does before there are rules."""
        fetch_sources(check_study(self.study, "study.yaml"), self.results)
        return self.plan()

    def append(self, file: str, text: str) -> None:
        """Append to a file of the measuring code; to be done in a copy (:meth:`own_root`)."""
        path = self.root / "workflow/scripts" / file
        path.write_text(path.read_text() + text)

    def add_prompt(self, name: str) -> None:
        line = {"id": name, "category": "text", "n_tokens": 8, "text": "one"}
        with self.prompts.open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def edit(self, file: Path | str, old: str, new: str) -> None:
        path = self.tree / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


def make_root(root: Path, repository: Path) -> Path:
    """Make a repository with the measuring code of this one, and a patch for the miniature."""
    (root / "workflow").mkdir(parents=True)
    for part in ("scripts", "shim"):
        (root / "workflow" / part).symlink_to(repository / "workflow" / part)
    overlay = root / "patches/twice/overlay/ggml/src/ggml-cpu"
    overlay.mkdir(parents=True)
    (overlay / "twice.cpp").write_text("float twice(float x) { return 2.0f * x; }\n")
    (root / "patches/twice/hooks.diff").write_text(
        f"--- a/{DOT}\n+++ b/{DOT}\n@@ -8,4 +8,5 @@\n"
        "         sum += a[i] * b[i];\n     }\n-    return sum;\n"
        "+    float twice(float x);\n+    return twice(sum);\n }\n"
    )
    return root
