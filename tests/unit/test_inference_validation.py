"""Validation and inference share one path, keep what they sampled, and end every slot in a manifest."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from solarwm_lib import artifacts
from solarwm_lib.data.index import read_index
from solarwm_lib.data.video import decode
from solarwm_lib.inference.comparison import compare
from solarwm_lib.inference.evaluation import find_pass, prepare
from solarwm_lib.inference.generate import Request, Sampling, load_models, sample_all
from solarwm_lib.inference.infer import infer
from solarwm_lib.inference.latents import LatentStore, beside
from solarwm_lib.inference.plan import freeze_plan, load_plan
from solarwm_lib.inference.validation import validate
from solarwm_lib.runtime import keyed
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, DataError, NonFiniteError
from solarwm_lib.training import checkpoint as checkpoints
from solarwm_lib.training.network import build_backbone
from solarwm_lib.training.setup import identity_of, read_inputs

PASSES = [
    {"name": "live", "weights": "live", "num_inference_steps": 2},
    {"name": "ema", "weights": "ema", "num_inference_steps": 2},
    {"name": "shuffled", "weights": "live", "num_inference_steps": 2, "camera": "shuffled"},
]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run with a checkpoint whose weights respond to cameras, and its frozen plan."""

    world: Any
    root: Path
    checkpoint: Path
    plan: Path

    def resolve(self, **changes: Any) -> Any:
        return self.world.resolve(self.root, **{"validation__passes": PASSES, **changes})

    def validate(self, name: str, out: Path, **changes: Any) -> artifacts.Artifact:
        return validate(self.resolve(**changes), self.checkpoint, self.plan, name, out)


def publish_checkpoint(resolved: Any, target: Path, damage: float = 0.0) -> Path:
    """Publish base weights plus keyed noise: live and EMA differ, and no output is zero as at initialisation."""
    base = dict(build_backbone(resolved, torch.device("cpu")).trainable())
    roles = {
        role: {
            name: value.detach()
            + 0.05 * torch.from_numpy(keyed.normal(tuple(value.shape), role, name))
            + damage
            for name, value in base.items()
        }
        for role in ("live", "ema")
    }
    state = checkpoints.State(1, 1, 4, 0.0, 4, run={"config": resolved.values})
    identity = {**identity_of(resolved, read_inputs(resolved)), "step": 1}
    checkpoints.save(target, checkpoints.Tensors(roles["live"], roles["ema"], {}), state, identity, [])
    return target


