# From cells to tables, from tables to the receipt and the figures: nothing but Parquet is read.
FOLDER = PLAN.folder
RECEIPT = str(FOLDER / "receipt.json")
RECEIPT_MARKDOWN = str(FOLDER / "receipt.md")
TABLES = {
    name: str(FOLDER / "tables" / f"{name}.parquet")
    for name in ("cells", "replay", "plain", "cost", "replies", "agree", "dispatch")
}
#: The table that each figure is drawn from, and the sweep that fills it.
DRAWN_FROM = {
    "delta_by_position": ("replay", "replay"),
    "flips_and_margins": ("replay", "replay"),
    "price_by_width": ("cost", "cost"),
    "states_by_width": ("replies", "batched"),
    "solo_token_kept": ("replies", "batched"),
    "agree_dlogp": ("agree", "agree"),
}
FIGURE_NAMES = [
    name for name, (_, sweep) in DRAWN_FROM.items() if sweep in STUDY.sweeps
]
FIGURES = [
    str(FOLDER / "figures" / f"{name}.{suffix}")
    for name in FIGURE_NAMES
    for suffix in ("svg", "png")
]


rule build_tables:
    input:
        PLAN.cell_paths(),
    output:
        **TABLES,
    log:
        str(RESULTS / "logs" / "build_tables" / f"{STUDY.name}.log"),
    params:
        study=lambda w: study_json(STUDY),  # as a function: commands hold braces
        folder=str(FOLDER / "tables"),
        cells=str(PLAN.cell_list),  # thousands of paths are no command line
        code=PLAN.code["build_tables"],
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/build_tables.py --study {params.study:q} --tables {params.folder}"
        " @{params.cells} > {log} 2>&1"


# Seconds of work, and of explain the answer that is waited for: no jobs of a cluster.
localrules:
    write_receipt,
    draw_figure,
    check,
    explain,


rule write_receipt:
    input:
        **TABLES,
    output:
        json=RECEIPT,
        markdown=RECEIPT_MARKDOWN,
    log:
        str(RESULTS / "logs" / "write_receipt" / f"{STUDY.name}.log"),
    params:
        folder=str(FOLDER / "tables"),
        cells=str(PLAN.cell_list),  # of other cells it is another receipt, whatever the dates say
        code=PLAN.code["write_receipt"],
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/write_receipt.py --tables {params.folder} --json {output.json}"
        " --markdown {output.markdown} --history {RESULTS}/receipts > {log} 2>&1"


rule draw_figure:
    input:
        lambda w: TABLES[DRAWN_FROM[w.figure][0]],
    output:
        svg=str(FOLDER / "figures" / "{figure}.svg"),
        png=str(FOLDER / "figures" / "{figure}.png"),
    log:
        str(RESULTS / "logs" / "draw_figure" / f"{STUDY.name}.{{figure}}.log"),
    wildcard_constraints:
        figure=one_of(FIGURE_NAMES),
    params:
        cells=str(PLAN.cell_list),
        code=PLAN.code["draw_figure"],
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/draw_figure.py --name {wildcards.figure} --table {input}"
        " --svg {output.svg} --png {output.png} > {log} 2>&1"


rule check:
    input:
        receipt=RECEIPT,
        tables=TABLES.values(),
        cells=PLAN.cell_paths(),
    log:
        str(RESULTS / "logs" / "check" / f"{STUDY.name}.log"),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/check_study.py --receipt {input.receipt} 2>&1 | tee {log}"


rule explain:
    log:
        str(RESULTS / "logs" / "explain" / f"{STUDY.name}.log"),
    params:
        study=lambda w: canonical_json(STUDY.document),
        root=os.path.relpath(ROOT),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/explain_plan.py --study {params.study:q} --results-dir {RESULTS}"
        " --root {params.root} 2>&1 | tee {log}"
