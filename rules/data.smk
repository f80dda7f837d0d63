rule synthesize_clips:
    output:
        f"{RESULTS}/data/{{data}}/COMPLETE.json",
    log:
        f"{RESULTS}/logs/synthesize_clips/{{data}}.log",
    wildcard_constraints:
        data=WORKFLOW.names_pattern("data", "synthetic"),
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.data_spec(wildcards.data),
        out=artifact_dir,
    shell:
        "{params.solarwm} data synthesize --spec {params.identity:q} --out {params.out:q} > {log:q} 2>&1"


rule index_clips:
    output:
        f"{RESULTS}/data/{{data}}/COMPLETE.json",
    log:
        f"{RESULTS}/logs/index_clips/{{data}}.log",
    wildcard_constraints:
        data=WORKFLOW.names_pattern("data", "folder"),
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.data_spec(wildcards.data),
        arguments=pack_arguments,
        out=artifact_dir,
    shell:
        "{params.solarwm} data pack {params.arguments} --out {params.out:q} > {log:q} 2>&1"


rule materialize_windows:
    input:
        lambda wildcards: WORKFLOW.data_marker(
            WORKFLOW.config.windows[wildcards.windows].data
        ),
    output:
        f"{RESULTS}/windows/{{windows}}/COMPLETE.json",
    log:
        f"{RESULTS}/logs/materialize_windows/{{windows}}.log",
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        identity=lambda wildcards: WORKFLOW.windows_spec(wildcards.windows),
        arguments=windows_arguments,
        out=artifact_dir,
    shell:
        "{params.solarwm} data materialize-windows {params.arguments} --out {params.out:q} > {log:q} 2>&1"
