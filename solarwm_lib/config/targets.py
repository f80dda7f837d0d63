"""Target rules: everything at once, and one per run, stage, family, generation of latents, inference, export, comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solarwm_lib.graph import Workflow

# Prefix of a family's targets: wan5b_stage1, wan5b_all.
FAMILY_PREFIX = {
    "wan22_ti2v_5b": "wan5b",
    "wan22_i2v_a14b": "wan14b",
    "ltx25_video": "ltx",
    "minimax_h3": "h3",
}


def of_stages(workflow: Workflow) -> dict[str, list[str]]:
    """Name -> runs: `stage1` of all families, `wan5b_stage1` and `wan5b_all` of one."""
    found: dict[str, list[str]] = {}
    for run, resolved in workflow.resolved.items():
        prefix, stage = FAMILY_PREFIX[resolved.route.family], resolved.route.stage
        for name in (stage, f"{prefix}_{stage}", f"{prefix}_all"):
            found.setdefault(name, []).append(run)
    return dict(sorted(found.items()))


def named(workflow: Workflow) -> dict[str, list[str]]:
    """Name -> files of every target rule but `all`."""
    config = workflow.config
    targets = {run: workflow.run_targets(run) for run in config.runs}
    targets |= {
        name: [path for run in runs for path in workflow.run_targets(run)]
        for name, runs in of_stages(workflow).items()
    }
    targets |= {
        # With its parts: a part that was removed is asked for by this name, and by nothing that is made already.
        f"latents_{name}": [workflow.latents_index(name), *workflow.latents_parts(name)]
        for name in config.latents
    }
    targets |= {f"infer_{name}": [workflow.inference_marker(name)] for name in config.inference}
    targets |= {f"export_{name}": [workflow.export_marker(name)] for name in config.exports}
    return targets | {f"compare_{name}": [workflow.comparison_marker(name)] for name in config.comparisons}


def names(workflow: Workflow) -> list[str]:
    """The names of `named`, as often as they are given: two of the same are refused."""
    config = workflow.config
    kinds = (
        ("latents", config.latents),
        ("infer", config.inference),
        ("export", config.exports),
        ("compare", config.comparisons),
    )
    return [
        *config.runs,
        *of_stages(workflow),
        *(f"{kind}_{name}" for kind, section in kinds for name in section),
    ]


def gallery(workflow: Workflow) -> list[str]:
    """Results that nothing here is made from; latents that a run used may be removed when it is trained."""
    config = workflow.config
    used = {spec.latents for spec in config.runs.values()}
    used.update(other for spec in config.latents.values() for other in spec.reuse)
    return [
        *(workflow.latents_index(name) for name in config.latents if name not in used),
        *(path for run in config.runs for path in workflow.run_targets(run)),
        *(workflow.comparison_marker(name) for name in config.comparisons),
        *(workflow.inference_marker(name) for name in config.inference),
    ]


def everything(workflow: Workflow) -> list[str]:
    """The gallery and what it shows, and the exports."""
    exports = [workflow.export_marker(name) for name in workflow.config.exports]
    return [*gallery(workflow), *exports, *([workflow.gallery] if workflow.config.runs else [])]
