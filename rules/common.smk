from pathlib import Path
import sys

sys.path.insert(0, str(workflow.basedir))

from solarwm_lib.config.workflow import NAME
from solarwm_lib.graph import load_workflow_or_exit
from solarwm_lib.runtime import lifeline
from solarwm_lib.runtime.leftovers import announce_leftovers

WORKFLOW = load_workflow_or_exit(
    config,
    Path(workflow.basedir),
    deployed=bool(workflow.deployment_settings.deployment_method),
)
RESULTS = WORKFLOW.results

announce_leftovers(Path.cwd())
# The jobs of this process end when it has ended, also by SIGKILL. In the environment, because a param would rerun them.
lifeline.announce(lifeline.WORKFLOW)


wildcard_constraints:
    data=NAME,
    assets=NAME,
    windows=WORKFLOW.section_pattern("windows"),
    latents=WORKFLOW.section_pattern("latents"),
    part=r"\d{6}",
    run=NAME,
    step=r"\d{6}",
    validation_pass=NAME,
    inference=WORKFLOW.artifacts_pattern("inference"),
    export=WORKFLOW.artifacts_pattern("export"),
    comparison=WORKFLOW.artifacts_pattern("comparison"),


# A param function that also takes `output` is not a rerun trigger: these words hold paths and topology, which never
# change a result. What does change it is the `identity` param of each rule.
def solarwm_command(wildcards, output):
    return WORKFLOW.command


def pack_arguments(wildcards, output):
    return WORKFLOW.pack_arguments(wildcards.data)


def windows_arguments(wildcards, output):
    return WORKFLOW.windows_arguments(wildcards.windows)


def latents_arguments(wildcards, output):
    return WORKFLOW.latents_arguments(wildcards.latents)


def part_number(wildcards, output):
    return int(wildcards.part)


def run_arguments(wildcards, output):
    return WORKFLOW.run_arguments(wildcards.run)


def validated_arguments(wildcards, output):
    return WORKFLOW.validated_arguments(wildcards.run)


def launcher(wildcards, output):
    return WORKFLOW.launcher(wildcards.run)


def until_step(wildcards, output):
    return int(wildcards.step)


def inference_name(wildcards):
    return WORKFLOW.by_artifact("inference", wildcards.inference)


def inference_threads(wildcards):
    return WORKFLOW.config.inference[inference_name(wildcards)].threads


def inference_job(wildcards):
    return WORKFLOW.sampling_job("inference", inference_name(wildcards))


def inference_arguments(wildcards, output):
    return WORKFLOW.inference_arguments(inference_name(wildcards))


def export_name(wildcards):
    return WORKFLOW.by_artifact("export", wildcards.export)


def export_arguments(wildcards, output):
    return WORKFLOW.export_arguments(export_name(wildcards))


def import_arguments(wildcards, output):
    return WORKFLOW.import_arguments(wildcards.assets)


def artifact_dir(wildcards, output):
    return str(Path(output[0]).parent)


def input_dirs(wildcards, input, output):
    return [str(Path(path).parent) for path in input]
