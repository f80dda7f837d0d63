localrules:
    resolve_run,


rule resolve_run:
    output:
        f"{RESULTS}/runs/{{run}}/resolved-config.json",
    log:
        f"{RESULTS}/logs/resolve_run/{{run}}.log",
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.identity(wildcards.run),
        arguments=run_arguments,
    shell:
        "{params.solarwm} config resolve {params.arguments} --strict --output {output:q} > {log:q} 2>&1"


rule preflight:
    input:
        unpack(lambda wildcards: WORKFLOW.preflight_inputs(wildcards.run)),
        config=f"{RESULTS}/runs/{{run}}/resolved-config.json",
        plan=f"{RESULTS}/runs/{{run}}/validation/frozen-plan.json",
    output:
        f"{RESULTS}/runs/{{run}}/preflight/COMPLETE.json",
    log:
        f"{RESULTS}/logs/preflight/{{run}}.log",
    conda:
        "../envs/solarwm.yaml"
    threads: lambda wildcards: WORKFLOW.run_threads(wildcards.run)
    resources:
        mem_mb=lambda wildcards: WORKFLOW.training_job(wildcards.run).mem_mb,
        gpu=lambda wildcards: WORKFLOW.training_job(wildcards.run).gpu,
    params:
        identity=lambda wildcards: WORKFLOW.identity(wildcards.run),
        launcher=launcher,
        arguments=run_arguments,
        validated=validated_arguments,
        out=artifact_dir,
    shell:
        "{params.launcher} -m solarwm_lib preflight"
        " {params.arguments} {params.validated} --out {params.out:q} > {log:q} 2>&1"


rule train_segment:
    input:
        unpack(lambda wildcards: WORKFLOW.training_inputs(wildcards.run)),
        config=f"{RESULTS}/runs/{{run}}/resolved-config.json",
        preflight=f"{RESULTS}/runs/{{run}}/preflight/COMPLETE.json",
        previous=lambda wildcards: WORKFLOW.previous_checkpoint(
            wildcards.run, int(wildcards.step)
        ),
    output:
        protected(f"{RESULTS}/runs/{{run}}/checkpoint_model_{{step}}/COMPLETE.json"),
    log:
        f"{RESULTS}/logs/train_segment/{{run}}/{{step}}.log",
    conda:
        "../envs/solarwm.yaml"
    threads: lambda wildcards: WORKFLOW.run_threads(wildcards.run)
    resources:
        mem_mb=lambda wildcards: WORKFLOW.training_job(wildcards.run).mem_mb,
        gpu=lambda wildcards: WORKFLOW.training_job(wildcards.run).gpu,
    params:
        identity=lambda wildcards: WORKFLOW.identity(wildcards.run),
        launcher=launcher,
        arguments=run_arguments,
        until_step=until_step,
    shell:
        "{params.launcher} -m solarwm_lib train"
        " {params.arguments} --until-step {params.until_step} 2>&1 | tee {log:q}"
