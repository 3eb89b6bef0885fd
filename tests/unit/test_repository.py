"""The house rules, as tests. Each checker is also shown a bad sample that it must refuse."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

LIBRARY = "workflow/scripts/routewise"
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}
LOCKS = ("build", "requirements", "dev", "slurm")
DIRECTIVE_ORDER = ("input", "output", "log", "params", "threads", "resources", "script", "shell")
#: What conda calls a package that PyPI calls otherwise.
CONDA_NAMES = {"python-xxhash": "xxhash"}
#: Packages of conda that PyPI has not: no pin to keep in step.
CONDA_ONLY = {"python", "c-compiler", "cxx-compiler", "ccache"}


# --- the library's imports -------------------------------------------------------------------


def imported_modules(source: str, known: set[str]) -> set[str]:
    """Return which of the ``known`` modules of routewise ``source`` imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = f"routewise.{base}".rstrip(".")
            dotted = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in dotted:
            parts = name.split(".")
            if parts[0] == "routewise" and len(parts) > 1 and parts[1] in known:
                found.add(parts[1])
    return found


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return one cycle of ``graph`` as its nodes in order, first node repeated; [] for none."""
    done: set[str] = set()
    path: list[str] = []

    def walk(node: str) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        path.append(node)
        for following in sorted(graph.get(node, ())):
            cycle = walk(following)
            if cycle:
                return cycle
        path.pop()
        done.add(node)
        return []

    for start in sorted(graph):
        cycle = walk(start)
        if cycle:
            return cycle
    return []


def vague_names(paths: Iterable[Path]) -> list[str]:
    """Return the paths whose file name says nothing of what is in it."""
    return [str(path) for path in paths if path.stem.strip("_").lower() in VAGUE_NAMES]


def test_library_has_no_import_cycle(repository: Path) -> None:
    modules = {path.stem: path for path in (repository / LIBRARY).glob("*.py")}
    assert len(modules) > 2
    graph = {
        name: imported_modules(path.read_text(), set(modules)) for name, path in modules.items()
    }
    assert any(graph.values())
    assert find_cycle(graph) == []


def test_cycle_is_found() -> None:
    known = {"a", "b", "c"}
    graph = {
        "a": imported_modules("from routewise.b import thing", known),
        "b": imported_modules("def late():\n    from routewise import c", known),
        "c": imported_modules("import routewise.a\nfrom . import b", known),
    }
    assert graph == {"a": {"b"}, "b": {"c"}, "c": {"a", "b"}}
    assert find_cycle(graph) == ["a", "b", "c", "a"]
    assert find_cycle({"a": {"b"}, "b": set(), "c": {"a", "b"}}) == []


def test_no_module_has_a_vague_name(repository: Path) -> None:
    assert vague_names((repository / "workflow/scripts").rglob("*.py")) == []


def test_vague_name_is_found() -> None:
    paths = [Path("x/claim.py"), Path("x/utils.py"), Path("x/_helpers.py")]
    assert vague_names(paths) == ["x/utils.py", "x/_helpers.py"]


# --- requirements and environments -----------------------------------------------------------


def lock_pins(text: str) -> dict[str, str]:
    """Return package → version of a lock file."""
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==([^\s;]+)", text, re.M))


def lock_faults(text: str) -> list[str]:
    """Return what is wrong with a lock file: an address, an option, a package without hashes."""
    faults = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if "://" in line or re.match(r"-|.*\s@\s", line):
            faults.append(f"an address or an option: {line[:80]}")
        elif not re.match(r"[a-z0-9][a-z0-9._-]*==\S+", line):
            faults.append(f"not pinned: {line[:80]}")
        elif not re.search(r"--hash=sha256:[0-9a-f]{64}\b", line):
            faults.append(f"no hash: {line[:80]}")
    return faults


def environment_faults(environment: str, pins: dict[str, str]) -> list[str]:
    """Return where a conda environment file names another version than the lock does."""
    faults = []
    for entry in yaml.safe_load(environment)["dependencies"]:
        name, _, version = entry.partition("=")
        if name in CONDA_ONLY:
            continue
        locked = pins.get(CONDA_NAMES.get(name, name))
        if locked is None:
            faults.append(f"{name}: not in requirements/")
        elif version != locked:
            faults.append(f"{name}: {version or 'no version'} here, {locked} in requirements/")
    return faults


def all_pins(repository: Path) -> dict[str, str]:
    pins: dict[str, str] = {}
    for name in LOCKS:
        for package, version in lock_pins(
            (repository / "requirements" / f"{name}.txt").read_text()
        ).items():
            assert pins.setdefault(package, version) == version, f"{package}: two versions"
    return pins


@pytest.mark.parametrize("name", LOCKS)
def test_lock_is_pinned_with_hashes_and_without_addresses(repository: Path, name: str) -> None:
    text = (repository / "requirements" / f"{name}.txt").read_text()
    assert lock_faults(text) == []
    assert lock_pins(text)


@pytest.mark.parametrize("name", LOCKS)
def test_lock_has_all_that_is_asked_for(repository: Path, name: str) -> None:
    asked = (repository / "requirements" / f"{name}.in").read_text()
    wanted = set(re.findall(r"^([a-z0-9][a-z0-9._-]*)", asked, re.M))
    assert wanted <= set(lock_pins((repository / "requirements" / f"{name}.txt").read_text()))


def test_bad_lock_is_refused() -> None:
    good = "numpy==2.4.6 \\\n    --hash=sha256:" + "0" * 64 + "\n    # via pandas\n"
    assert lock_faults(good) == []
    bad = [
        "--index-" + "url https" + "://example.org/simple\n",
        "numpy==2.4.6\n",
        "numpy>=2 --hash=sha256:" + "0" * 64 + "\n",
        "numpy @ file" + ":///tmp/numpy.whl\n",
        "numpy==2.4.6 --hash=sha256:" + "0" * 63 + "\n",
    ]
    assert [len(lock_faults(good + text)) for text in bad] == [1] * len(bad)


def test_environments_agree_with_the_lock(repository: Path) -> None:
    files = sorted((repository / "envs").glob("*.yaml"))
    assert files
    pins = all_pins(repository)
    faults = {path.name: environment_faults(path.read_text(), pins) for path in files}
    assert {name: found for name, found in faults.items() if found} == {}


def test_environment_out_of_step_is_found() -> None:
    text = "dependencies:\n- python=3.12\n- numpy=1.0\n- cmake\n- python-xxhash=4\n- nothing=1\n"
    faults = environment_faults(text, {"numpy": "2.4.6", "cmake": "4.4.5", "xxhash": "4"})
    assert [fault.split(":")[0] for fault in faults] == ["numpy", "cmake", "nothing"]


# --- what may stand in a committed file ------------------------------------------------------

FORBIDDEN = re.compile(
    rb"(?<![\w.~<>{}()$*\]/-])/(?:work|root|home)/"
    rb"|pypi\.(?:python\.)?org|pythonhosted\.org|index-url[= ]|find-links[= ]"
    rb"|(?:deb|registry)\.(?:debian|npmjs)\.org"
)
#: Files that talk about these words: this one, and the options of the lock's maker.
MAY_NAME_THEM = {"tests/unit/test_repository.py", "requirements/lock"}


def committed_files(repository: Path) -> list[str]:
    """Return the files that are in git or would be added, without links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        capture_output=True,
        check=True,
    ).stdout.decode()
    names = sorted(set(filter(None, listed.split("\0"))))
    return [
        name
        for name in names
        if (repository / name).is_file() and not (repository / name).is_symlink()
    ]


