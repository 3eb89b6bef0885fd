# The serving sweeps: one job per server configuration starts it, asks it, and proves it gone; then
# routes are compared pair by pair, from their replies alone.
GPU_DEVICES = ("cuda", "hip", "hrx", "vulkan")


def serve_of(wildcards):
    """Return the plan of the serving cell that the wildcards name."""
    name = f"{wildcards.sweep}.{wildcards.route}.{wildcards.model}.{wildcards.variant}.parquet"
    return PLAN.serves[str(RESULTS / "cells" / wildcards.digest / name)]


def claims_one_of(wildcards, devices):
    """Return 1 where the route claims one of these devices for itself, else 0."""
    serving = STUDY.routes[wildcards.route].serving
    return int(serving.claim is not None and serving.device in devices)


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
        # counted, so that no job is started only to wait; what decides is the claim
        **asked_of(
            lambda w: STUDY.routes[w.route].resources,
            counted={
                "gpu": lambda w: claims_one_of(w, GPU_DEVICES),
                "npu": lambda w: claims_one_of(w, ("npu",)),
                "cpu_claim": lambda w: claims_one_of(w, ("cpu",)),
            },
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
