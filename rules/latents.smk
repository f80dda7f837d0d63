localrules:
    resolve_latents,


# It waits for the generations that samples are copied from. The parts take it as `ancient`: naming another one to copy
# from later changes what is left to make, and repeats nothing.
rule resolve_latents:
    input:
        lambda wildcards: WORKFLOW.latents_reused(wildcards.latents),
    output:
        f"{RESULTS}/latents/{{latents}}/resolved-config.json",
    log:
        f"{RESULTS}/logs/resolve_latents/{{latents}}.log",
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.latents_identity(wildcards.latents),
        arguments=latents_arguments,
    shell:
        "{params.solarwm} config resolve {params.arguments} --strict --output {output:q} > {log:q} 2>&1"


rule preencode_shard:
    input:
        unpack(lambda wildcards: WORKFLOW.latents_inputs(wildcards.latents)),
        config=ancient(f"{RESULTS}/latents/{{latents}}/resolved-config.json"),
    output:
        f"{RESULTS}/latents/{{latents}}/shards/part-{{part}}/COMPLETE.json",
    log:
        f"{RESULTS}/logs/preencode_shard/{{latents}}/{{part}}.log",
    conda:
        "../envs/solarwm.yaml"
    threads: lambda wildcards: WORKFLOW.config.latents[wildcards.latents].threads
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.latents_identity(wildcards.latents),
        arguments=latents_arguments,
        part=part_number,
        out=artifact_dir,
    shell:
        "{params.solarwm} preencode {params.arguments} --part {params.part} --out {params.out:q} > {log:q} 2>&1"


rule merge_latent_index:
    input:
        lambda wildcards: WORKFLOW.latents_parts(wildcards.latents),
    output:
        f"{RESULTS}/latents/{{latents}}/index/COMPLETE.json",
    log:
        f"{RESULTS}/logs/merge_latent_index/{{latents}}.log",
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.latents_identity(wildcards.latents),
        arguments=latents_arguments,
        out=artifact_dir,
    shell:
        "{params.solarwm} merge-latents {params.arguments} --out {params.out:q} > {log:q} 2>&1"
