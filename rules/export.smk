rule export_model:
    input:
        lambda wildcards: WORKFLOW.export_checkpoint(export_name(wildcards)),
    output:
        f"{RESULTS}/exports/{{export}}/COMPLETE.json",
    log:
        f"{RESULTS}/logs/export_model/{{export}}.log",
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.export_spec(export_name(wildcards)),
        arguments=export_arguments,
        out=artifact_dir,
    shell:
        "{params.solarwm} weights export {params.arguments} --out {params.out:q} > {log:q} 2>&1"
