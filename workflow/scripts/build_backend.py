"""Compile one part of a build: the engine (ggml, backend, libllama, shim), llama-server or tools.

Writes ``lib/`` (and ``bin/`` for programs) and ``build.json`` into results/builds/<digest12>.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from routewise.build import PARTS, BuildSpec, plan_build, run_build
from routewise.digest import DigestCache
from routewise.errors import RoutewiseError, report_errors
from routewise.patch import load_patch
from routewise.source import SourceSpec, fetch_source
from routewise.watch import end_with_snakemake


@report_errors
def main(
    name: str,
    build: str,
    source: str,
    part: str,
    digest: str | None,
    toolchain: str | None,
    patches_dir: Path,
    results_dir: Path,
    log: Path | None,
    jobs: int | None,
) -> None:
    """Build ``part`` of build ``name``; ``build`` and ``source`` are study entries as JSON.

    With ``digest`` (its first characters are enough) the build must still be the planned one;
    ``toolchain``, the planned one as JSON, tells another host from an edit.
    """
    spec = BuildSpec.from_config(name, json.loads(build))
    source_spec = SourceSpec.from_config(spec.source, json.loads(source))
    root = fetch_source(spec.source, source_spec, results_dir, say=_say)
    patch = load_patch(spec.patch, patches_dir) if spec.patch else None
    cache = DigestCache(results_dir / ".cache" / "digests.json")
    plan = plan_build(name, spec, root, results_dir, patch=patch, cache=cache)
    cache.save()
    if digest and not plan.part_digest(part).startswith(digest):
        if toolchain and (other := _differences(json.loads(toolchain), plan.toolchain)):
            raise RoutewiseError(
                f"build {name}: this host has another compiler or CPU than the one that planned it"
                f" ({other})",
                "name the kind of host that compiles it: a `host` of the build (docs/cluster.md); "
                "where the compiler here was changed, run the same command again",
            )
        raise RoutewiseError(
            f"build {name}: planned as {digest}, its source is now {plan.part_digest(part)[:12]}",
            "the source or the patch was edited after planning: run the same command again",
        )
    document = run_build(plan, part, log=log, jobs=jobs)
    _say(
        f"build {name}: {plan.part_dir(part)}, {document['n_compiled']} files compiled in "
        f"{document['build_s']:.0f} s, fingerprint {document['fingerprint'][:12]}"
    )


def _differences(planned: Mapping[str, str], here: Mapping[str, str]) -> str:
    return "; ".join(
        f"{name}: planned with {planned.get(name)}, here {here.get(name)}"
        for name in sorted({*planned, *here})
        if planned.get(name) != here.get(name)
    )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--build", required=True, help="the build's entry in the study, as JSON")
    parser.add_argument("--source", required=True, help="its source's entry, as JSON")
    parser.add_argument("--part", choices=sorted(PARTS), default="engine")
    parser.add_argument("--digest", help="of the part, as planned")
    parser.add_argument("--toolchain", help="compilers and CPU, as planned, as JSON")
    parser.add_argument("--patches-dir", type=Path, default=Path("patches"))
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    parser.add_argument("--log", type=Path)
    parser.add_argument("--jobs", type=int, help="compilers at once (all cores by default)")
    end_with_snakemake()
    sys.exit(main(**vars(parser.parse_args())))
