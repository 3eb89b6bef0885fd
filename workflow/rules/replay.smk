# The replay sweep: the plain arm of each (route, model), then one cell per width and shape.
def cell_path(wildcards, variant):
    """Return the path of the replay cell that the wildcards name."""
    name = f"replay.{wildcards.route}.{wildcards.model}.{variant}.parquet"
    return f"{RESULTS}/cells/{wildcards.digest}/{name}"


def cell_of(wildcards):
    """Return the plan of the replay cell that the wildcards name; without a variant, the plain."""
    return PLAN.cells[cell_path(wildcards, wildcards.get("variant", "plain"))]


@at_hand
def cell_inputs(wildcards):
    """Return the files that a replay cell is measured from."""
    planned = cell_of(wildcards)
    inputs = {
        "build": build_file(planned.build),
        **model_inputs(planned.cell.model),
        "prompts": ancient(str(planned.prompts.path)),
    }
    return inputs | ({"plain": str(planned.plain)} if planned.plain else {})


@at_hand
def cell_arguments(wildcards, output):
    """Return what a replay is told beside its files.

    `output` keeps Snakemake from tracking it: what decides a cell is in its path, and how long its
    job waits for a device decides nothing.
    """
    planned = cell_of(wildcards)
    return as_words(
        *("--cell", planned.document),
        *("--build", os.path.dirname(build_file(planned.build))),
        *("--code-digest", PLAN.code["measure_replay"]),
        *("--inputs", planned.inputs_json),
    )


rule measure_plain:
    input:
        unpack(cell_inputs),
    output:
        str(RESULTS / "cells" / "{digest}" / "replay.{route}.{model}.plain.parquet"),
    log:
        str(RESULTS / "logs" / "measure_plain" / "{digest}.{route}.{model}.log"),
    params:
        arguments=cell_arguments,
    threads: route_threads()
    resources:
        **asked_of(
            lambda w: STUDY.routes[w.route].resources,
            cell=lambda w: cell_path(w, "plain"),
            cells=PLAN.cells,
        ),
    conda:
        "../../envs/measure.yaml"
    priority: 1  # verdicts before prices
    shell:
        "python {SCRIPTS}/measure_replay.py {params.arguments} --model {input.model}"
        " --prompts {input.prompts} --store {RESULTS}/store --output {output} 2>&1 | tee {log}"


rule measure_replay:
    input:
        unpack(cell_inputs),
    output:
        str(RESULTS / "cells" / "{digest}" / "replay.{route}.{model}.{variant}.parquet"),
    log:
        str(
            RESULTS
            / "logs"
            / "measure_replay"
            / "{digest}.{route}.{model}.{variant}.log"
        ),
    params:
        arguments=cell_arguments,
    threads: route_threads()
    resources:
        **asked_of(
            lambda w: STUDY.routes[w.route].resources,
            cell=lambda w: cell_path(w, w.variant),
            cells=PLAN.cells,
        ),
    conda:
        "../../envs/measure.yaml"
    priority: 1  # verdicts before prices
    shell:
        "python {SCRIPTS}/measure_replay.py {params.arguments} --model {input.model}"
        " --prompts {input.prompts} --plain {input.plain} --store {RESULTS}/store"
        " --output {output} 2>&1 | tee {log}"
