rule infer:
    input:
        unpack(lambda wildcards: WORKFLOW.inference_inputs(inference_name(wildcards))),
    output:
        f"{RESULTS}/inference/{{inference}}/COMPLETE.json",
    log:
        f"{RESULTS}/logs/infer/{{inference}}.log",
    conda:
        "../envs/solarwm.yaml"
    threads: inference_threads
    resources:
        mem_mb=lambda wildcards: inference_job(wildcards).mem_mb,
        gpu=lambda wildcards: inference_job(wildcards).gpu,
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.inference_identity(
            inference_name(wildcards)
        ),
        arguments=inference_arguments,
    shell:
        "{params.solarwm} infer {params.arguments} > {log:q} 2>&1"
