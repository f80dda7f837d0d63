rule compare:
    input:
        lambda wildcards: WORKFLOW.comparison_inputs(
            WORKFLOW.by_artifact("comparison", wildcards.comparison)
        ),
    output:
        f"{RESULTS}/comparisons/{{comparison}}/COMPLETE.json",
    log:
        f"{RESULTS}/logs/compare/{{comparison}}.log",
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        artifacts=input_dirs,
        out=artifact_dir,
    shell:
        "{params.solarwm} compare {params.artifacts:q} --out {params.out:q} > {log:q} 2>&1"
