from snakemake.utils import min_version

min_version("9.27")


if "runs" not in config:

    configfile: workflow.source_path("config/config.yaml")


include: "rules/common.smk"
include: "rules/assets.smk"
include: "rules/data.smk"
include: "rules/latents.smk"
include: "rules/train.smk"
include: "rules/validate.smk"
include: "rules/infer.smk"
include: "rules/export.smk"
include: "rules/compare.smk"
include: "rules/report.smk"


rule all:
    default_target: True
    input:
        WORKFLOW.all_targets(),


for target, files in WORKFLOW.named_targets().items():

    rule:
        name:
            target
        input:
            files,
