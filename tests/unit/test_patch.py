"""Patches: what they make of a tree, and what is said when they do not fit."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from routewise.errors import RoutewiseError
from routewise.patch import known_patches, load_patch, patched_files
from routewise.source import component_digests
from small_tree import make_tree

DOT = "ggml/src/ggml-cpu/dot.cpp"
DIFF = f"""\
diff --git a/{DOT} b/{DOT}
--- a/{DOT}
+++ b/{DOT}
@@ -1,4 +1,5 @@
 #include "ggml.h"
+#include "exact.h"
{" "}
 // the sum, from left to right
 extern "C" float ggml_dot(const float * a, const float * b, int n) {{
@@ -9,3 +10,3 @@
     }}
-    return sum;
+    return exact(sum);
 }}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    folder = tmp_path / "patches"
    overlay = folder / "exact/overlay/ggml/src/ggml-cpu"
    overlay.mkdir(parents=True)
    (overlay / "exact.h").write_text("static float exact(float x) { return x; }\n")
    (folder / "exact/hooks.diff").write_text(DIFF)
    (folder / "exact/README.md").write_text("What and why.\n")
    (folder / "other").mkdir()
    return folder


def test_a_patch_adds_and_changes_files_and_leaves_the_source_alone(
    tree: Path, patches: Path
) -> None:
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    patch = load_patch("exact", patches)
    files = patched_files(patch, tree)
    assert sorted(files) == [DOT, "ggml/src/ggml-cpu/exact.h"]
    assert b"return exact(sum);" in files[DOT]
    assert b'#include "exact.h"' in files[DOT]
    assert patch.touched == (DOT,)
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before


def test_it_moves_the_components_that_it_touches(tree: Path, patches: Path) -> None:
    patch = load_patch("exact", patches)
    stock = component_digests(tree)
    patched = component_digests(tree, changed=patched_files(patch, tree))
    assert {name for name in patched if patched[name] != stock.get(name)} == {"ggml-cpu"}
    assert set(patch.components()) == {"ggml-cpu"}


def test_a_patch_applies_inside_an_ignored_folder_of_a_repository(
    tree: Path, patches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There `git apply` by itself skips every file and reports success."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("*\n")
    scratch = tmp_path / "results"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", os.fspath(scratch))
    files = patched_files(load_patch("exact", patches), tree)
    assert b"return exact(sum);" in files[DOT]


def test_the_environment_of_a_git_hook_does_no_harm(
    tree: Path, patches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", os.fspath(tmp_path / "nowhere/.git"))
    monkeypatch.setenv("GIT_WORK_TREE", os.fspath(tmp_path / "nowhere"))
    assert b"exact(sum)" in patched_files(load_patch("exact", patches), tree)[DOT]


def test_one_that_does_not_apply_names_file_hunk_and_source(tree: Path, patches: Path) -> None:
    path = tree / DOT
    path.write_text(path.read_text().replace("return sum;", "return sum + 0.0f;"))
    with pytest.raises(RoutewiseError) as error:
        patched_files(load_patch("exact", patches), tree, "llama-cpp")
    for part in (
        "patch exact does not apply",
        f"file {DOT}",
        "hunk 2 (@@ -9,3 +10,3 @@)",
        f"source llama-cpp ({tree})",
        "the file has no line 'return sum;'",
    ):
        assert part in str(error.value)


def test_a_file_that_is_not_there_is_named(tree: Path, patches: Path) -> None:
    (tree / DOT).unlink()
    with pytest.raises(RoutewiseError, match=r"hunk 1 .* the file does not exist there"):
        patched_files(load_patch("exact", patches), tree)


def test_a_hunk_may_have_moved(tree: Path, patches: Path) -> None:
    path = tree / DOT
    path.write_text(path.read_text().replace("    float sum", "\n\n    float sum"))
    assert b"return exact(sum);" in patched_files(load_patch("exact", patches), tree)[DOT]


def test_an_overlay_may_not_replace_an_upstream_file(tree: Path, patches: Path) -> None:
    (patches / "exact/overlay" / DOT).write_text("int x;\n")
    with pytest.raises(RoutewiseError, match=re.escape(f"overlay/{DOT} would replace")):
        patched_files(load_patch("exact", patches), tree)


def test_an_unknown_name_lists_the_known_ones(patches: Path, tmp_path: Path) -> None:
    assert known_patches(patches) == ["exact", "other"]
    with pytest.raises(RoutewiseError, match=r"unknown patch 'exakt'; .* has: exact, other"):
        load_patch("exakt", patches)
    with pytest.raises(RoutewiseError, match="has: none"):
        load_patch("exact", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("", "neither files in overlay/ nor a hunk"),
        (DIFF.replace("+1,5", "+1,9"), "does not hold the lines its header announces"),
        (DIFF.replace("+++ b", "=== b"), "'---' without '+++'"),
        (DIFF.replace(f"--- a/{DOT}", "--- /dev/null"), "may not add or delete files"),
        (DIFF.replace("--- a", "new file mode 100644\n--- a"), "may only change lines"),
        (DIFF.replace(DOT, "docs/long.txt"), "is no place that a build"),
        (DIFF.replace(DOT, "src/../../escape.c"), "is no place that a build"),
        (DIFF.replace("@@ -1,4 +1,5 @@", "@@ nonsense @@"), "not a hunk header"),
    ],
)
def test_a_damaged_patch_is_refused(patches: Path, diff: str, message: str) -> None:
    (patches / "other/hooks.diff").write_text(diff)
    with pytest.raises(RoutewiseError, match=re.escape(message)):
        load_patch("other", patches)


def test_an_overlay_outside_the_tree_is_refused(patches: Path) -> None:
    (patches / "other/overlay/docs").mkdir(parents=True)
    (patches / "other/overlay/docs/a.txt").write_text("")
    with pytest.raises(RoutewiseError, match=r"docs/a\.txt is no place"):
        load_patch("other", patches)


def test_the_digest_of_a_patch_is_its_meaning(patches: Path) -> None:
    before = load_patch("exact", patches).digest()
    header = patches / "exact/overlay/ggml/src/ggml-cpu/exact.h"
    header.write_text("// why\n" + header.read_text())
    (patches / "exact/README.md").write_text("Another word.\n")
    diff = patches / "exact/hooks.diff"
    diff.write_text(DIFF.replace("@@ -9,3 +10,3 @@", "@@ -10,3 +11,3 @@"))
    assert load_patch("exact", patches).digest() == before
    diff.write_text(DIFF.replace("exact(sum)", "exact(-sum)"))
    assert load_patch("exact", patches).digest() != before
