# Reads, checks and plans the study before any rule is made, and pins wildcards to its names.
import contextlib
import functools
import gc
import inspect
import os
import shlex
import sys
from pathlib import Path

from snakemake.cli import parse_args
from snakemake.exceptions import WorkflowError

from routewise import watch
from routewise.dates import pull_back
from routewise.device import TRUSTED, identify_device, missing_devices
from routewise.digest import canonical_json
from routewise.errors import RoutewiseError, not_allowed
from routewise.machine import describe_machine
from routewise.one_build import other_host_sentence
from routewise.plan import (
    FROZEN_PLAN,
    fetch_sources,
    freeze_plan,
    plan_study,
    study_json,
    thaw_plan,
    write_cell_list,
)
from routewise.progress import duration
from routewise.results_format import check_format, mark_format, say_older
from routewise.runs import begin_run, check_open, other_runs
from routewise.run_view import Job, job_name
from routewise.study import check_study, read_yaml
from routewise.takeover import take_over

ROOT = Path(workflow.basedir)
SCRIPTS = os.path.relpath(ROOT / "workflow" / "scripts")
PATCHES = os.path.relpath(ROOT / "patches")
RESULTS = Path("results")
#: Cores that a build asks a scheduler for, where no profile sets its threads.
CLUSTER_CORES = 8
#: Resources that Snakemake counts or converts: no value is no answer.
COUNTED = ("mem_mb", "runtime")


def planned():
    """Return the plan of the configured study; a user's mistake ends here, with a message.

    A job on another host, whose compilers are others, does what was planned where it was submitted.
    """
    try:
        if not workflow.is_main_process and (plan := thaw_plan()):
            return plan
        if workflow.is_main_process:
            check_open()
        # before anything is fetched or planned
        check_format(RESULTS)
        for file in workflow.configfiles:
            read_yaml(Path(file))  # a key that stands twice is seen only in the file
        study = check_study(config, " + ".join(map(str, workflow.configfiles)))
        fetch_sources(study, RESULTS)
        return plan_study(study, RESULTS, ROOT)
    except RoutewiseError as error:
        raise WorkflowError(str(error)) from None
    except PermissionError as error:
        raise WorkflowError(str(not_allowed(error))) from None


def look_round():
    """Say what a person should know before a run: who else runs here, and what results are old."""
    take_over()
    for other in other_runs():
        works = "works" if other.certain else "may work"
        print(
            f"routewise: another run {works} in this folder: {other.who()}. What it makes is"
            f" not made twice: {other.advice()}. Never use --unlock meanwhile. A dry run, `explain`"
            " and `python -m routewise` do not disturb it",
            file=sys.stderr,
        )
    if told := say_older(RESULTS):
        print(f"routewise: {told}", file=sys.stderr)


def one_of(names):
    """Return a wildcard constraint that admits these names only, and none where there are none."""
    return "|".join(sorted({re.escape(str(name)) for name in names})) or "(?!)"


def at_hand(function):
    """Return a function for rules whose signature need not be worked out.

    Snakemake asks each function for it several times a job, which is a tenth of a large plan.
    """
    function.__signature__ = inspect.signature(function)
    return function


def as_words(*arguments):
    """Return arguments as one parameter, quoted for the shell.

    Snakemake makes the command of each job three times, and takes its time for each field.
    """
    return shlex.join(arguments)


@functools.cache
def model_inputs(model):
    """Return a model's GGUF and its record as inputs.

    Their dates do not count: the path holds a digest of the content, the GGUF may be a link to a
    user's own file, which is touched or copied back at any time, and the clocks of two hosts
    differ. So it is with builds and prompts. Of cells the dates count: what is measured again may
    have other rows.
    """
    plan = PLAN.models[model]
    return {"model": ancient(str(plan.path)), "record": ancient(str(plan.document))}


@functools.cache
def build_file(build, part="engine"):
    """Return the build.json of a part of a build as an input; its date does not count either."""
    return ancient(str(PLAN.builds[build].part_dir(part) / "build.json"))


def route_threads():
    """Return the threads of a rule's jobs: one number where all routes have the same."""
    numbers = {route.settings.threads for route in STUDY.routes.values()}
    if len(numbers) == 1:
        return numbers.pop()
    return at_hand(lambda wildcards: STUDY.routes[wildcards.route].settings.threads)


@functools.cache
def meant_for_cluster():
    """Say whether command and profile ask for a scheduler; a dry run forgets that they do."""
    _, arguments = parse_args(sys.argv[1:])
    return arguments.executor not in (None, "local", "dryrun", "touch")


def on_cluster():
    """Say whether jobs go to a scheduler, or would; it is asked for what a host has."""
    return workflow.non_local_exec or (workflow.dryrun and meant_for_cluster())


def whole_machine(wildcards):
    """Return the cores of a job that takes the machine; of a cluster's host a profile says more.

    Nobody here knows how many cores the host will have.
    """
    if on_cluster() or workflow.remote_exec:
        return CLUSTER_CORES
    return workflow.cores


def default_resource(name):
    """Return what a profile asks for by default; without one 0 of what is counted, else None.

    A rule that names a resource loses Snakemake's own default of it, and one that is counted has to
    have a number.
    """
    given = workflow.resource_settings.default_resources
    text = dict(pair.split("=", 1) for pair in getattr(given, "args", [])).get(name, "")
    text = text.strip("'\"")
    if text.isdigit():
        return int(text)
    if name in COUNTED and text:
        raise WorkflowError(
            f"default-resources: {name} is {text!r}, wanted a number, since hosts of the study name"
            f" {name} too\n  try: {name}=8000, and what a host needs of it under hosts in the study"
        )
    if name in COUNTED:
        return 0
    return text or None


