"""Side by side: several passes over the same cases as videos, tables and one plot. No model is loaded.

Numbers come from the passes' own per-frame statistics, measured on pixels before encoding; only pictures are read back
from their videos. `summary.csv` has a row per pass and one for the baseline "repeat first frame".
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from solarwm_lib import artifacts
from solarwm_lib.data.video import decode, mp4_bytes
from solarwm_lib.inference.evaluation import COMPLETE, PARTIAL
from solarwm_lib.inference.latents import slot_name
from solarwm_lib.inference.metrics import repeat_first_frame
from solarwm_lib.inference.panels import Panel, difference, grid_frames
from solarwm_lib.inference.slots import COMPARE_CRF, csv_text, score_notes
from solarwm_lib.inference.strips import strip_png
from solarwm_lib.runtime.errors import ArtifactError, ConfigError
from solarwm_lib.runtime.manifests import artifact_dir

SCHEMA = "solarwm.comparison.v1"
SOURCES = ("solarwm.validation.v1", "solarwm.inference.v1")
BASELINE = "repeat_first_frame"
METRIC_COLUMNS = (
    "pass",
    "slot",
    "sample_id",
    "start_frame",
    "status",
    "psnr",
    "ssim",
    "repeat_first_frame_psnr",
    "repeat_first_frame_ssim",
    "codec_ceiling_psnr",
    "margin_db",
    "margin_over_shuffled_db",
    "error",
)
SUMMARY_COLUMNS = (
    "pass",
    "status",
    "n",
    "cases",
    "weights_id",
    "psnr",
    "ssim",
    "repeat_first_frame_psnr",
    "margin_db",
    "shuffled_pass",
    "margin_over_shuffled_db",
    "codec_ceiling_psnr",
    "same_plan",
)

STRIP_CASES = 4
Case = tuple[str, int, int]


@dataclass(frozen=True)
class PassResult:
    """One pass of a validation or inference artifact. `slots` holds the slot manifests by case."""

    label: str
    artifact: artifacts.Artifact
    prefix: str
    summary: dict[str, Any]
    slots: dict[Case, dict[str, Any]]

    @property
    def settings(self) -> dict[str, Any]:
        return self.summary["pass"]

    def member(self, manifest: Mapping[str, Any], name: str) -> Path | None:
        """Return the path of a slot's file, None if the slot has none."""
        if name not in manifest["files"]:
            return None
        return self.artifact.file(f"{self.prefix}{slot_name(manifest['slot'])}/{name}")

    def metrics(self, case: Case) -> dict[str, float]:
        """Return the case's metrics; empty unless its status is ok."""
        return self.slots.get(case, {}).get("metrics") or {}


