localrules:
    completion_report,
    draw_graph,
    gallery,


rule completion_report:
    input:
        lambda wildcards: WORKFLOW.run_validations(wildcards.run),
        lambda wildcards: WORKFLOW.run_checkpoints(wildcards.run),
    output:
        report(
            f"{RESULTS}/runs/{{run}}/completion-report.md",
            category="Completion reports",
            caption="../docs/captions/completion.rst",
        ),
    log:
        f"{RESULTS}/logs/completion_report/{{run}}.log",
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        run_dir=lambda wildcards, output: WORKFLOW.run_dir(wildcards.run),
    shell:
        "{params.solarwm} report completion {params.run_dir:q} --out {output:q} > {log:q} 2>&1"


rule draw_graph:
    output:
        f"{RESULTS}/report/rulegraph.dot",
    log:
        f"{RESULTS}/logs/draw_graph.log",
    conda:
        "../envs/solarwm.yaml"
    params:
        command=lambda wildcards, output: WORKFLOW.rulegraph_command(
            workflow.configfiles
        ),
    shell:
        "{params.command} > {output:q} 2> {log:q}"


rule gallery:
    input:
        WORKFLOW.gallery_inputs(),
        graph=f"{RESULTS}/report/rulegraph.dot",
    output:
        report(
            WORKFLOW.gallery,
            category="Gallery",
            caption="../docs/captions/gallery.rst",
        ),
    log:
        f"{RESULTS}/logs/gallery.log",
    conda:
        "../envs/solarwm.yaml"
    params:
        solarwm=solarwm_command,
        title=WORKFLOW.config.title,
        results=lambda wildcards, output: WORKFLOW.results,
    shell:
        "{params.solarwm} report gallery {params.results:q} --title {params.title:q} --graph {input.graph:q}"
        " --out {output:q} > {log:q} 2>&1"