def forbidden_words(content: bytes) -> list[str]:
    """Return the machine paths and registry hosts in ``content``."""
    return [match.group().decode() for match in FORBIDDEN.finditer(content)]


def test_no_machine_path_and_no_registry_host(repository: Path) -> None:
    if not (repository / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git working tree")
    names = committed_files(repository)
    assert "Makefile" in names
    found = {
        name: words
        for name in names
        if name not in MAY_NAME_THEM
        and (words := forbidden_words((repository / name).read_bytes()))
    }
    assert found == {}


def test_machine_path_and_registry_host_are_found() -> None:
    for bad in (
        b"cd /%s/main" % b"work",
        b"'/%s/x'" % b"root",
        b"see /home/someone/x",
        b"https://pypi.org/simple",
        b"https://files.pythonhosted.org/x",
        b"--extra-index-url x",
    ):
        assert forbidden_words(bad), bad
    harmless = b"results/%s/x ~/home/x networks https://x.org/a" % b"work"
    assert forbidden_words(harmless) == []


# --- rules, schemas, profiles ----------------------------------------------------------------


def read_rules(text: str) -> dict[str, list[str]]:
    """Return rule → its directives in order, of the text of a Snakemake file."""
    rules: dict[str, list[str]] = {}
    indent, directives = "", None
    for line in text.splitlines():
        start = re.match(r"(\s*)(?:rule|checkpoint)\s+(\w+)\s*:", line)
        if start:
            indent = start[1]
            directives = rules.setdefault(start[2], [])
        elif line.strip() and not line.startswith(indent + "    "):
            directives = None
        elif directives is not None:
            directive = re.match(rf"{indent}    ([a-z_]+):", line)
            if directive:
                directives.append(directive[1])
    return rules


def rule_faults(rules: dict[str, list[str]]) -> list[str]:
    """Return the rules that run something without a log, or whose directives are out of order."""
    faults = []
    for name, directives in rules.items():
        runs = {"shell", "script", "run", "notebook", "wrapper"} & set(directives)
        if runs and "log" not in directives:
            faults.append(f"{name}: no log")
        ordered = [directive for directive in directives if directive in DIRECTIVE_ORDER]
        if ordered != sorted(ordered, key=DIRECTIVE_ORDER.index):
            faults.append(f"{name}: {', '.join(ordered)}")
    return faults


def test_every_rule_has_a_log_and_the_usual_order(repository: Path) -> None:
    files = [*repository.glob("Snakefile"), *(repository / "workflow/rules").glob("*.smk")]
    if not files:
        pytest.skip("no rule files yet")
    rules: dict[str, list[str]] = {}
    for path in files:
        rules |= read_rules(path.read_text())
    assert rules, f"no rule found in {len(files)} files"
    assert rule_faults(rules) == []


def test_rule_without_log_is_found() -> None:
    text = """
rule all:
    input:
        "x",


rule make_x:
    output:
        "x",
    log:
        "logs/x",
    shell:
        "echo {output}"


if True:

    rule make_y:
        log:
            "logs/y",
        output:
            "y",
        script:
            "y.py"

    checkpoint make_z:
        output:
            "z",
        shell:
            "log: x"
"""
    rules = read_rules(text)
    assert rules["make_x"] == ["output", "log", "shell"]
    assert rule_faults(rules) == ["make_y: log, output, script", "make_z: no log"]


def test_environments_named_by_rules_exist(repository: Path) -> None:
    for path in (repository / "workflow/rules").glob("*.smk"):
        for name in re.findall(r"envs/[\w-]+\.yaml", path.read_text()):
            assert (repository / name).is_file(), f"{path.name} names {name}"


def test_schemas_are_valid(repository: Path) -> None:
    for path in (repository / "config/schemas").glob("*.json"):
        jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text()))


