# From cells to tables, from tables to the receipt and the figures: nothing but Parquet is read.
FOLDER = PLAN.folder
RECEIPT = str(FOLDER / "receipt.json")
RECEIPT_MARKDOWN = str(FOLDER / "receipt.md")
TABLES = {
    name: str(FOLDER / "tables" / f"{name}.parquet")
    for name in ("cells", "replay", "plain", "cost")
}
FIGURE_NAMES = [
    *(["delta_by_position", "flips_and_margins"] if STUDY.replay else []),
    *(["price_by_width"] if STUDY.cost else []),
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
        study=study_json(STUDY),
        folder=str(FOLDER / "tables"),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/build_tables.py --study {params.study:q} --tables {params.folder}"
        " {input} > {log} 2>&1"


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
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/write_receipt.py --tables {params.folder} --json {output.json}"
        " --markdown {output.markdown} > {log} 2>&1"


rule draw_delta_by_position:
    input:
        TABLES["replay"],
    output:
        svg=str(FOLDER / "figures" / "delta_by_position.svg"),
        png=str(FOLDER / "figures" / "delta_by_position.png"),
    log:
        str(RESULTS / "logs" / "draw_delta_by_position" / f"{STUDY.name}.log"),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/draw_delta_by_position.py --replay {input} --svg {output.svg}"
        " --png {output.png} > {log} 2>&1"


rule draw_flips_and_margins:
    input:
        TABLES["replay"],
    output:
        svg=str(FOLDER / "figures" / "flips_and_margins.svg"),
        png=str(FOLDER / "figures" / "flips_and_margins.png"),
    log:
        str(RESULTS / "logs" / "draw_flips_and_margins" / f"{STUDY.name}.log"),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/draw_flips_and_margins.py --replay {input} --svg {output.svg}"
        " --png {output.png} > {log} 2>&1"


rule draw_price_by_width:
    input:
        TABLES["cost"],
    output:
        svg=str(FOLDER / "figures" / "price_by_width.svg"),
        png=str(FOLDER / "figures" / "price_by_width.png"),
    log:
        str(RESULTS / "logs" / "draw_price_by_width" / f"{STUDY.name}.log"),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/draw_price_by_width.py --cost {input} --svg {output.svg}"
        " --png {output.png} > {log} 2>&1"


rule check:
    input:
        RECEIPT,
    log:
        str(RESULTS / "logs" / "check" / f"{STUDY.name}.log"),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/check_study.py --receipt {input} 2>&1 | tee {log}"
