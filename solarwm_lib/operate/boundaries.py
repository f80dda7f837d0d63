"""The boundaries at which a run can fail, in the order in which they are looked at. (spec operations 12.3)

Each function returns a finding with evidence and advice, or None. An earlier boundary explains a later one (a rank that ran out of
memory leaves the others hanging), never the other way round, so the first finding is the one to act on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from solarwm_lib.operate.evidence import Dump, Evidence, failed_slots, pass_log, unfinished
from solarwm_lib.report.facts import Pass
from solarwm_lib.runtime.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    DistributedError,
    MemoryExhausted,
    NonFiniteError,
)
from solarwm_lib.runtime.process import place

SHOWN = 6
DISK = ("disk full", "are free", "No space left", "Disk quota")
PEERS_DIFFER = "sequence-parallel peers differ in"
HANG = "hang:"


@dataclass(frozen=True)
class Finding:
    """One boundary that was crossed: the exit code of its class, what shows it, what to do next."""

    boundary: str
    exit_code: int
    evidence: list[str]
    advice: str


def non_finite(seen: Evidence) -> Finding | None:
    """A loss, gradient or tensor that is NaN or infinite: first step, then lowest rank."""
    dumps = seen.fresh("nonfinite-")
    if not dumps and seen.kind != NonFiniteError.kind:
        return None
    evidence = [line for dump in dumps[:SHOWN] for line in _non_finite_lines(dump)]
    advice = "look at the samples that are named (`solarwm data inspect`), lower the learning rate or the gradient clip"
    if dumps:
        first = dumps[0].content
        inputs = [
            s
            for s in first.get("samples", [])
            if _has_bad(s.get("latents")) or _has_bad(s.get("prompt_embeds"))
        ]
        if first.get("bad_parameters"):
            advice = (
                "the weights were bad before this step: remove the newest save and continue from an older one"
            )
        elif inputs:
            advice = f"the input itself is not finite: repair or remove sample {inputs[0].get('sample_id')}"
    return Finding("non-finite", NonFiniteError.exit_code, evidence or seen.record_lines(), advice)


def out_of_memory(seen: Evidence) -> Finding | None:
    """Host or device memory that ran out, told by the process itself or by its log."""
    dumps = seen.fresh("oom-")
    logged = [
        line for line in seen.log_lines() if "out of memory" in line.lower() or "oom-kill" in line.lower()
    ]
    unexplained = seen.state.state == "failed" and seen.kind in (None, DistributedError.kind)
    if not dumps and seen.kind != MemoryExhausted.kind and not (logged and unexplained):
        return None
    evidence = [_dump_line(dump, "phase", "latents_shape", "error") for dump in dumps[:SHOWN]]
    return Finding(
        "out of memory",
        MemoryExhausted.exit_code,
        evidence or seen.record_lines() + logged,
        "see who else uses the device or the host; then lower train.micro_batch_size (more accumulation keeps the global "
        "batch), checkpoint activations, raise sequence parallelism or shard the parameters",
    )


def hang(seen: Evidence) -> Finding | None:
    """Ranks that wait for each other, or for one that does not get on."""
    dumps = [dump for dump in seen.fresh("hang-") if dump.content]
    is_hang = seen.kind == DistributedError.kind and seen.message.startswith(HANG)
    late = seen.state.state == "hanging?"
    if not dumps and not is_hang and not late:
        return None
    evidence = [_dump_line(dump, "behind", "waiting", "timeout_seconds") for dump in dumps[:SHOWN]]
    if late:
        evidence += [seen.state.detail]
        evidence += [
            f"rank {rank.rank} (process {rank.pid} on {rank.host}, alive: {rank.alive}): {place(vars(rank))}, "
            f"silent for {rank.age_seconds:.0f} s"
            for rank in seen.state.ranks
        ]
    return Finding(
        "hang",
        DistributedError.exit_code,
        evidence or seen.record_lines(),
        "look at the rank that does not wait for its peers: its stack is in its hang file, or `py-spy dump --pid PID`; check "
        "its disk, network and device, then `solarwm stop` and run the same command again. A quiet rank alone proves nothing",
    )


def peers_differ(seen: Evidence) -> Finding | None:
    """Sequence-parallel peers that do not compute on the same sample, start, prompt, camera, noise or time."""
    if seen.state.state != "failed" or PEERS_DIFFER not in seen.message:
        return None
    return Finding(
        "sequence-parallel mismatch",
        seen.exit_code or DistributedError.exit_code,
        seen.record_lines(),
        "compare what differs between the named ranks: same data set, packages and configuration on every host; then the order "
        "of random draws",
    )


def checkpoint_load(seen: Evidence) -> Finding | None:
    """A save that does not verify, or one that the run could not load."""
    evidence = [
        f"{save['name']}: {save['problem']}"
        for save in [*seen.state.checkpoints, *seen.state.rolling]
        if save["problem"] and "is not complete" not in save["problem"]
    ]
    if seen.kind == ArtifactError.kind and not _about_disk(seen.message):
        evidence += seen.record_lines()
    if not evidence:
        return None
    return Finding(
        "checkpoint or artifact",
        ArtifactError.exit_code,
        evidence,
        "`solarwm verify PATH --deep` on every host: restore a copy or remove the damaged directory and go on from the save "
        "before it; for another identity, check which weights (live, EMA) and which route the configuration names",
    )


def validation_output(seen: Evidence) -> Finding | None:
    """Passes that failed, are partial or damaged, or were begun and never finished."""
    evidence: list[str] = []
    codes: list[int] = []
    for item in seen.passes:
        lines, code = _pass_lines(seen, item)
        evidence += lines
        codes += [code] if lines else []
    if not evidence:
        return None
    return Finding(
        "missing validation output",
        codes[0],
        evidence,
        "read the manifests of the failed slots; sampled latents beside the pass are kept, so running the same command again "
        "only repeats what failed. A partial pass is published: remove its directory to make it again",
    )


def data(seen: Evidence) -> Finding | None:
    """An index, shard, video, camera or caption that cannot be used."""
    if seen.kind != DataError.kind or PEERS_DIFFER in seen.message:
        return None
    advice = "repair or remove what the message names; `solarwm data inspect` checks an index and its shards"
    return Finding("data", DataError.exit_code, seen.record_lines(), advice)


def disk(seen: Evidence) -> Finding | None:
    """A disk without room for the next save."""
    if seen.kind != ArtifactError.kind or not _about_disk(seen.message):
        return None
    advice = "make room (docs/how-to/recover-after-a-kill.md says what may go) and run the same command again"
    return Finding("disk", ArtifactError.exit_code, seen.record_lines(), advice)


def lost_rank(seen: Evidence) -> Finding | None:
    """Processes that ended without a word, or connections that broke."""
    killed = seen.state.state == "failed" and seen.attempt.result.get("status") != "failed"
    broken = seen.kind == DistributedError.kind and PEERS_DIFFER not in seen.message
    if not killed and (not broken or seen.message.startswith(HANG)):
        return None
    evidence = seen.record_lines() + ([seen.state.detail] if killed else [])
    evidence += [
        f"rank {rank.rank} (process {rank.pid} on {rank.host}) is gone; its last heartbeat: {place(vars(rank))}"
        for rank in seen.state.ranks
        if killed and rank.alive is False
    ][:SHOWN]
    return Finding(
        "lost rank",
        DistributedError.exit_code,
        evidence + seen.log_lines(),
        "ask the system who killed it (kernel log for out of memory, the queue's time limit, a reboot) and run the same command "
        "again: it continues from the newest save",
    )


def configuration(seen: Evidence) -> Finding | None:
    """What the program refused to start with, told in its record or only in its log."""
    refused = seen.kind == ConfigError.kind
    logged = seen.log.error if seen.log and seen.kind is None else None
    silent = seen.state.state in ("never started", "complete", "preempted", "stopped")
    told = bool(logged and seen.message and " ".join(seen.message.split()) in logged)
    if not refused and not (logged and silent and not told):
        return None
    evidence = seen.record_lines() if refused else seen.log_lines()
    return Finding(
        "configuration" if refused else "refused before it started",
        ConfigError.exit_code,
        evidence,
        "change what the message names; nothing was written",
    )


def bug(seen: Evidence) -> Finding | None:
    """Anything else that failed."""
    if seen.state.state != "failed":
        return None
    evidence = seen.record_lines() + seen.log_lines()
    return Finding(
        "a bug in this program", seen.exit_code or 1, evidence, "report it with the traceback from the log"
    )


BOUNDARIES: tuple[Callable[[Evidence], Finding | None], ...] = (
    non_finite,
    out_of_memory,
    hang,
    peers_differ,
    checkpoint_load,
    validation_output,
    data,
    disk,
    lost_rank,
    configuration,
)


def _non_finite_lines(dump: Dump) -> Iterator[str]:
    content = dump.content
    yield _dump_line(dump, "quantity", "bad_ranks", "learning_rate")
    samples = content.get("samples", [])
    bad = [sample for sample in samples if isinstance(sample.get("loss"), str)] or samples
    for sample in bad[:SHOWN]:
        norms = [norm for norm in sample.get("camera_translation_norms", []) if isinstance(norm, int | float)]
        camera = f", camera up to {max(norms):.3g} from the first frame" if norms else ""
        yield (
            f"  sample {sample.get('sample_id')} from frame {sample.get('start_frame')}: loss {sample.get('loss')}, timestep "
            f"{sample.get('timestep')}{camera}"
        )
    for kind in ("bad_gradients", "bad_parameters"):
        if tensors := content.get(kind):
            names = ", ".join(str(tensor.get("name")) for tensor in tensors[:3])
            yield f"  {kind.replace('_', ' ')}: {len(tensors)}, first {names}"


def _dump_line(dump: Dump, *keys: str) -> str:
    step, rank = dump.order
    facts = [
        f"{key.replace('_', ' ')} {dump.content[key]}" for key in keys if dump.content.get(key) is not None
    ]
    return f"{dump.path}: step {step}, rank {rank}" + "".join(f", {fact}" for fact in facts)


def _has_bad(statistics: dict[str, Any] | None) -> bool:
    return bool(statistics and (statistics.get("nan") or statistics.get("inf")))


def _about_disk(message: str) -> bool:
    return any(words in message for words in DISK)


def _pass_lines(seen: Evidence, item: Pass) -> tuple[list[str], int]:
    """Evidence that a pass is not what it should be, and the exit code of its first failure; none for one in the making."""
    writing = unfinished(item.path)
    if item.status == "complete" or any(alive for _, alive in writing):
        return [], 0
    where = f"step {item.step}, pass {item.name}"
    failed = (item.summary or {}).get("failed") or failed_slots(item.path)
    lines = [
        f"{where}, slot {slot['slot']} ({slot['sample_id']}): {slot['kind']}: {slot['message']}"
        for slot in failed[:SHOWN]
    ]
    code = failed[0]["exit_code"] if failed else ArtifactError.exit_code
    if item.status in ("failed", "damaged"):
        lines.append(f"{where}: {item.status}: {item.problem}")
    lines += [f"{path}: a write that nobody finishes" for path, _ in writing]
    if item.status == "partial" and not failed:
        slots = (item.summary or {}).get("slots", {})
        lines.append(f"{where}: {slots.get('skipped')} of {slots.get('total')} slots skipped")
    log = pass_log(seen.run_dir, item.step, item.name)
    if log is not None and log.error and item.status != "partial":
        lines.append(f"{where}: {log.path}: {log.error}")
    return lines, code
