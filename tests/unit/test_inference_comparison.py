"""Passes of a comparison are told apart by as little text as it takes, and paired with the right shuffled pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from solarwm_lib.artifacts import Artifact
from solarwm_lib.inference.comparison import PassResult, labels, metric_rows, shuffled_of, summary_rows


def summary(
    name: str, run: str = "a", checkpoint: str = "checkpoint_model_000001", **settings: Any
) -> dict[str, Any]:
    return {
        "pass": {"name": name, "camera": "recorded", "weights": "ema", **settings},
        "run": run,
        "weights_id": f"{checkpoint}@0#ema",
        "plan_digest": "p",
        "status": "complete",
        "failed": [],
    }


def result(label: str, psnr: dict[str, float | None], **changes: Any) -> PassResult:
    names = (
        "psnr",
        "ssim",
        "repeat_first_frame_psnr",
        "repeat_first_frame_ssim",
        "codec_ceiling_psnr",
        "margin_db",
    )
    slots = {
        (sample, 0, 0): {
            "slot": slot,
            "status": "ok" if value is not None else "error",
            "metrics": {**dict.fromkeys(names, 10.0), "psnr": value} if value is not None else None,
            "error": {"message": "broken"} if value is None else None,
        }
        for slot, (sample, value) in enumerate(psnr.items())
    }
    artifact = Artifact(Path("x"), "s.v1", {}, (), (), label)
    return PassResult(label, artifact, "", {**summary(label), **changes}, slots)


def test_labels_say_no_more_than_needed() -> None:
    later = "checkpoint_model_000002"
    assert labels([summary("live"), summary("ema")]) == ["live", "ema"]
    assert labels([summary("ema"), summary("ema", checkpoint=later), summary("live")]) == [
        "ema · checkpoint_model_000001",
        "ema · checkpoint_model_000002",
        "live",
    ]
    assert labels([summary("ema"), summary("ema", run="b")]) == ["ema · a", "ema · b"]
    assert labels([summary("ema"), summary("ema", run="b", checkpoint=later)]) == ["ema · a", "ema · b"]
    three = labels([summary("ema"), summary("ema", run="b"), summary("ema", checkpoint=later)])
    assert three == ["ema · a · checkpoint_model_000001", "ema · b", f"ema · a · {later}"]
    assert labels([summary("ema"), summary("live", run="b")]) == ["ema · a", "live · b"]
    same = "ema · checkpoint_model_000001"
    assert labels([summary("ema"), summary("ema")]) == [f"{same} · 1", f"{same} · 2"]


def test_shuffled_partner_differs_in_the_camera_only() -> None:
    plain = result("ema", {"x": 20.0})
    shuffled = result("mix", {"x": 15.0}, **{"pass": summary("mix", camera="shuffled")["pass"]})
    live = result("live", {"x": 15.0}, **{"pass": summary("s", camera="shuffled", weights="live")["pass"]})
    assert shuffled_of(plain, [live, plain, shuffled]) is shuffled
    assert shuffled_of(plain, [live, plain]) is None
    assert shuffled_of(shuffled, [plain, shuffled]) is None


def test_margins_are_paired_over_cases_both_passes_have() -> None:
    plain = result("ema", {"x": 20.0, "y": 30.0, "z": None})
    shuffled = result("mix", {"x": 15.0, "y": None}, **{"pass": summary("mix", camera="shuffled")["pass"]})
    passes, cases = [plain, shuffled], list(plain.slots)
    first, second, baseline = summary_rows(passes, cases)
    assert (first["n"], first["psnr"], first["margin_over_shuffled_db"]) == (2, 25.0, 5.0)
    assert [first["status"], second["status"], baseline["status"]] == ["partial"] * 3
    rows = {(row["pass"], row["sample_id"]): row for row in metric_rows(passes, cases)}
    assert rows["ema", "x"]["margin_over_shuffled_db"] == 5.0
    assert rows["ema", "y"]["margin_over_shuffled_db"] is None
    assert rows["ema", "z"]["error"] == "broken" and rows["mix", "z"]["status"] == "missing"
