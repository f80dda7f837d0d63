rule build_tiny_assets:
    output:
        f"{RESULTS}/assets/{{assets}}/COMPLETE.json",
    log:
        f"{RESULTS}/logs/build_tiny_assets/{{assets}}.log",
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
