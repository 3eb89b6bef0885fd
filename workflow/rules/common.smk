# Reads, checks and plans the study before any rule is made, and pins wildcards to its names.
import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from routewise import watch
from routewise.digest import canonical_json
from routewise.errors import RoutewiseError
from routewise.plan import fetch_sources, plan_study, study_json
from routewise.study import check_study, read_yaml
from routewise.takeover import take_over

ROOT = Path(workflow.basedir)
SCRIPTS = os.path.relpath(ROOT / "workflow" / "scripts")
PATCHES = os.path.relpath(ROOT / "patches")
RESULTS = Path("results")


def planned():
    """Return the plan of the configured study; a user's mistake ends here, with a message."""
    try:
        for file in workflow.configfiles:
            read_yaml(Path(file))  # a key that stands twice is seen only in the file
        study = check_study(config, " + ".join(map(str, workflow.configfiles)))
        fetch_sources(study, RESULTS)
        return plan_study(study, RESULTS, ROOT)
    except RoutewiseError as error:
        raise WorkflowError(str(error)) from None


def one_of(names):
    """Return a wildcard constraint that admits these names only, and none where there are none."""
    return "|".join(sorted({re.escape(str(name)) for name in names})) or "(?!)"


def model_inputs(model):
    """Return a model's GGUF and its record as inputs.

    The date of the GGUF does not count: its path holds a digest of its content, and it may be a
    link to a user's own file, which is touched or copied back at any time. The record is written
    once, with it.
    """
    plan = PLAN.models[model]
    return {"model": ancient(str(plan.path)), "record": str(plan.document)}


take_over()
PLAN = planned()
STUDY = PLAN.study

# jobs use this interpreter, and CMake and ninja beside it; and they end when this process does
os.environ["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ["PATH"]]
)
os.environ["PYTHONUNBUFFERED"] = "1"
watch.announce()


wildcard_constraints:
    engine=one_of(plan.engine_dir.name for plan in PLAN.builds.values()),
    tools=one_of(
        plan.tools_dir.name for plan in PLAN.builds.values() if plan.patch is None
    ),
    server=one_of(
        PLAN.builds[plan.build].server_dir.name
        for plan in PLAN.serves.values()
        if plan.build is not None
    ),
    key=one_of(plan.key[:12] for plan in PLAN.models.values()),
    model=one_of(STUDY.models),
    prompts=one_of(STUDY.prompts),
    route=one_of(STUDY.routes),
    variant=one_of(STUDY.replay_variants()),
    digest=r"[0-9a-f]{16}",
    study=one_of([STUDY.name]),
