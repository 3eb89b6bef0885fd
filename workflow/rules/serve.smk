# The serving sweeps: one job per server configuration starts it, asks it, and proves it gone; then
# routes are compared pair by pair, from their replies alone.
def serve_path(wildcards):
    """Return the path of the serving cell that the wildcards name."""
    name = f"{wildcards.sweep}.{wildcards.route}.{wildcards.model}.{wildcards.variant}.parquet"
    return f"{RESULTS}/cells/{wildcards.digest}/{name}"


def serve_of(wildcards):
    """Return the plan of the serving cell that the wildcards name."""
    return PLAN.serves[serve_path(wildcards)]


@at_hand
def serve_inputs(wildcards):
    """Return the files that a serving cell is measured from."""
    plan = serve_of(wildcards)
    inputs = {
        **model_inputs(plan.cell.model),
        "prompts": ancient(str(plan.prompts.path)),
    }
    if plan.build is not None:
        inputs["server"] = build_file(plan.build, "server")
    return inputs


@at_hand
def serve_arguments(wildcards, output):  # not tracked: see cell_arguments
    """Return what a serving job is told beside its files; a route without a build has no server."""
    plan = serve_of(wildcards)
    server = []
    if plan.build is not None:
        server = ["--server", os.path.dirname(build_file(plan.build, "server"))]
    return as_words(
        *("--cell", plan.document),
        *server,
        *("--code-digest", PLAN.code["measure_serving"]),
        *("--inputs", plan.inputs_json),
    )


rule measure_serving:
    input:
        unpack(serve_inputs),
    output:
        str(
            RESULTS
            / "cells"
            / "{digest}"
            / "{sweep}.{route}.{model}.{variant}.parquet"
        ),
    log:
        str(
            RESULTS
            / "logs"
            / "measure_serving"
            / "{digest}.{sweep}.{route}.{model}.{variant}.log"
        ),
    wildcard_constraints:
        sweep="repeat|batched|agree|dispatch",
        variant=one_of(plan.cell.variant for plan in PLAN.serves.values()),
    params:
        arguments=serve_arguments,
    threads: route_threads()
    resources:
        **asked_of(
            lambda w: STUDY.routes[w.route].resources,
            cell=serve_path,
            cells=PLAN.serves,
        ),
    conda:
        "../../envs/measure.yaml"
    priority: 1  # verdicts before prices
    shell:
        "python {SCRIPTS}/measure_serving.py {params.arguments} --model {input.model}"
        " --prompts {input.prompts} --store {RESULTS}/store --logs {RESULTS}/logs/servers"
        " --output {output} 2>&1 | tee {log}"


def agree_of(wildcards):
    """Return the plan of the comparison that the wildcards name."""
    name = f"agree.{wildcards.a}+{wildcards.b}.{wildcards.model}.{wildcards.variant}.parquet"
    return PLAN.agrees[f"{RESULTS}/cells/{wildcards.digest}/{name}"]


@at_hand
def agree_inputs(wildcards):
    """Return the cells of the two routes that are compared."""
    plan = agree_of(wildcards)
    return {"a": str(plan.a), "b": str(plan.b)}


@at_hand
def agree_arguments(wildcards, output):  # not tracked: see cell_arguments
    """Return what a comparison is told beside its files."""
    plan = agree_of(wildcards)
    return as_words(
        *("--cell", plan.document),
        *("--code-digest", PLAN.code["compare_routes"]),
        *("--inputs", plan.inputs_json),
    )


rule compare_routes:
    input:
        unpack(agree_inputs),
    output:
        str(RESULTS / "cells" / "{digest}" / "agree.{a}+{b}.{model}.{variant}.parquet"),
    log:
        str(
            RESULTS
            / "logs"
            / "compare_routes"
            / "{digest}.{a}+{b}.{model}.{variant}.log"
        ),
    wildcard_constraints:
        a=one_of(STUDY.routes),
        b=one_of(STUDY.routes),
        variant=r"w\d+",
    params:
        arguments=agree_arguments,
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/compare_routes.py {params.arguments} --a {input.a} --b {input.b}"
        " --output {output} > {log} 2>&1"
