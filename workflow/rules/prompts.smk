# Turns each prompt set into token ids once, with the template and tokenizer of each model.
PROMPTS = {plan.digest: plan for plan in PLAN.prompts.values()}


rule tokenize_prompts:
    input:
        unpack(lambda w: model_inputs(w.model)),
        build=lambda w: build_file(PROMPTS[w.digest].build),
    output:
        str(RESULTS / "prompts" / "{digest}" / "{model}.{prompts}.parquet"),
    log:
        str(RESULTS / "logs" / "tokenize_prompts" / "{digest}.{model}.{prompts}.log"),
    params:
        # `output` keeps Snakemake from tracking it: prompts that moved are the same prompts
        file=lambda w, output: str(PROMPTS[w.digest].file),
        content=lambda w: PROMPTS[w.digest].content,
        context=lambda w: PROMPTS[w.digest].context,
        library_dir=lambda w, input: str(Path(input.build).parent / "lib"),
    resources:
        # what a host compiled runs on its kind
        **asked_of(lambda w: STUDY.build_resources(PROMPTS[w.digest].build)),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/tokenize_prompts.py --prompts {params.file:q} --model {input.model}"
        " --library-dir {params.library_dir} --context {params.context} --digest {params.content}"
        " --output {output} 2>&1 | tee {log}"
