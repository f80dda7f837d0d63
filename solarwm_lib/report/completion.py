"""The completion report of a run: what was done, how it ended, what is left to worry about. (spec operations 12.4)

It is a view of the run's artifacts: the same artifacts give the same text, and nothing in it is typed by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from solarwm_lib.artifacts import write_atomic
from solarwm_lib.report.facts import TAIL_STEPS, Pass, RunFacts, read_run, seconds_lost, setting

SMALL_TEST_SET = 4
CAMERA_MARGIN_DB = 1.0
PACKAGES = ("torch", "diffusers", "transformers", "snakemake")


def write_completion_report(run_dir: Path | str, out: Path | str) -> Path:
    """Write `completion-report.md` of a run at `out` and return its path.

    Raises ConfigError if `run_dir` is not a run directory.
    """
    write_atomic(out, completion_report(read_run(run_dir)))
    return Path(out)


def completion_report(run: RunFacts) -> str:
    """Return the report as Markdown."""
    sections = (
        ("Result", _result(run)),
        ("Action and route", _route(run)),
        ("Differences from the released recipe", _deviations(run)),
        ("Environment and code", _environment(run)),
        ("Scale", _scale(run)),
        ("Initialisation and resume", _resume(run)),
        ("Training", _training(run)),
        ("Time without steps", _time_lost(run)),
        ("Checkpoints", _checkpoints(run)),
        ("Validation", _validation(run)),
        ("Failed slots", _failed_slots(run)),
        ("Remaining risks", _bullets(risks(run), none="None found by the checks of this report.")),
    )
    parts = [f"# Completion report: {run.name}"]
    parts += [f"## {title}\n\n{body}" for title, body in sections]
    return "\n\n".join(parts) + "\n"


def risks(run: RunFacts) -> Iterator[str]:
    """Yield what a reader of the result should know before relying on it, worst first."""
    for checkpoint in run.checkpoints:
        if checkpoint.problem:
            yield f"checkpoint {checkpoint.name} does not verify: {checkpoint.problem}"
    for item in run.passes:
        where = f"validation pass {item.name} of step {item.step}"
        if item.problem:
            yield f"{where} is {item.status}: {item.problem}"
        elif item.status != "complete":
            yield f"{where} is {item.status}: its means cover only the slots that are ok"
        if (without := _slots(item, "ok") - item.comparisons) > 0:
            yield f"{where}: {without} slots have no comparison video"
    final, planned = run.final, setting(run.config, "train.max_steps")
    if final is None:
        yield "no checkpoint verifies: there is no result yet"
    elif planned and final.step < planned:
        yield (
            f"the learning-rate schedule is planned for {planned} steps and the last checkpoint is of step {final.step}: "
            "the rate had not come down"
        )
    if final is not None and final.thinned:
        yield f"the last checkpoint, {final.name}, was thinned: training cannot go on from it"
    if run.checkpoints and not run.passes:
        yield "nothing was validated"
    yield from _quality_risks(run)
    replaced = (run.records[-1].get("replaced") or {}) if run.records else {}
    if any(replaced.values()):
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(replaced.items()) if count)
        yield f"other clips stood in for some that could not be used: {counts}"
    result = run.attempts[-1].result if run.attempts else {}
    if result.get("status") in ("running", "failed"):
        detail = f" ({result['message']})" if result.get("message") else ""
        yield f"the newest attempt ended {result['status']!r}{detail}"
    source = run.launch.get("source") or {}
    if run.launch and not source.get("available"):
        yield "the code revision is unknown: the package did not run from a git checkout"
    elif run.launch and not source.get("clean"):
        yield "the code had uncommitted changes"
    if len({a.manifest["source"].get("commit") for a in run.attempts if a.manifest.get("source")}) > 1:
        yield "attempts of this run used different code revisions"


def _quality_risks(run: RunFacts) -> Iterator[str]:
    last = max((item.step for item in run.passes), default=None)
    newest = [item for item in run.passes if item.step == last and item.summary]
    shuffled = [item for item in newest if _camera(item) == "shuffled"]
    for item in newest:
        margin = item.mean("margin_db")
        if item in shuffled or margin is None:
            continue
        if margin <= 0:
            yield f"pass {item.name} of step {item.step} does not beat repeating the first frame ({margin:+.2f} dB)"
        for other in shuffled:
            gain = (item.mean("psnr") or 0) - (other.mean("psnr") or 0)
            if _weights(item) == _weights(other) and gain < CAMERA_MARGIN_DB:
                yield f"pass {item.name} gains {gain:+.2f} dB over shuffled cameras: the camera hardly steers the result"
    if newest and newest[0].summary and newest[0].summary["slots"]["total"] < SMALL_TEST_SET:
        yield f"validation cases: {newest[0].summary['slots']['total']}, too few for a conclusion"


def _result(run: RunFacts) -> str:
    best = max(
        (item for item in run.passes if item.mean("margin_db") is not None and _camera(item) != "shuffled"),
        key=lambda item: (item.step, item.mean("margin_db") or 0),
        default=None,
    )
    reached = f"Step {run.final.step}" if run.final else "No complete checkpoint"
    text = f"**{reached}** of {setting(run.config, 'train.max_steps', 'unknown')} planned"
    if (loss := run.tail("loss")) is not None:
        text += f", loss {loss:.4f} (mean of the last {min(TAIL_STEPS, len(run.records))} steps)"
    if best is not None:
        text += (
            f". Pass {best.name} of step {best.step}: PSNR {best.mean('psnr'):.2f} dB, {best.mean('margin_db'):+.2f} dB over "
            "repeating the first frame"
        )
    return text + "."


def _route(run: RunFacts) -> str:
    config = run.config
    return _pairs(
        [
            ("action", config.get("action")),
            ("route", run.launch.get("route") or _final_run(run).get("route")),
            ("architecture", setting(config, "model.architecture")),
            (
                "clip",
                f"{setting(config, 'data.pixel_frames')} frames of {setting(config, 'data.width')}x"
                f"{setting(config, 'data.height')} at {setting(config, 'data.fps')} fps",
            ),
            ("data", _input(run, "dataset")),
            ("base weights", _input(run, "assets")),
            (
                "configuration",
                _digest(run.launch.get("semantic_digest") or _final_run(run).get("semantic_digest")),
            ),
        ]
    )


def _environment(run: RunFacts) -> str:
    launch = run.launch
    if not launch:
        return "No launch manifest was found."
    environment, source = launch.get("environment") or {}, launch.get("source") or {}
    packages = environment.get("packages") or {}
    commit = source.get("commit") or "unknown"
    devices = [device["name"] for device in environment.get("devices") or []]
    cpu = environment.get("cpu") or {}
    return _pairs(
        [
            ("solarwm", launch.get("version")),
            (
                "code revision",
                f"{commit}{'' if source.get('clean') else ' with uncommitted changes'}"
                if source.get("available")
                else "unknown",
            ),
            ("python", environment.get("python_version")),
            ("packages", ", ".join(f"{name} {packages[name]}" for name in PACKAGES if name in packages)),
            (
                "device",
                ", ".join(sorted(set(devices)))
                or f"CPU ({cpu.get('usable')} usable of {cpu.get('logical')})",
            ),
            ("image", (launch.get("runtime") or {}).get("declared_image")),
        ]
    )


def _scale(run: RunFacts) -> str:
    world = run.launch.get("world") or {}
    size = world.get("world_size") or setting(run.in_force, "distributed.world_size", 1)
    parallel = world.get("sequence_parallel_size") or setting(
        run.in_force, "distributed.sequence_parallel_size", 1
    )
    return _pairs(
        [
            ("world size", size),
            ("nodes", world.get("nodes")),
            ("sequence-parallel size", parallel),
            ("data-parallel size", size // parallel),
            ("micro batch", setting(run.in_force, "train.micro_batch_size")),
            ("gradient accumulation", setting(run.in_force, "train.gradient_accumulation_steps")),
            ("global batch", setting(run.in_force, "train.global_batch_size")),
            ("strategy", setting(run.in_force, "train.strategy")),
            ("precision", setting(run.in_force, "train.precision")),
        ]
    )


def _resume(run: RunFacts) -> str:
    checkpoint = run.config.get("checkpoint") or {}
    weights = checkpoint.get("weights")
    weights = ", ".join(weights) if isinstance(weights, list) else weights
    mode = checkpoint.get("mode") or "none"
    rows = [
        (
            "initial weights",
            "base weights" if mode == "none" else f"{mode} from {checkpoint.get('path')} ({weights})",
        ),
        ("average (EMA)", _average(run)),
        ("restarts", _restarts(run)),
    ]
    lines = [_pairs(rows)]
    if run.attempts:
        table = []
        for attempt in run.attempts:
            end = attempt.result
            table.append(
                (
                    attempt.name,
                    attempt.manifest.get("started") or end.get("started"),
                    attempt.manifest.get("until_step"),
                    end.get("status") or "no record",
                    end.get("exit_code"),
                    _duration(end.get("seconds")),
                )
            )
        lines.append(_table(("attempt", "started", "until step", "ended", "exit code", "time"), table))
    return "\n\n".join(lines)


def _average(run: RunFacts) -> str | None:
    """The average that is saved beside the live weights."""
    ema = setting(run.config, "train.ema") or {}
    if not ema:
        return None
    updates = ((run.final.state if run.final else None) or {}).get("ema_updates")
    return f"decay {ema.get('decay')}, from step {ema.get('start_step')}" + (
        f", {updates} updates in the last checkpoint" if updates is not None else ""
    )


def _restarts(run: RunFacts) -> str:
    steps = [event.get("step") for event in run.events if event["event"] == "restart"]
    return f"{len(steps)}, after steps {', '.join(map(str, steps))}" if steps else "none"


def _time_lost(run: RunFacts) -> str:
    lost = seconds_lost(run.events)
    if not lost:
        return "None recorded."
    in_steps = sum(record["step_seconds"] for record in run.records)
    rows = []
    for event, seconds in sorted(lost.items()):
        count = sum(item["event"] == event for item in run.events)
        share = f"{seconds / in_steps:.1%}" if in_steps else None
        rows.append((event.replace("_", " "), count, _duration(seconds), share))
    return _table(("what", "times", "time", "of the time in steps"), rows)


def _training(run: RunFacts) -> str:
    if not run.records:
        return "No step was recorded."
    first, last = run.records[0], run.records[-1]
    data = run.tail("data_seconds")
    return _pairs(
        [
            ("final step", last["step"]),
            ("loss, first and final step", f"{first['loss']:.4f}, {last['loss']:.4f}"),
            (
                f"loss, mean of the last {min(TAIL_STEPS, len(run.records))} steps",
                _number(run.tail("loss"), ".4f"),
            ),
            ("gradient norm before clipping", _number(run.tail("gradient_norm"), ".3f")),
            ("learning rate of the last step", _number(last.get("learning_rate"), ".3e")),
            ("step time, median", _number(run.step_seconds(), ".3f", " s")),
            ("waiting for data", _number(data, ".3f", " s per step")),
            ("throughput", _number(run.tail("samples_per_second"), ".2f", " samples/s")),
            ("peak memory of rank 0", _bytes(max(record.get("memory_bytes") or 0 for record in run.records))),
            ("preflight", _preflight(run)),
            ("time in steps", _duration(sum(record["step_seconds"] for record in run.records))),
        ]
    )


def _checkpoints(run: RunFacts) -> str:
    good = [item for item in run.checkpoints if item.problem is None]
    rows = [
        (
            item.step,
            item.status,
            _bytes(item.bytes),
            (item.state or {}).get("ema_updates"),
            _digest(item.digest),
        )
        for item in run.checkpoints
    ]
    thinned = sum(item.status == "thinned" for item in good)
    count = f"{len(good)} complete"
    count += f", {thinned} of them thinned to their weights" if thinned else ""
    count += f", {len(rows) - len(good)} not" if len(rows) > len(good) else ""
    return f"{count}." + (
        "\n\n" + _table(("step", "status", "size", "EMA updates", "marker"), rows) if rows else ""
    )


def _validation(run: RunFacts) -> str:
    if not run.passes:
        return "No pass was made."
    complete = sum(item.status == "complete" for item in run.passes)
    rows = []
    for item in run.passes:
        slots = (item.summary or {}).get("slots") or {}
        rows.append(
            (
                item.step,
                item.name,
                _weights(item),
                _camera(item),
                item.status,
                f"{slots['ok']}/{slots['total']}" if slots else None,
                _number(item.mean("psnr"), ".2f"),
                _number(item.mean("ssim"), ".3f"),
                _number(item.mean("repeat_first_frame_psnr"), ".2f"),
                _number(item.mean("margin_db"), "+.2f"),
                _number(item.mean("codec_ceiling_psnr"), ".2f"),
            )
        )
    head = (
        "step",
        "pass",
        "weights",
        "camera",
        "status",
        "slots",
        "PSNR dB",
        "SSIM",
        "repeat first frame dB",
        "margin dB",
        "codec limit dB",
    )
    videos, slots = sum(item.comparisons for item in run.passes), sum(_slots(x, "total") for x in run.passes)
    counts = f"{complete} of {len(rows)} passes complete, {videos} of {slots} slots have a comparison video."
    return f"{counts}\n\n{_table(head, rows)}"


def _failed_slots(run: RunFacts) -> str:
    rows = [
        (item.step, item.name, failed["slot"], failed["sample_id"], failed["kind"], failed["message"])
        for item in run.passes
        for failed in (item.summary or {}).get("failed", ())
    ]
    return _table(("step", "pass", "slot", "sample", "kind", "reason"), rows) if rows else "None."


def _slots(item: Pass, status: str) -> int:
    return int(((item.summary or {}).get("slots") or {}).get(status, 0))


def _camera(item: Pass) -> str | None:
    return setting(item.summary or {}, "pass.camera")


def _weights(item: Pass) -> str | None:
    return setting(item.summary or {}, "pass.weights")


def _preflight(run: RunFacts) -> str | None:
    measured = (run.preflight or {}).get("measured")
    if not measured:
        return "none that verifies"
    return f"passed, {measured['step_seconds']:.3f} s per step, checkpoint reloaded {measured['checkpoint_reloaded']}"


def _final_run(run: RunFacts) -> dict[str, Any]:
    return ((run.final.state if run.final else None) or {}).get("run") or {}


def _input(run: RunFacts, name: str) -> str | None:
    facts = (run.launch.get("inputs") or {}).get(name) or {}
    return f"{Path(facts['path']).name} {_digest(facts['digest'])}" if facts.get("digest") else None


def _deviations(run: RunFacts) -> str:
    rows = [(f"`{d['key']}`", d["value"], d["released"]) for d in run.launch.get("deviations") or ()]
    return _table(("key", "here", "released"), rows) if rows else "None recorded."


def _digest(value: str | None) -> str | None:
    return f"`{value[:16]}`" if value else None


def _number(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else f"{value:{form}}{unit}"


def _bytes(value: int) -> str | None:
    return f"{value / 2**20:.1f} MiB" if value else None


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _pairs(rows: Iterable[tuple[str, Any]]) -> str:
    return (
        "\n".join(f"- {name}: {_cell(value)}" for name, value in rows if value not in (None, ""))
        or "Nothing is known."
    )


def _bullets(lines: Iterable[str], none: str) -> str:
    return "\n".join(f"- {_cell(line)}" for line in lines) or none


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(_cell(value).replace("|", "\\|") for value in row) + " |" for row in lines
    )


def _cell(value: Any) -> str:
    return "-" if value is None or value == "" else " ".join(str(value).split())
