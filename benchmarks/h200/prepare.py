"""Lay out what a run on a borrowed GPU box needs, in parts that each fit through a small door.

The box has no network. Here, where there is one, the study's source and its models from packages
are obtained, wheels of Routewise's packages are collected, and all of it is cut into parts of at
most ``--part-mib``, with a list of digests. ``visit.sh`` puts the parts together on the box.

    python benchmarks/h200/prepare.py --study config/studies/gpu-box.yaml --into results/visit
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

from routewise.errors import RoutewiseError, report_errors
from routewise.obtain import obtain_model
from routewise.plan import fetch_sources, plan_study
from routewise.study import read_study

ROOT = Path(__file__).resolve().parents[2]
#: What the box's Python is: wheels are asked for it, whatever Python runs here.
BOX = ("--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:")
PLATFORMS = ("2_28", "2_27", "2_24", "2_17")


def pinned(requirements: Path) -> list[str]:
    """Return the ``name==version`` lines of a requirements file with hashes."""
    lines = (line.rstrip(" \\") for line in requirements.read_text().splitlines())
    return [line.split(";")[0].strip() for line in lines if "==" in line and line[:1].isalnum()]


def collect_wheels(folder: Path, absent: set[str]) -> None:
    """Bring a wheel of each pinned package, but those in ``absent``; build the pure ones."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux_{v}_x86_64" for v in PLATFORMS]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    for wanted in pinned(ROOT / "requirements/requirements.txt"):
        name = wanted.split("==")[0].lower().replace("_", "-")
        stem = wanted.split("==")[0].replace("-", "_").lower() + "-"
        if name in absent or any(w.name.lower().startswith(stem) for w in folder.glob("*.whl")):
            continue
        pip = [sys.executable, "-m", "pip"]
        quiet = ["-q", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "download", *quiet, *BOX, *platforms, "-d", folder, wanted],
            capture_output=True,
            text=True,
        )
        if done.returncode:  # published as source only
            done = subprocess.run(
                [*pip, "wheel", *quiet, "-w", folder, wanted], capture_output=True, text=True
            )
        if done.returncode:
            raise RoutewiseError(f"no wheel of {wanted}:\n{done.stderr[-500:]}")
    for wheel in folder.glob("*-cp3*-linux_*.whl"):
        raise RoutewiseError(
            f"{wheel.name} was compiled for this machine's Python, not for the box's",
            f"name its package in --have if the box has it: {wheel.name.split('-')[0]}",
        )


def cut(archive: Path, folder: Path, part_bytes: int) -> list[Path]:
    """Cut a file into parts ``<name>.00``, ``.01``, …; return them."""
    parts: list[Path] = []
    with archive.open("rb") as source:
        while chunk := source.read(part_bytes):
            part = folder / f"{archive.name}.{len(parts):02}"
            part.write_bytes(chunk)
            parts.append(part)
    return parts


@report_errors
def main(study_path: Path, into: Path, have: Path | None, part_mib: int) -> None:
    """Obtain, pack and cut; print the parts."""
    study = read_study(study_path)
    results = ROOT / "results"
    fetch_sources(study, results)
    models = plan_study(study, results, ROOT).models
    absent = set(have.read_text().lower().split()) if have else set()
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob("*.tar.*"):
        old.unlink()
    collect_wheels(into / "wheels", absent)

    contents: dict[str, list[Path]] = {"base.tar.xz": [], "models.tar.gz": []}
    for name in study.sources:
        contents["base.tar.xz"] += results.joinpath("sources").glob(f"{name}-*")
    for plan in models.values():
        if plan.kind == "package":
            if not plan.document.is_file():
                obtain_model(plan)
            contents["models.tar.gz"] += [plan.path, plan.document]
    digests = []
    for name, paths in contents.items():
        archive = into / name
        with tarfile.open(archive, "w:xz" if name.endswith("xz") else "w:gz") as tar:
            for path in paths:
                tar.add(path, path.relative_to(ROOT))
            if name.startswith("base"):
                for wheel in sorted((into / "wheels").glob("*.whl")):
                    tar.add(wheel, Path("results/visit/wheels") / wheel.name)
        digests.append((hashlib.sha256(archive.read_bytes()).hexdigest(), name))
        for part in cut(archive, into, part_mib << 20):
            print(f"{part}: {part.stat().st_size / (1 << 20):.1f} MiB")
        archive.unlink()
    (into / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for digest, name in digests))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path, dest="study_path", required=True)
    parser.add_argument("--into", type=Path, default=ROOT / "results/visit")
    parser.add_argument("--have", type=Path, help="file of package names that the box has")
    parser.add_argument("--part-mib", type=int, default=45, help="size of a part (45)")
    raise SystemExit(main(**vars(parser.parse_args())))