@pytest.fixture(scope="module")
def run(tiny_world: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("validated run")
    resolved = tiny_world.resolve(root, validation__passes=PASSES)
    plan = root / "validation" / "frozen-plan.json"
    freeze_plan(resolved, plan)
    return Run(tiny_world, root, publish_checkpoint(resolved, root / "checkpoint_model_000001"), plan)


@pytest.fixture(scope="module")
def live(run: Run) -> artifacts.Artifact:
    return run.validate("live", run.root / "validation" / "step_000001" / "live")


@pytest.fixture(scope="module")
def shuffled(run: Run) -> artifacts.Artifact:
    return run.validate("shuffled", run.root / "validation" / "step_000001" / "shuffled")


def manifest(artifact: artifacts.Artifact, slot: int = 0, prefix: str = "") -> dict[str, Any]:
    return json.loads(artifact.file(f"{prefix}slot-{slot:06d}/manifest.json").read_bytes())


def summary(artifact: artifacts.Artifact) -> dict[str, Any]:
    return json.loads(artifact.file("summary.json").read_bytes())


def latents_of(directory: Path, slot: int) -> bytes:
    return (directory / f"slot-{slot:06d}" / "latents.safetensors").read_bytes()


def test_pass_is_complete_with_videos_statistics_and_metrics(run: Run, live: artifacts.Artifact) -> None:
    assert summary(live)["status"] == "complete"
    assert summary(live)["slots"] == {"total": 2, "ok": 2, "error": 0, "skipped": 0}
    first = manifest(live)
    assert first["files"] == ["compare.mp4", "frames.csv", "generated.mp4", "ground_truth.mp4"]
    assert first["plan_digest"] == load_plan(run.plan)["payload_digest"]
    assert first["metrics"]["psnr"] - first["metrics"]["repeat_first_frame_psnr"] == pytest.approx(
        first["metrics"]["margin_db"]
    )
    assert first["metrics"]["codec_ceiling_psnr"] > first["metrics"]["psnr"]
    assert set(first["timings_s"]) == {"prepare", "sample", "decode", "measure"}
    assert decode(live.file("slot-000000/generated.mp4")).shape == (5, 32, 32, 3)
    assert len(live.file("ordered-manifest.jsonl").read_text().splitlines()) == 2
    assert len(live.file("slot-000000/frames.csv").read_text().splitlines()) == 1 + 5


def test_repeating_a_pass_returns_what_is_there(run: Run, live: artifacts.Artifact) -> None:
    assert run.validate("live", live.path).digest == live.digest


def test_kept_latents_are_decoded_without_sampling_again(
    run: Run, live: artifacts.Artifact, tmp_path: Path
) -> None:
    again = _from_kept_latents(run, tmp_path / "live", {0: 0.0})
    assert ["sample" in manifest(again, slot)["timings_s"] for slot in (0, 1)] == [False, True]
    for name in ("generated.mp4", "frames.csv"):
        there, here = (artifact.file(f"slot-000000/{name}").read_bytes() for artifact in (live, again))
        assert there == here


def test_kept_latents_of_another_pass_are_refused(run: Run, live: artifacts.Artifact, tmp_path: Path) -> None:
    _from_kept_latents(run, tmp_path / "live", {0: 0.0})
    shutil.rmtree(tmp_path / "live")
    with pytest.raises(ArtifactError, match=r"another identity .*pass\.name"):
        run.validate("ema", tmp_path / "live")


def _from_kept_latents(run: Run, out: Path, offsets: dict[int, float]) -> artifacts.Artifact:
    """Validate at `out` with the module's latents (plus an offset in one value) already there for some slots."""
    resolved = run.resolve()
    this = prepare(resolved, run.checkpoint, load_plan(run.plan), find_pass(resolved.config, "live"))
    source, target = (
        LatentStore(beside(path), this.identity(), this.parents())
        for path in (run.root / "validation" / "step_000001" / "live", out)
    )
    for slot, offset in offsets.items():
        tensor = source.load(slot)
        assert tensor is not None
        tensor[1, 0, 0, 0] += offset
        target.publish(slot, tensor)
    return run.validate("live", out)


def test_inference_has_the_same_latents_bit_for_bit(
    run: Run, live: artifacts.Artifact, tmp_path: Path
) -> None:
    values = run.resolve().values | {"action": "infer"}
    values["inference"] = {"sample_count": 2}
    values["checkpoint"] = {"path": str(run.checkpoint)}
    values["validation"] = values["validation"] | {"passes": PASSES[:2]}
    from solarwm_lib.config.load import resolve_values

    result = infer(resolve_values(values), tmp_path / "tour")
    assert {m.path.split("/")[0] for m in result.members} == {"live", "ema", "frozen-plan.json"}
    for slot in (0, 1):
        there = latents_of(beside(live.path), slot)
        assert latents_of(tmp_path / "tour.live.latents", slot) == there
        assert latents_of(tmp_path / "tour.ema.latents", slot) != there
    name = "slot-000000/generated.mp4"
    assert result.file(f"live/{name}").read_bytes() == live.file(name).read_bytes()
    assert json.loads(result.file("frozen-plan.json").read_bytes()) == load_plan(run.plan)
    both = compare([live.path, result.path], tmp_path / "both")
    assert not summary(both)["plans_differ"] and len(summary(both)["passes"]) == 3 + 1


def test_shuffled_pass_uses_the_next_cases_camera(
    live: artifacts.Artifact, shuffled: artifacts.Artifact
) -> None:
    assert [manifest(shuffled, slot)["camera"]["slot"] for slot in (0, 1)] == [1, 0]
    assert [manifest(live, slot)["camera"]["slot"] for slot in (0, 1)] == [0, 1]
    one, other = (beside(artifact.path) for artifact in (live, shuffled))
    assert latents_of(one, 0) != latents_of(other, 0)


def test_one_corrupt_video_ends_in_an_error_manifest_and_the_rest_goes_on(
    run: Run, live: artifacts.Artifact, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged data"
    shutil.copytree(run.world.dataset, damaged)
    case = load_plan(run.plan)["cases"][0]
    row = read_index(damaged / "test-index.jsonl")[case["row_ordinal"]]
    assert row.members is not None
    with open(damaged / row.shard, "r+b") as shard:
        shard.seek(row.members[row.video_member].offset + 100)
        shard.write(b"\xff" * 8)
    partial = run.validate("live", tmp_path / "live", data__root=str(damaged))
    assert summary(partial)["status"] == "partial"
    assert summary(partial)["slots"] == {"total": 2, "ok": 1, "error": 1, "skipped": 0}
    bad = manifest(partial, 0)
    assert (bad["status"], bad["error"]["kind"], bad["error"]["exit_code"]) == ("error", "data", 3)
    assert "sha256" in bad["error"]["message"] and bad["metrics"] is None and bad["files"] == []
    good, before = manifest(partial, 1)["metrics"], manifest(live, 1)["metrics"]
    assert good == pytest.approx(before, abs=0.05)


def test_non_finite_latents_are_an_error_one_can_see(
    run: Run, live: artifacts.Artifact, tmp_path: Path
) -> None:
    partial = _from_kept_latents(run, tmp_path / "live", {0: float("nan")})
    bad = manifest(partial, 0)
    assert (bad["status"], bad["error"]["kind"], bad["first_bad_frame"]) == ("error", "non_finite", 1)
    assert "latent frame 1 of 2" in bad["error"]["message"]
    assert bad["latents"]["finite_fraction"] < 1
    picture = decode(partial.file("slot-000000/compare.mp4"), [0, 1]).astype(int)
    alarm = (picture[..., 0] > 150) & (picture[..., 1:].max(axis=-1) < 110)
    assert alarm[0].sum() < alarm[1].sum() - 2000
    assert summary(partial)["status"] == "partial" and manifest(partial, 1)["status"] == "ok"


def test_only_when_every_slot_fails_does_the_command_fail(run: Run, tiny_world: Any, tmp_path: Path) -> None:
    broken = publish_checkpoint(run.resolve(), tmp_path / "checkpoint_model_000002", damage=float("nan"))
    out = tmp_path / "live"
    with pytest.raises(NonFiniteError, match="all 2 slots failed"):
        validate(run.resolve(), broken, run.plan, "live", out)
    assert not out.exists()
    kept = artifacts.verify(tmp_path / "live.failed-001", deep=True)
    assert {m.path for m in kept.members} >= {"slot-000000/manifest.json", "slot-000001/manifest.json"}
    with pytest.raises(NonFiniteError):
        validate(run.resolve(), broken, run.plan, "live", out)
    assert (tmp_path / "live.failed-002").is_dir()


def test_chosen_slots_leave_the_others_skipped(run: Run, tmp_path: Path) -> None:
    one = validate(run.resolve(), run.checkpoint, run.plan, "live", tmp_path / "one", slots=[1])
    assert summary(one)["slots"] == {"total": 2, "ok": 1, "error": 0, "skipped": 1}
    assert [manifest(one, slot)["status"] for slot in (0, 1)] == ["skipped", "ok"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__timestep_shift": 5.0},
            r"model\.timestep_shift: .* trained with 3\.0, this configuration says 5\.0",
        ),
        (
            {"model__camera_translation_transform": "logd4"},
            r"trained with 'linear', this configuration says 'logd4'",
        ),
        ({"validation__noise_seed": 1}, r"validation\.noise_seed: the frozen plan says 42"),
    ],
)
def test_a_mismatch_is_refused_naming_both_sides(
    run: Run, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run.validate("live", tmp_path / "out", **changes)
    assert not any(tmp_path.iterdir())


def test_other_base_weights_are_refused(run: Run, tmp_path: Path) -> None:
    with artifacts.Transaction(tmp_path / "assets", "solarwm.assets.v1", {}) as transaction:
        transaction.write_text("model_index.json", "{}")
    with pytest.raises(ConfigError, match=r"model\.base_path: .*codec and text encoder"):
        run.validate("live", tmp_path / "out", model__base_path=str(tmp_path / "assets"))


def test_unknown_pass_and_wrong_checkpoint_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no pass 'best' in validation\.passes, found live, ema, shuffled"):
        run.validate("best", tmp_path / "out")
    with pytest.raises(ArtifactError):
        validate(run.resolve(), run.world.dataset, run.plan, "live", tmp_path / "out")


def test_changed_index_is_refused(run: Run, tmp_path: Path) -> None:
    changed = tmp_path / "data"
    shutil.copytree(run.world.dataset, changed)
    index = changed / "test-index.jsonl"
    index.write_text("".join(reversed(index.read_text().splitlines(keepends=True))))
    with pytest.raises(DataError, match="the test index changed after the plan was frozen"):
        run.validate("live", tmp_path / "out", data__root=str(changed))


def test_shuffled_cameras_need_two_cases(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"validation\.sample_count: found 1; pass 'shuffled'"):
        run.resolve(validation__sample_count=1)


def test_batching_changes_nothing_but_rounding_and_a_bad_request_costs_only_itself(run: Run) -> None:
    models = load_models(run.resolve().config, run.checkpoint, "live", "x", "cpu")
    sampling = Sampling("bidirectional", "unipc", 2, 3.0, 2)
    w2c = np.broadcast_to(np.eye(4, dtype=np.float32), (2, 4, 4)).copy()
    requests = [
        Request(
            slot,
            "a room",
            np.full((32, 32, 3), 40 * slot, np.uint8),
            w2c,
            np.eye(3, dtype=np.float32),
            (slot,),
        )
        for slot in range(3)
    ]
    together = {request.slot: outcome for request, outcome, _ in sample_all(models, requests, sampling)}
    alone = {
        request.slot: outcome for request, outcome, _ in sample_all(models, requests, sampling, batch_size=1)
    }
    for slot in range(3):
        torch.testing.assert_close(together[slot], alone[slot], atol=1e-4, rtol=1e-4)
    requests[1] = dataclasses.replace(requests[1], w2c=w2c[:1])
    rest = {request.slot: outcome for request, outcome, _ in sample_all(models, requests, sampling)}
    assert isinstance(rest[1], Exception)
    assert torch.equal(rest[0], alone[0]) and torch.equal(rest[2], alone[2])


def test_comparison_of_the_passes(
    live: artifacts.Artifact, shuffled: artifacts.Artifact, tmp_path: Path
) -> None:
    result = compare([live.path, shuffled.path / artifacts.MARKER], tmp_path / "demo")
    head, *rows = result.file("summary.csv").read_text().splitlines()
    table = [dict(zip(head.split(","), row.split(","), strict=True)) for row in rows]
    assert [row["pass"] for row in table] == ["live", "shuffled", "repeat_first_frame"]
    assert all(row["status"] == "complete" and row["n"] == "2" for row in table)
    expected = np.mean(
        [manifest(live, s)["metrics"]["psnr"] - manifest(shuffled, s)["metrics"]["psnr"] for s in (0, 1)]
    )
    assert table[0]["shuffled_pass"] == "shuffled"
    assert float(table[0]["margin_over_shuffled_db"]) == pytest.approx(expected, abs=1e-4)
    assert float(table[0]["margin_db"]) == pytest.approx(summary(live)["means"]["margin_db"], abs=1e-4)
    assert len(result.file("metrics.csv").read_text().splitlines()) == 1 + 4
    assert result.file("metrics.png").read_bytes().startswith(b"\x89PNG")
    assert decode(result.file("slot-000001/compare.mp4")).shape[0] == 5
    assert summary(result)["status"] == "complete" and not summary(result)["plans_differ"]
    assert {parent.schema for parent in result.parents} == {"solarwm.validation.v1"}
    assert compare([live.path, shuffled.path], tmp_path / "demo").digest == result.digest


def test_comparison_says_partial_and_labels_other_plans(
    run: Run, live: artifacts.Artifact, tmp_path: Path
) -> None:
    other = run.resolve(validation__noise_seed=7, validation__sample_count=1, validation__passes=PASSES[:1])
    freeze_plan(other, tmp_path / "plan.json")
    second = validate(other, run.checkpoint, tmp_path / "plan.json", "live", tmp_path / "second")
    result = compare([live.path, second.path], tmp_path / "demo")
    assert summary(result)["status"] == "partial" and summary(result)["plans_differ"]
    rows = result.file("metrics.csv").read_text().splitlines()
    assert any(",missing," in row for row in rows)
    assert result.file("summary.csv").read_text().splitlines()[2].endswith("False")


def test_comparison_refuses_what_cannot_be_compared(
    run: Run, live: artifacts.Artifact, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        compare([live.path, live.path], tmp_path / "demo")
    with pytest.raises(ConfigError, match="two or more passes"):
        compare([live.path], tmp_path / "demo")
    with pytest.raises(ArtifactError, match=r"solarwm\.dataset\.raw\.v1"):
        compare([live.path, run.world.dataset], tmp_path / "demo")
