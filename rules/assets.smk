rule build_tiny_assets:
    output:
        f"{RESULTS}/assets/{{assets}}/COMPLETE.json",
    log:
        f"{RESULTS}/logs/build_tiny_assets/{{assets}}.log",
    wildcard_constraints:
        assets=WORKFLOW.names_pattern("assets", "tiny"),
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        architecture=lambda wildcards: WORKFLOW.config.assets[
            wildcards.assets
        ].architecture,
        seed=lambda wildcards: WORKFLOW.config.assets[wildcards.assets].seed,
        out=artifact_dir,
    shell:
        "{params.solarwm} assets tiny --architecture {params.architecture:q} --seed {params.seed}"
        " --out {params.out:q} > {log:q} 2>&1"


rule import_weights:
    input:
        unpack(lambda wildcards: WORKFLOW.import_inputs(wildcards.assets)),
    output:
        f"{RESULTS}/assets/{{assets}}/COMPLETE.json",
    log:
        f"{RESULTS}/logs/import_weights/{{assets}}.log",
    wildcard_constraints:
        assets=WORKFLOW.names_pattern("assets", "imported"),
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.assets_spec(wildcards.assets),
        arguments=import_arguments,
        out=artifact_dir,
    shell:
        "{params.solarwm} weights import {params.arguments} --out {params.out:q} > {log:q} 2>&1"
