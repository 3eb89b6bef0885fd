# The cost sweep: one job per model, its routes interleaved; it takes all cores for itself.
def cost_path(wildcards):
    """Return the path of the cost cell that the wildcards name."""
    return str(RESULTS / "cells" / wildcards.digest / f"cost.{wildcards.model}.parquet")


def cost_of(wildcards):
    """Return the plan of the cost cell that the wildcards name."""
    return PLAN.costs[cost_path(wildcards)]


rule measure_cost:
    input:
        unpack(lambda w: model_inputs(w.model)),
        builds=lambda w: [build_file(build) for build in cost_of(w).builds],
    output:
        str(RESULTS / "cells" / "{digest}" / "cost.{model}.parquet"),
    log:
        str(RESULTS / "logs" / "measure_cost" / "{digest}.{model}.log"),
    params:
        # `output` keeps Snakemake from tracking them: what decides a cell is in its path
        cell=lambda w, output: cost_of(w).document,
        code=lambda w, output: PLAN.code["measure_cost"],
        inputs=lambda w, output: cost_of(w).inputs_json,
    threads: whole_machine
    resources:
        # its routes are measured in one job: on the host of the first of them
        **asked_of(
            lambda w: STUDY.routes[cost_of(w).cell.arms[0].route].resources,
            cell=cost_path,
            cells=PLAN.costs,
        ),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/measure_cost.py --cell {params.cell:q} --model {input.model}"
        " --code-digest {params.code} --inputs {params.inputs:q} --output {output}"
        " 2>&1 | tee {log}"