def compare(sources: Sequence[Path | str], out_dir: Path | str) -> artifacts.Artifact:
    """Publish the comparison of the passes, two or more in all, of validation or inference artifacts at `out_dir`.

    Passes are matched case by case (sample, start frame, occurrence); one whose plan differs from the first's is
    labelled so. A comparison with a missing or failed slot has status partial. Raises ConfigError for fewer than two
    passes, ArtifactError for something else than such artifacts or no case in common.
    """
    paths = [artifact_dir(source) for source in sources]
    found = [artifacts.read(path) for path in paths]
    if len({artifact.digest for artifact in found}) != len(found):
        raise ConfigError("the same artifact is given twice; a comparison needs different ones")
    identity = {"sources": [artifact.digest for artifact in found]}
    done = artifacts.reissue(out_dir, SCHEMA, identity, parents=paths)
    if done is not None:
        return done
    passes = load_passes(found)
    if len(passes) < 2:
        raise ConfigError(
            f"a comparison needs two or more passes, found {len(passes)}; name another artifact"
        )
    cases = list(dict.fromkeys(case for result in passes for case in result.slots))
    if not any(all(case in result.slots for result in passes) for case in cases):
        raise ArtifactError(
            f"{', '.join(result.label for result in passes)} have no case in common: their plans chose other clips"
        )
    rows = metric_rows(passes, cases)
    table = summary_rows(passes, cases)
    partial = any(result.summary["status"] != COMPLETE for result in passes) or any(
        case not in result.slots for result in passes for case in cases
    )
    with artifacts.Transaction(out_dir, SCHEMA, identity, parents=paths) as transaction:
        for number, case in enumerate(cases):
            fps = next(r.slots[case]["fps"] for r in passes if case in r.slots)
            frames = case_frames(passes, case)
            if frames is not None:
                video = mp4_bytes(frames, fps, crf=COMPARE_CRF)
                transaction.write_bytes(f"{slot_name(number)}/compare.mp4", video)
            transaction.write_json(f"{slot_name(number)}/manifest.json", _case_manifest(passes, case, number))
        transaction.write_text("metrics.csv", csv_text(METRIC_COLUMNS, rows))
        transaction.write_text("summary.csv", csv_text(SUMMARY_COLUMNS, table))
        transaction.write_bytes("metrics.png", plot_bytes(passes))
        if strips := [rows for case in cases[:STRIP_CASES] if (rows := strip_rows(passes, case))]:
            transaction.write_bytes("strips.png", strip_png(strips))
        transaction.write_json(
            "summary.json",
            {
                "schema": "solarwm.comparison-summary.v1",
                "status": PARTIAL if partial else COMPLETE,
                "cases": len(cases),
                "plans_differ": len({result.summary["plan_digest"] for result in passes}) > 1,
                "passes": table,
                "failed": [
                    {"pass": result.label, **failed}
                    for result in passes
                    for failed in result.summary["failed"]
                ],
            },
        )
    return transaction.artifact


def strip_rows(passes: Sequence[PassResult], case: Case) -> list[tuple[str, np.ndarray]]:
    """Return the ground truth of a case and what each pass made of it, as labelled clips; empty if none has a video."""
    rows: list[tuple[str, np.ndarray]] = []
    for result in passes:
        manifest = result.slots.get(case)
        truth = manifest and result.member(manifest, "ground_truth.mp4")
        generated = manifest and result.member(manifest, "generated.mp4")
        if truth and not rows:
            rows.append((f"{case[0]}: ground truth", decode(truth)))
        if generated:
            psnr = result.metrics(case).get("psnr")
            rows.append(
                (result.label + (f", PSNR {psnr:.2f} dB" if psnr is not None else ""), decode(generated))
            )
    return rows


def load_passes(found: Sequence[artifacts.Artifact]) -> list[PassResult]:
    """Return every pass of the artifacts, with distinct labels."""
    raw: list[tuple[artifacts.Artifact, str, dict[str, Any]]] = []
    for artifact in found:
        if artifact.schema not in SOURCES:
            raise ArtifactError(
                f"{artifact.path}: schema is {artifact.schema}, a comparison takes {' or '.join(SOURCES)}"
            )
        members = [m.path for m in artifact.members if m.path.split("/")[-1] == "summary.json"]
        for member in members:
            raw.append((artifact, member[: -len("summary.json")], _json(artifact.file(member))))
    results = []
    for (artifact, prefix, summary), label in zip(
        raw, labels([summary for _, _, summary in raw]), strict=True
    ):
        lines = artifact.file(f"{prefix}ordered-manifest.jsonl").read_text("utf-8").splitlines()
        slots = {case_key(manifest["case"]): manifest for manifest in map(json.loads, lines)}
        results.append(PassResult(label, artifact, prefix, summary, slots))
    return results