def test_bad_schema_is_refused() -> None:
    with pytest.raises(jsonschema.SchemaError):
        jsonschema.Draft202012Validator.check_schema({"type": "no such type"})


def test_gpu_box_link_leads_to_its_profile(repository: Path) -> None:
    link = repository / "gpu-box"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == (repository / "profiles/gpu-box").resolve()
    assert (link / "config.yaml").is_file()


def test_profiles_hold_known_options_and_none_is_default(repository: Path) -> None:
    profiles = sorted((repository / "profiles").glob("*/config.yaml"))
    assert profiles
    # A profile of this name would load by itself and override --profile.
    assert not (repository / "profiles/default").exists()
    listed = subprocess.run(
        [sys.executable, "-m", "snakemake", "--help"], capture_output=True, text=True, check=True
    ).stdout
    known = set(re.findall(r"--([a-z][a-z-]+)", listed))
    for path in profiles:
        options = yaml.safe_load(path.read_text())
        if options.get("executor") is None:  # an executor brings options of its own
            assert set(options) <= known, path


def profile_faults(options: dict[str, Any]) -> list[str]:
    """Return what every profile must say and this one does not."""
    wanted = {"scheduler": "greedy", "scheduler-subsample": 50, "rerun-incomplete": True}
    faults = [name for name, value in wanted.items() if options.get(name) != value]
    return faults + [name for name in options if name.endswith("array-jobs")]


