# The replay sweep: the plain arm of each (route, model), then one cell per width and shape.
def cell_of(path):
    """Return the plan of a replay cell by its path."""
    return PLAN.cells[str(path)]


def cell_path(wildcards, variant):
    """Return the path of the replay cell that the wildcards name."""
    name = f"replay.{wildcards.route}.{wildcards.model}.{variant}.parquet"
    return str(RESULTS / "cells" / wildcards.digest / name)


def cell_inputs(wildcards, variant):
    """Return the files that a replay cell is measured from."""
    planned_cell = cell_of(cell_path(wildcards, variant))
    inputs = {
        "build": str(PLAN.builds[planned_cell.build].engine_dir / "build.json"),
        **model_inputs(planned_cell.cell.model),
        "prompts": str(planned_cell.prompts.path),
    }
    return inputs | ({"plain": str(planned_cell.plain)} if planned_cell.plain else {})


rule measure_plain:
    input:
        unpack(lambda w: cell_inputs(w, "plain")),
    output:
        str(RESULTS / "cells" / "{digest}" / "replay.{route}.{model}.plain.parquet"),
    log:
        str(RESULTS / "logs" / "measure_plain" / "{digest}.{route}.{model}.log"),
    params:
        cell=lambda w: cell_of(cell_path(w, "plain")).document,
        build=lambda w, input: str(Path(input.build).parent),
        code=PLAN.code["measure_replay"],
        inputs=lambda w: canonical_json(cell_of(cell_path(w, "plain")).inputs),
    threads: lambda w: STUDY.routes[w.route].settings.threads
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
        "python {SCRIPTS}/measure_replay.py --cell {params.cell:q} --build {params.build}"
        " --model {input.model} --prompts {input.prompts} --store {RESULTS}/store"
        " --code-digest {params.code} --inputs {params.inputs:q} --output {output}"
        " 2>&1 | tee {log}"


rule measure_replay:
    input:
        unpack(lambda w: cell_inputs(w, w.variant)),
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
        cell=lambda w: cell_of(cell_path(w, w.variant)).document,
        build=lambda w, input: str(Path(input.build).parent),
        code=PLAN.code["measure_replay"],
        inputs=lambda w: canonical_json(cell_of(cell_path(w, w.variant)).inputs),
    threads: lambda w: STUDY.routes[w.route].settings.threads
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
        "python {SCRIPTS}/measure_replay.py --cell {params.cell:q} --build {params.build}"
        " --model {input.model} --prompts {input.prompts} --plain {input.plain}"
        " --store {RESULTS}/store --code-digest {params.code} --inputs {params.inputs:q}"
        " --output {output} 2>&1 | tee {log}"
