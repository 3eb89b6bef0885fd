# Turns each prompt set into token ids once, with the template and tokenizer of each model.
PROMPTS = {plan.digest: plan for plan in PLAN.prompts.values()}


rule tokenize_prompts:
    input:
        model=lambda w: str(PLAN.models[w.model].path),
        build=lambda w: str(
            PLAN.builds[PROMPTS[w.digest].build].engine_dir / "build.json"
        ),
    output:
        str(RESULTS / "prompts" / "{digest}" / "{model}.{prompts}.parquet"),
    log:
        str(RESULTS / "logs" / "tokenize_prompts" / "{digest}.{model}.{prompts}.log"),
    conda:
        "../../envs/measure.yaml"
    params:
        file=lambda w: str(PROMPTS[w.digest].file),
        context=lambda w: PROMPTS[w.digest].context,
        library_dir=lambda w, input: str(Path(input.build).parent / "lib"),
    shell:
        "python {SCRIPTS}/tokenize_prompts.py --prompts {params.file:q} --model {input.model}"
        " --library-dir {params.library_dir} --context {params.context} --output {output}"
        " 2>&1 | tee {log}"
