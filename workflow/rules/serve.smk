# The serving sweeps: one job per server configuration starts it, asks it, and proves it gone; then
# routes are compared pair by pair, from their replies alone.
def serve_path(wildcards):
    """Return the path of the serving cell that the wildcards name."""
    name = f"{wildcards.sweep}.{wildcards.route}.{wildcards.model}.{wildcards.variant}.parquet"
    return str(RESULTS / "cells" / wildcards.digest / name)


def serve_of(wildcards):
    """Return the plan of the serving cell that the wildcards name."""
    return PLAN.serves[serve_path(wildcards)]


def serve_inputs(wildcards):
    """Return the files that a serving cell is measured from."""
    plan = serve_of(wildcards)
    inputs = {**model_inputs(plan.cell.model), "prompts": str(plan.prompts.path)}
    if plan.build is not None:
        inputs["server"] = str(PLAN.builds[plan.build].server_dir / "build.json")
    return inputs


def server_argument(wildcards):
    """Return the option that names a build's server; empty for a route without a build."""
    plan = serve_of(wildcards)
    return (
        "" if plan.build is None else f"--server {PLAN.builds[plan.build].server_dir}"
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
        cell=lambda w: serve_of(w).document,
        server=server_argument,
        code=PLAN.code["measure_serving"],
        inputs=lambda w: canonical_json(serve_of(w).inputs),
    threads: lambda w: STUDY.routes[w.route].settings.threads
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
        "python {SCRIPTS}/measure_serving.py --cell {params.cell:q} {params.server}"
        " --model {input.model} --prompts {input.prompts} --store {RESULTS}/store"
        " --logs {RESULTS}/logs/servers --code-digest {params.code}"
        " --inputs {params.inputs:q} --output {output} 2>&1 | tee {log}"


def agree_of(wildcards):
    """Return the plan of the comparison that the wildcards name."""
    name = f"agree.{wildcards.a}+{wildcards.b}.{wildcards.model}.{wildcards.variant}.parquet"
    return PLAN.agrees[str(RESULTS / "cells" / wildcards.digest / name)]


rule compare_routes:
    input:
        a=lambda w: str(agree_of(w).a),
        b=lambda w: str(agree_of(w).b),
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
        cell=lambda w: agree_of(w).document,
        code=PLAN.code["compare_routes"],
        inputs=lambda w: canonical_json(agree_of(w).inputs),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/compare_routes.py --cell {params.cell:q} --a {input.a} --b {input.b}"
        " --code-digest {params.code} --inputs {params.inputs:q} --output {output} > {log} 2>&1"
