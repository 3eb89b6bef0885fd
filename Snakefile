# Routewise: does a batch give the same bits as one token alone, where not, and at what price.
from snakemake.utils import min_version

min_version("9.0")

# A study is whole: one named with --configfile replaces the demo, and is not laid over it.
if not workflow.configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/builds.smk"
include: "workflow/rules/models.smk"
include: "workflow/rules/prompts.smk"
include: "workflow/rules/replay.smk"
include: "workflow/rules/serve.smk"
include: "workflow/rules/cost.smk"
include: "workflow/rules/receipts.smk"


rule all:
    default_target: True
    input:
        receipt=RECEIPT,
        markdown=RECEIPT_MARKDOWN,
        figures=FIGURES,
        # asked for by name: Snakemake does not make again what only a finished receipt was made of
        tables=TABLES.values(),
        cells=PLAN.cell_paths(),


onstart:
    before_jobs()


onsuccess:
    # a target of its own prints what it has to say
    if any(job.rule.name == "all" for job in workflow.dag.targetjobs):
        shell("python {SCRIPTS}/check_study.py --show --receipt {RECEIPT}")


onerror:
    # a verdict that fails the gate is an answer, and no broken run
    if all(job.rule.name != "check" for job in workflow.dag.targetjobs):
        print(
            "routewise: the run did not finish. Whole cells and prompts are kept: the same command"
            " goes on from there.",
            file=sys.stderr,
        )
