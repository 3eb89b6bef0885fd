# Brings or derives each model: one GGUF and its record (JSON) beside it.
OBTAINED = {plan.name: plan for plan in PLAN.models.values() if plan.kind != "quantize"}
QUANTIZED = {
    plan.name: plan for plan in PLAN.models.values() if plan.kind == "quantize"
}


def tools_of(model):
    """Return the build.json of the tools that a quantized model is made with."""
    build = STUDY.models[model]["build"]
    return str(PLAN.builds[build].tools_dir / "build.json")


# Hosts of a cluster often have no way out.
localrules:
    obtain_model,


rule obtain_model:
    output:
        gguf=str(RESULTS / "models" / "{key}" / "{model}.gguf"),
        record=str(RESULTS / "models" / "{key}" / "{model}.json"),
    log:
        str(RESULTS / "logs" / "obtain_model" / "{key}.{model}.log"),
    wildcard_constraints:
        model=one_of(OBTAINED),
    params:
        key=lambda w: OBTAINED[w.model].key,
        kind=lambda w: OBTAINED[w.model].kind,
        # `output` keeps Snakemake from tracking it: a model that moved is the same model
        origin=lambda w, output: canonical_json(OBTAINED[w.model].origin),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/obtain_model.py --name {wildcards.model} --key {params.key}"
        " --kind {params.kind} --origin {params.origin:q} --output {output.gguf} --log {log}"


rule quantize_model:
    input:
        unpack(lambda w: model_inputs(STUDY.models[w.model]["from"])),
        tools=lambda w: ancient(tools_of(w.model)),
    output:
        gguf=str(RESULTS / "models" / "{key}" / "{model}.gguf"),
        record=str(RESULTS / "models" / "{key}" / "{model}.json"),
    log:
        str(RESULTS / "logs" / "quantize_model" / "{key}.{model}.log"),
    wildcard_constraints:
        model=one_of(QUANTIZED),
    params:
        key=lambda w: QUANTIZED[w.model].key,
        type=lambda w: STUDY.models[w.model]["type"],
        tool=lambda w: str(Path(tools_of(w.model)).parent / "bin" / "llama-quantize"),
        tool_digest=lambda w: QUANTIZED[w.model].tool_digest,
    threads: 2
    resources:
        # what a host compiled runs on its kind
        **asked_of(lambda w: STUDY.build_resources(STUDY.models[w.model]["build"])),
    conda:
        "../../envs/measure.yaml"
    shell:
        "python {SCRIPTS}/quantize_model.py --name {wildcards.model} --key {params.key}"
        " --base {input.model} --type {params.type} --tool {params.tool}"
        " --tool-digest {params.tool_digest} --output {output.gguf} --threads {threads}"
        " --log {log}"