def test_every_profile_is_greedy_and_goes_on_after_a_kill(repository: Path) -> None:
    profiles = sorted((repository / "profiles").glob("*/config.yaml"))
    assert {path.parent.name for path in profiles} >= {
        *("laptop", "gpu-box", "slurm", "cluster-generic")
    }
    faults = {path: profile_faults(yaml.safe_load(path.read_text())) for path in profiles}
    assert {path: found for path, found in faults.items() if found} == {}


def test_profile_that_lacks_something_is_found() -> None:
    good = {"scheduler": "greedy", "scheduler-subsample": 50, "rerun-incomplete": True}
    assert profile_faults(good) == []
    assert profile_faults({**good, "scheduler": "ilp"}) == ["scheduler"]
    assert profile_faults({**good, "rerun-incomplete": False}) == ["rerun-incomplete"]
    assert profile_faults({**good, "slurm-array-jobs": "all"}) == ["slurm-array-jobs"]
    assert len(profile_faults({})) == 3


# --- lint, layout, types ---------------------------------------------------------------------


def lint_commands(repository: Path) -> list[list[str]]:
    """Return the commands of ``make lint``, as it would run them."""
    printed = subprocess.run(
        ["make", "--no-print-directory", "-n", "lint", "-o", "setup"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [line.split() for line in printed.splitlines() if line.startswith(".venv/bin/")]


def run_tool(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``.venv/bin/TOOL …`` with the tool of the environment that runs this test."""
    tool = Path(sys.executable).parent / Path(command[0]).name
    return subprocess.run(
        [str(tool), *command[1:]], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("index", range(4), ids=["ruff-check", "ruff-format", "snakefmt", "mypy"])
def test_lint_passes(repository: Path, index: int) -> None:
    command = lint_commands(repository)[index]
    done = run_tool(command, repository)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


def test_lint_refuses_a_bad_tree(repository: Path, tmp_path: Path) -> None:
    shutil.copy(repository / "pyproject.toml", tmp_path)
    for folder in ("workflow/scripts", "workflow/rules", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "workflow/scripts/bad.py").write_text(
        '"""A bad sample."""\nimport os\ndef f( x ) :\n    """Do."""\n    return x\n'
    )
    (tmp_path / "tests/test_good.py").write_text("")
    (tmp_path / "Snakefile").write_text('rule a:\n  output: "x"\n  shell: "true"\n')
    for command in lint_commands(repository):
        done = run_tool(command, tmp_path)
        assert done.returncode == 1, f"{' '.join(command)}: {done.stdout}{done.stderr}"


def test_pre_commit_runs_what_lint_runs(repository: Path) -> None:
    config = yaml.safe_load((repository / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert [hook["entry"].split() for hook in hooks] == lint_commands(repository)
