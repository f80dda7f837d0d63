rule freeze_validation_plan:
    input:
        unpack(lambda wildcards: WORKFLOW.run_inputs(wildcards.run)),
        config=f"{RESULTS}/runs/{{run}}/resolved-config.json",
    output:
        f"{RESULTS}/runs/{{run}}/validation/frozen-plan.json",
    log:
        f"{RESULTS}/logs/freeze_validation_plan/{{run}}.log",
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.identity(wildcards.run),
        arguments=run_arguments,
    shell:
        "{params.solarwm} freeze-plan {params.arguments} --out {output:q} > {log:q} 2>&1"


rule validate:
    input:
        unpack(lambda wildcards: WORKFLOW.run_inputs(wildcards.run)),
        config=f"{RESULTS}/runs/{{run}}/resolved-config.json",
        checkpoint=f"{RESULTS}/runs/{{run}}/checkpoint_model_{{step}}/COMPLETE.json",
        plan=f"{RESULTS}/runs/{{run}}/validation/frozen-plan.json",
    output:
        f"{RESULTS}/runs/{{run}}/validation/step_{{step}}/{{validation_pass}}/COMPLETE.json",
    log:
        f"{RESULTS}/logs/validate/{{run}}/{{step}}.{{validation_pass}}.log",
    conda:
        "../envs/solarwm.yaml"
    threads: 1
    resources:
        mem_mb=lambda wildcards: WORKFLOW.sampling_job("runs", wildcards.run).mem_mb,
        gpu=lambda wildcards: WORKFLOW.sampling_job("runs", wildcards.run).gpu,
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.identity(wildcards.run),
        arguments=run_arguments,
        checkpoint=lambda wildcards, input: str(Path(input.checkpoint).parent),
        out=artifact_dir,
    shell:
        "{params.solarwm} validate {params.arguments}"
        " --checkpoint {params.checkpoint:q} --plan {input.plan:q} --pass {wildcards.validation_pass:q}"
        " --out {params.out:q} > {log:q} 2>&1"
