# Compiles each build once: the engine that is measured in-process, the server of a route that
# serves, and the tools of a stock build.
ENGINES = {plan.engine_dir.name: plan for plan in PLAN.builds.values()}
TOOLS = {
    plan.tools_dir.name: plan for plan in PLAN.builds.values() if plan.patch is None
}
SERVERS = {
    PLAN.builds[plan.build].server_dir.name: PLAN.builds[plan.build]
    for plan in PLAN.serves.values()
    if plan.build is not None
}


def build_arguments(plan, part):
    """Return the command line of build_backend.py for one part of a build.

    Rules ask for it by functions of `output`, which Snakemake does not track: all that decides a
    build is in its path, and its name and what a scheduler is asked for decide nothing.
    """
    return [
        *("--name", plan.name),
        *("--build", canonical_json(STUDY.builds[plan.name])),
        *("--source", canonical_json(STUDY.sources[plan.source])),
        *("--part", part),
        *("--digest", plan.part_dir(part).name),
        *("--toolchain", canonical_json(plan.toolchain)),
    ]


rule build_engine:
    output:
        str(RESULTS / "builds" / "{engine}" / "build.json"),
    log:
        str(RESULTS / "logs" / "build_engine" / "{engine}.log"),
    params:
        arguments=lambda w, output: build_arguments(ENGINES[w.engine], "engine"),
    threads: whole_machine
    resources:
        **asked_of(lambda w: STUDY.build_resources(ENGINES[w.engine].name)),
    conda:
        "../../envs/build-cpu.yaml"
    shell:
        "python {SCRIPTS}/build_backend.py {params.arguments:q} --patches-dir {PATCHES}"
        " --results-dir {RESULTS} --jobs {threads} --log {log}"


rule build_tools:
    output:
        str(RESULTS / "builds" / "{tools}" / "build.json"),
    log:
        str(RESULTS / "logs" / "build_tools" / "{tools}.log"),
    params:
        arguments=lambda w, output: build_arguments(TOOLS[w.tools], "tools"),
    threads: whole_machine
    resources:
        **asked_of(lambda w: STUDY.build_resources(TOOLS[w.tools].name)),
    conda:
        "../../envs/build-cpu.yaml"
    shell:
        "python {SCRIPTS}/build_backend.py {params.arguments:q} --patches-dir {PATCHES}"
        " --results-dir {RESULTS} --jobs {threads} --log {log}"


rule build_server:
    output:
        str(RESULTS / "builds" / "{server}" / "build.json"),
    log:
        str(RESULTS / "logs" / "build_server" / "{server}.log"),
    params:
        arguments=lambda w, output: build_arguments(SERVERS[w.server], "server"),
    threads: whole_machine
    resources:
        **asked_of(lambda w: STUDY.build_resources(SERVERS[w.server].name)),
    conda:
        "../../envs/build-cpu.yaml"
    shell:
        "python {SCRIPTS}/build_backend.py {params.arguments:q} --patches-dir {PATCHES}"
        " --results-dir {RESULTS} --jobs {threads} --log {log}"
