"""Preflight: everything a long run will do, once and small, before it may start.

Two optimizer steps on the run's real topology (in Stage2 as many as it takes until the student has moved), a checkpoint
written, read back and compared bit for bit, one validation slot sampled from it. What breaks after hours (the save path, the sampler, the disk) breaks here, and the report says
what the run will cost.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact, Transaction
from solarwm_lib.runtime.launch import refuse_before_start
from solarwm_lib.runtime.lock import exclusive
from solarwm_lib.training import initial, setup
from solarwm_lib.training.topology import Topology

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved

SCHEMA = "solarwm.preflight.v1"
REPORT = "report.json"


def steps_of(resolved: Resolved) -> int:
    """Optimizer steps of a preflight: the first pays for warming up, the others are one round of everything the run does."""
    forcing = resolved.config.train.self_gradient_forcing
    return 2 if forcing is None else 1 + forcing.critic_updates_per_student


def preflight(resolved: Resolved, out_dir: Path | str, validated: Sequence[Path] = ()) -> Artifact:
    """Publish the preflight of a run at `out_dir`; one that is there and of the same identity is returned.

    `validated` are validations of Stage2's student, refused with ArtifactError unless they are complete.
    Works in the hidden sibling `.NAME.scratch`, which stays for inspection if something fails and is removed by the
    next attempt. Raises whatever the run itself would raise.
    """
    refuse_before_start(resolved)
    target = Path(out_dir)
    scratch = target.with_name(f".{target.name}.scratch")
    run = setup.open_run(resolved, scratch)
    initial.check_validated(run.inputs.roles.get("student"), validated)
    topology, identity = run.topology, run.identity
    setup.check_clips(resolved, topology)

    from solarwm_lib.training import collectives, metrics, train

    with collectives.process_group(topology), ExitStack() as held:
        lock = target.with_name(f".{target.name}.lock")
        collectives.on_main(topology, lambda: held.enter_context(exclusive(lock, "in preflight")))
        published = collectives.on_main(topology, lambda: _reissue_or_clear(target, identity, scratch))
        if published is not None:
            return published
        started = time.perf_counter()
        checkpoint = train.run(resolved, run_dir=scratch, until_step=steps_of(resolved), check_reload=True)
        training_seconds = time.perf_counter() - started
        validation = _validate_one_slot(resolved, checkpoint, scratch, topology)

        def publish() -> Artifact:
            records = metrics.read(scratch / metrics.FILE)
            report = _report(resolved, topology, checkpoint, records, training_seconds, validation, target)
            with Transaction(target, SCHEMA, identity, run.inputs.parents) as transaction:
                transaction.write_json(REPORT, report)
                transaction.write_bytes(metrics.FILE, (scratch / metrics.FILE).read_bytes())
            shutil.rmtree(scratch)
            print(_summary(report))
            return transaction.artifact

        return collectives.on_main(topology, publish)


def _reissue_or_clear(target: Path, identity: dict[str, Any], scratch: Path) -> Artifact | None:
    published = artifacts.reissue(target, SCHEMA, identity)
    shutil.rmtree(
        scratch, ignore_errors=True
    )  # also when published: a kill may have come before the clean-up
    if published is None:
        scratch.mkdir(parents=True)
    return published


def _validate_one_slot(
    resolved: Resolved, checkpoint: Artifact, scratch: Path, topology: Topology
) -> dict[str, Any] | None:
    """Sample slot 0 of one pass (a live one if there is any) from `checkpoint`.

    None if the run has no pass that can be sampled yet: an average that starts later has no weights.
    """
    from solarwm_lib.inference.plan import freeze_plan
    from solarwm_lib.inference.validation import validate
    from solarwm_lib.training.checkpoint import read_state
    from solarwm_lib.training.collectives import on_main

    usable = ("live", "ema") if read_state(checkpoint).ema_updates else ("live",)
    passes = [item for item in resolved.config.validation.passes if item.weights in usable]
    if not passes:
        return None
    chosen = next((item for item in passes if item.weights == "live"), passes[0])
    plan = Path(resolved.config.runtime.output_dir) / "validation" / "frozen-plan.json"
    if not on_main(topology, plan.is_file):
        plan = scratch / "frozen-plan.json"
        on_main(topology, lambda: (freeze_plan(resolved, plan), None)[1])
    started = time.perf_counter()
    artifact = validate(resolved, checkpoint.path, plan, chosen.name, scratch / "validation", slots=[0])
    summary = json.loads(artifact.file("summary.json").read_bytes())
    return {
        "pass": chosen.name,
        "seconds": time.perf_counter() - started,
        "num_inference_steps": chosen.num_inference_steps,
        "means": summary["means"],
    }


def _report(
    resolved: Resolved,
    topology: Topology,
    checkpoint: Artifact,
    records: list[dict[str, Any]],
    training_seconds: float,
    validation: dict[str, Any] | None,
    target: Path,
) -> dict[str, Any]:
    """What was measured and what the whole run is estimated to need.

    The first step also pays for warming up; times are means over the others, which are one round of all updates.
    """
    config, last_step = resolved.config, records[-1]
    seconds, data_seconds, rate = (
        mean(record[key] for record in records[1:] or records)
        for key in ("step_seconds", "data_seconds", "samples_per_second")
    )
    saves = math.ceil(config.train.max_steps / config.checkpoint.save_every_steps)
    free = shutil.disk_usage(target.parent).free
    # Published checkpoints stay; rolling saves come on top, one more than are kept while a new one is written.
    disk = checkpoint.bytes * (saves + config.checkpoint.keep_rolling + 1)
    return {
        "schema": SCHEMA,
        "measured": {
            "steps": last_step["step"],
            "step_seconds": seconds,
            "data_seconds": data_seconds,
            "samples_per_second": rate,
            "memory_bytes": last_step["memory_bytes"],
            "loss": last_step["loss"],
            "gradient_norm": last_step["gradient_norm"],
            "training_seconds": training_seconds,
            "checkpoint_bytes": checkpoint.bytes,
            "checkpoint_reloaded": "bit-equal",
            "free_bytes": free,
            "world_size": topology.world_size,
            "validation": validation,
        },
        "estimated": {
            "train_hours": config.train.max_steps * seconds / 3600.0,
            "checkpoints": saves,
            "disk_bytes": disk,
            "disk_suffices": disk <= free,
        },
    }


def _summary(report: dict[str, Any]) -> str:
    measured, estimated = report["measured"], report["estimated"]
    short = (
        ""
        if estimated["disk_suffices"]
        else "  WARNING: more than is free; raise checkpoint.save_every_steps"
    )
    return (
        f"preflight ok: {measured['step_seconds']:.2f} s/step, {measured['memory_bytes'] / 2**20:.0f} MiB, checkpoint "
        f"{measured['checkpoint_bytes'] / 2**20:.1f} MiB reloaded bit-equal; estimated {estimated['train_hours']:.2f} h, "
        f"{estimated['disk_bytes'] / 2**30:.2f} GiB for {estimated['checkpoints']} checkpoints, "
        f"{measured['free_bytes'] / 2**30:.1f} GiB free{short}"
    )