def labels(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a distinct label per pass: its name, and as far as needed the run, the checkpoint and a number."""
    several = len({summary["run"] for summary in summaries}) > 1
    runs = [summary["run"] if several else "" for summary in summaries]
    checkpoints = [summary["weights_id"].split("@")[0] for summary in summaries]
    found = [_joined(summary["pass"]["name"], run) for summary, run in zip(summaries, runs, strict=True)]
    for more in (checkpoints, [str(number) for number in range(1, len(summaries) + 1)]):
        repeated = {label for label in found if found.count(label) > 1}
        found = [
            _joined(label, suffix) if label in repeated else label
            for label, suffix in zip(found, more, strict=True)
        ]
    return found


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def case_key(case: Mapping[str, Any]) -> Case:
    """Return what two plans must share for their clips to be the same."""
    return case["sample_id"], case["start_frame"], case["occurrence"]


def shuffled_of(result: PassResult, passes: Sequence[PassResult]) -> PassResult | None:
    """Return the pass that differs from `result` only in using shuffled cameras, if it is among `passes`."""

    def key(other: PassResult) -> tuple[Any, ...]:
        settings = {k: v for k, v in other.settings.items() if k not in ("name", "camera")}
        return other.summary["plan_digest"], other.summary["weights_id"], sorted(settings.items())

    if result.settings["camera"] != "recorded":
        return None
    return next((o for o in passes if o.settings["camera"] == "shuffled" and key(o) == key(result)), None)


def metric_rows(passes: Sequence[PassResult], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return a row per pass and case; a case a pass does not have is `missing`."""
    rows = []
    for result in passes:
        shuffled = shuffled_of(result, passes)
        for case in cases:
            manifest, values = result.slots.get(case), result.metrics(case)
            other = shuffled.metrics(case) if shuffled else {}
            margin = values["psnr"] - other["psnr"] if values and other else None
            error = (manifest or {}).get("error") or {}
            rows.append(
                {
                    "pass": result.label,
                    "slot": manifest["slot"] if manifest else None,
                    "sample_id": case[0],
                    "start_frame": case[1],
                    "status": manifest["status"] if manifest else "missing",
                    **values,
                    "margin_over_shuffled_db": margin,
                    "error": error.get("message"),
                }
            )
    return rows


def summary_rows(passes: Sequence[PassResult], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return a row per pass (means over its cases that are ok) and a last one for the baseline."""
    rows = []
    baseline: dict[Case, dict[str, float]] = {}
    for result in passes:
        good = {case: result.metrics(case) for case in cases if result.metrics(case)}
        baseline |= good
        shuffled = shuffled_of(result, passes)
        # Paired: a case counts only where both cameras have a result.
        margins = [
            values["psnr"] - other["psnr"]
            for case, values in good.items()
            if shuffled is not None and (other := shuffled.metrics(case))
        ]
        rows.append(
            {
                "pass": result.label,
                "status": COMPLETE if len(good) == len(cases) else PARTIAL,
                "n": len(good),
                "cases": len(cases),
                "weights_id": result.summary["weights_id"],
                **{
                    name: _mean([values[name] for values in good.values()])
                    for name in ("psnr", "ssim", "repeat_first_frame_psnr", "margin_db", "codec_ceiling_psnr")
                },
                "shuffled_pass": shuffled.label if shuffled else None,
                "margin_over_shuffled_db": _mean(margins),
                "same_plan": result.summary["plan_digest"] == passes[0].summary["plan_digest"],
            }
        )
    rows.append(
        {
            "pass": BASELINE,
            "status": COMPLETE if len(baseline) == len(cases) else PARTIAL,
            "n": len(baseline),
            "cases": len(cases),
            "psnr": _mean([values["repeat_first_frame_psnr"] for values in baseline.values()]),
            "ssim": _mean([values["repeat_first_frame_ssim"] for values in baseline.values()]),
            "same_plan": True,
        }
    )
    return rows


def case_frames(passes: Sequence[PassResult], case: Case) -> Any:
    """Return the frames of a case's video: clips above, their difference from the ground truth below.

    None if no pass has the ground truth of the case.
    """
    truth_path = next(
        (p for r in passes if case in r.slots and (p := r.member(r.slots[case], "ground_truth.mp4"))), None
    )
    if truth_path is None:
        return None
    truth = decode(truth_path)
    name = f"{case[0]} from frame {case[1]}"
    held = np.ascontiguousarray(repeat_first_frame(truth))
    above = [Panel("ground truth", truth, [f"{name} · {i}/{len(truth) - 1}" for i in range(len(truth))])]
    below = [
        Panel("first frame held: |difference| x2", difference(truth, held), _baseline_notes(passes, case))
    ]
    for result in passes:
        manifest = result.slots.get(case)
        path = result.member(manifest, "generated.mp4") if manifest else None
        title = result.label
        if result.summary["plan_digest"] != passes[0].summary["plan_digest"]:
            title += " (other plan)"
        if manifest is None or path is None:
            reason = (
                "not in this pass"
                if manifest is None
                else (manifest["error"] or {}).get("message", "skipped")
            )
            above.append(Panel(title, truth[:0], [reason] * len(truth)))
            below.append(Panel("|difference| x2", truth[:0]))
            continue
        generated, frames = decode(path), frame_table(result, manifest)
        bad = frozenset(np.flatnonzero(frames["finite_fraction"] < 1).tolist())
        above.append(Panel(title, generated, score_notes(frames["psnr"], frames["ssim"], len(truth)), bad))
        margin = frames["psnr"] - frames["repeat_first_frame_psnr"]
        notes = [
            f"{v:+.2f} dB over first frame held" if i and math.isfinite(v) else ""
            for i, v in enumerate(margin)
        ]
        below.append(Panel("|difference| x2", difference(truth, generated), notes, bad))
    return grid_frames([above, below])


def _baseline_notes(passes: Sequence[PassResult], case: Case) -> list[str]:
    result = next(r for r in passes if case in r.slots and r.member(r.slots[case], "frames.csv"))
    values = frame_table(result, result.slots[case])["repeat_first_frame_psnr"]
    return [f"PSNR {v:.2f} dB" if i and math.isfinite(v) else "" for i, v in enumerate(values)]


def frame_table(result: PassResult, manifest: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the columns of a slot's `frames.csv` as float arrays; empty cells are NaN."""
    path = result.member(manifest, "frames.csv")
    assert path is not None  # written together with the videos
    rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8"))))
    return {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}


def plot_bytes(passes: Sequence[PassResult]) -> bytes:
    """Return a PNG of PSNR over frames: mean over the cases of each pass, with baseline and codec ceiling."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shared: dict[Case, dict[str, np.ndarray]] = {}
    for result in passes:
        tables = {
            case: frame_table(result, manifest)
            for case, manifest in result.slots.items()
            if manifest["status"] == "ok"
        }
        shared |= tables
        if tables:
            style = "--" if result.settings["camera"] == "shuffled" else "-"
            _curve(
                axes, [table["psnr"] for table in tables.values()], f"{result.label} (n={len(tables)})", style
            )
    if shared:
        grey = {"color": "0.45", "linewidth": 1}
        _curve(axes, [t["repeat_first_frame_psnr"] for t in shared.values()], "first frame held", ":", **grey)
        _curve(axes, [t["codec_ceiling_psnr"] for t in shared.values()], "codec ceiling", "-.", **grey)
        axes.legend(fontsize=8)
    axes.set(
        xlabel="frame (0 is given)",
        ylabel="PSNR (dB), mean over cases",
        title="Generated against ground truth",
    )
    axes.grid(alpha=0.3)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _curve(axes: Any, curves: Sequence[np.ndarray], label: str, style: str, **look: Any) -> None:
    """Draw the mean of curves that may end at different frames, without the given frame 0."""
    length = max(len(curve) for curve in curves)
    padded = np.full((len(curves), length), np.nan)
    for row, curve in zip(padded, curves, strict=True):
        row[: len(curve)] = curve
    # Frames behind the ground truth have no score in any curve.
    scored = 1 + np.flatnonzero(np.isfinite(padded[:, 1:]).any(axis=0))
    axes.plot(scored, np.nanmean(padded[:, scored], axis=0), style, label=label, **look)


def _case_manifest(passes: Sequence[PassResult], case: Case, number: int) -> dict[str, Any]:
    present = {result.label: result.slots.get(case) for result in passes}
    return {
        "schema": "solarwm.comparison-slot.v1",
        "slot": number,
        "sample_id": case[0],
        "start_frame": case[1],
        "status": "ok" if all(m and m["status"] == "ok" for m in present.values()) else "partial",
        "passes": {
            label: {key: manifest[key] for key in ("slot", "status", "error", "metrics")}
            if manifest
            else None
            for label, manifest in present.items()
        },
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())