def asked_of(find, cell=None, cells=()):
    """Return the resources of a rule: ``find(wildcards)`` says what a scheduler is asked for.

    ``cell(wildcards)`` is the path of the rule's cell, one of ``cells``. The devices that its job
    claims are counted, so that no job of this machine is started only to wait; what decides is the
    claim. A scheduler that is asked for devices by ``gres`` is not asked for them by number too.
    """
    counted = {name for path in cells for name in PLAN.counted(path)}

    def value(name, wildcards):
        found = find(wildcards) if on_cluster() else {}
        if name in found:
            return found[name]
        if name not in counted:
            return default_resource(name)
        return 0 if "gres" in found else PLAN.counted(cell(wildcards)).get(name, 0)

    names = {name for host in STUDY.hosts.values() for name in host}
    for entry in (
        *STUDY.document["builds"].values(),
        *STUDY.document["routes"].values(),
    ):
        names |= set(entry.get("resources", {}))
    return {
        name: at_hand(lambda wildcards, name=name: value(name, wildcards))
        for name in sorted(names | counted)
    }


def missing_here():
    """Return an error for each device that this machine lacks, with something left to measure."""
    wanted = PLAN.devices_wanted()
    return [
        RoutewiseError(
            f"this machine has no {device} device (looked for {sought}), and routes of the study"
            f" run on it: {', '.join(sorted(wanted[device]))}",
            "run the study where the device is, or leave the routes out; where it is there unseen,"
            f" say so: {TRUSTED}={device}",
        )
        for device, sought in missing_devices(wanted).items()
    ]


def announce_jobs():
    """Tell the progress line, where there is one, what the run will make."""
    lines = [
        handler
        for handler in workflow.logger_manager.get_log_handlers()
        if hasattr(handler, "expect_jobs")
    ]
    if not lines:
        return
    dag, names = workflow.dag, PLAN.job_names()
    needed = set(dag.needrun_jobs())

    def described(job):
        path = str(next(iter(job.output), ""))
        return Job(
            dag.jobid(job),
            job.rule.name,
            names.get(path) or job_name(job.rule.name, job.wildcards_dict),
            devices=PLAN.counted(path),
            claims=tuple(claim.device for _, claim in PLAN.claims_of(path)),
            after=tuple(
                dag.jobid(other) for other in dag.dependencies[job] if other in needed
            ),
        )

    jobs = [described(job) for job in needed]
    for line in lines:
        line.expect_jobs(jobs)


def begin():
    """Say in the folder who makes what from now on; stop where somebody makes it already."""
    outputs = {str(file) for job in workflow.dag.needrun_jobs() for file in job.output}
    if not outputs:
        return
    try:
        begin_run(STUDY.name, outputs)
        write_cell_list(PLAN)
        mark_format(RESULTS)
        mend_dates()
    except RoutewiseError as error:
        raise WorkflowError(str(error)) from None
    except PermissionError as error:
        raise WorkflowError(str(not_allowed(error))) from None


def mend_dates():
    """Date files of this study that lie ahead of this host's clock to now, and say so."""
    files = {
        Path(str(file))
        for job in workflow.dag.jobs
        for file in (*job.input, *job.output)
    }
    if ahead := pull_back(files):
        farthest = max(ahead, key=ahead.get)
        print(
            f"routewise: {len(ahead)} files were dated ahead of this host's clock, {farthest} by"
            f" {duration(ahead[farthest])}: dated to now. Their contents are known by digest; see"
            " to the clocks of the hosts that write here",
            file=sys.stderr,
        )


def other_hosts():
    """Return a sentence for each route that another host or driver has begun to measure."""
    files = {}
    for path, plan in (*PLAN.cells.items(), *PLAN.serves.items()):
        files.setdefault((plan.cell.route, path in PLAN.serves), []).append(Path(path))
    for path, plan in PLAN.costs.items():
        for arm in plan.cell.arms:
            files.setdefault((arm.route, False), []).append(Path(path))
    found = []
    for (route, _), paths in files.items():
        if STUDY.routes[route].kind == "endpoint":
            continue  # it runs anywhere
        device = STUDY.routes[route].serving.device

        def here(device=device):
            return {
                "machine": describe_machine(),
                "device": identify_device(device),
            }

        found.append(other_host_sentence(route, paths, here))
    return [sentence for sentence in found if sentence]


def before_jobs():
    """Do what must be done before the first job of a run, and stop a run that cannot be made.

    Only now does Snakemake say where jobs go. A scheduler sends them to hosts that have the
    devices, where each looks for its own and does what was planned here.
    """
    if on_cluster():
        os.environ[FROZEN_PLAN] = str(freeze_plan(PLAN))
        made = {str(file) for job in workflow.dag.needrun_jobs() for file in job.output}
        for name in PLAN.builds_without_host(made):
            print(
                f"routewise: warning: build {name} names no `host`: it can be compiled only where"
                " compiler and CPU are those of this host (docs/cluster.md)",
                file=sys.stderr,
            )
    elif any(job.rule.name != "explain" for job in workflow.dag.targetjobs):
        for error in missing_here():
            raise WorkflowError(str(error))
        for sentence in other_hosts():
            print(f"routewise: warning: {sentence}", file=sys.stderr)
    begin()
    announce_jobs()


gc.disable()
PLAN = planned()
gc.freeze()  # the plan stays: what collects garbage need not walk through it again and again
gc.enable()
if workflow.is_main_process:
    look_round()
    with contextlib.suppress(PermissionError):  # a look at somebody else's folder
        write_cell_list(PLAN)
    for error in missing_here():
        if not meant_for_cluster():
            print(f"routewise: warning: {error.problem}", file=sys.stderr)
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
