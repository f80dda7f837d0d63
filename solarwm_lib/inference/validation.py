"""Validation: one pass of one checkpoint over the run's frozen plan, as an artifact of its own.

The artifact holds `slot-NNNNNN/{generated,ground_truth,compare}.mp4, frames.csv, manifest.json`, `ordered-manifest.jsonl`,
`metrics.csv` and `summary.json`, whose `status` is `complete` or `partial`. A slot that fails ends in an error manifest
and the rest goes on: the pass is then published as partial, and the command succeeds. Only when no slot succeeds does it
fail, with the first failure's exit code; what is known then stands in `<out>.failed-NNN`, and `<out>` stays free.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib import artifacts
from solarwm_lib.inference import latents
from solarwm_lib.inference.cases import Cases
from solarwm_lib.inference.evaluation import (
    COMPLETE,
    FAILED,
    PassRun,
    PassWriter,
    find_pass,
    first_failure,
    prepare,
    run_pass,
)
from solarwm_lib.inference.plan import load_plan
from solarwm_lib.runtime.manifests import artifact_dir

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved

SCHEMA = "solarwm.validation.v1"

log = logging.getLogger(__name__)


def validate(
    resolved: Resolved,
    checkpoint: Path | str,
    plan: Path | str,
    pass_name: str,
    out_dir: Path | str,
    *,
    slots: Sequence[int] | None = None,
) -> artifacts.Artifact:
    """Publish pass `pass_name` of `checkpoint` over the frozen `plan` at `out_dir`; under torchrun slots are dealt out
    to the sequence-parallel groups.

    A result that is already there is verified and returned. `slots` restricts the pass (the others are skipped).
    Raises ConfigError, ArtifactError before a model is loaded, or the first slot's error if every slot failed.
    """
    run = prepare(resolved, checkpoint, load_plan(plan), find_pass(resolved.config, pass_name), slots)
    out = artifact_dir(out_dir)
    return publish({"": run}, out, SCHEMA, run.identity(), run.parents(), {"": latents.beside(out)}, {})


def publish(
    runs: Mapping[str, PassRun],
    out_dir: Path,
    schema: str,
    identity: dict[str, Any],
    parents: Sequence[Path],
    latents_dirs: Mapping[str, Path],
    extra: Mapping[str, bytes],
) -> artifacts.Artifact:
    """Run passes (by folder prefix inside the artifact) and publish them together, with `extra` members."""
    done = artifacts.reissue(out_dir, schema, identity, parents=parents)
    if done is not None:
        return done
    from solarwm_lib.training.collectives import on_main, process_group
    from solarwm_lib.training.peers import Peers
    from solarwm_lib.training.topology import from_environment

    # A pass may run in any number of processes; how many trained the checkpoint does not matter here. One samples alone.
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = next(iter(runs.values())).config.distributed.sequence_parallel_size if world > 1 else 1
    topology = from_environment(os.environ, world, parallel)
    stack = ExitStack()
    with process_group(topology) as device, stack:
        transaction = artifacts.Transaction(out_dir, schema, identity, parents)
        peers = Peers(topology)
        on_main(topology, partial(_open, stack, transaction, extra))
        clips = Cases(next(iter(runs.values())).resolved)
        stack.callback(clips.close)
        summaries: list[dict[str, Any]] = []
        evidence: dict[str, bytes] = {}
        for prefix, run in runs.items():
            writer = PassWriter(run, transaction.write_bytes, prefix)
            for wave in run_pass(run, clips, latents_dirs[prefix], topology, peers, device):
                on_main(topology, partial(writer.extend, wave))
            summaries.append(on_main(topology, writer.finish))
            evidence |= writer.evidence
        if all(summary["status"] == FAILED for summary in summaries):
            where = on_main(topology, partial(_publish_failure, out_dir, schema, identity, parents, evidence))
            raise first_failure(summaries, str(where))
        on_main(topology, stack.close)
    if topology.is_main:
        _report(summaries, out_dir)
        if next(iter(runs.values())).config.runtime.tensorboard:
            from solarwm_lib.inference.tensorboard import show_pass

            show_pass(out_dir)
    return artifacts.read(out_dir, schema)


def _open(stack: ExitStack, transaction: artifacts.Transaction, extra: Mapping[str, bytes]) -> None:
    stack.enter_context(transaction)
    for member, data in extra.items():
        transaction.write_bytes(member, data)


def _publish_failure(
    out_dir: Path, schema: str, identity: dict[str, Any], parents: Sequence[Path], files: Mapping[str, bytes]
) -> Path:
    number = next(n for n in range(1, 1000) if not _failed_dir(out_dir, n).exists())
    with artifacts.Transaction(
        _failed_dir(out_dir, number), f"{schema[:-3]}-failed.v1", identity, parents
    ) as transaction:
        for member, data in files.items():
            transaction.write_bytes(member, data)
    return _failed_dir(out_dir, number)


def _failed_dir(out_dir: Path, number: int) -> Path:
    return out_dir.with_name(f"{out_dir.name}.failed-{number:03d}")


def _report(summaries: Sequence[Mapping[str, Any]], out_dir: Path) -> None:
    for summary in summaries:
        counts, means = summary["slots"], summary["means"]
        print(
            f"{summary['title']}: {summary['status']}, {counts['ok']} of {counts['total']} slots"
            + (
                f", PSNR {means['psnr']:.2f} dB ({means['margin_db']:+.2f} over repeat first frame)"
                if means
                else ""
            )
        )
        for failed in summary["failed"] if summary["status"] != COMPLETE else ():
            log.warning(
                "%s: slot %d (%s): %s", out_dir, failed["slot"], failed["sample_id"], failed["message"]
            )
