"""The causal stages through the real path: plan, checkpoint, rollout, decode, metrics, publication; random tiny weights."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_world import (
    FRAMES,
    STAGES,
    a_pass,
    kept_latents,
    long_world,
    manifest,
    publish_checkpoint,
    resolve,
)
from tinyworld import TinyWorld

from solarwm_lib import artifacts
from solarwm_lib.config.load import resolve_values
from solarwm_lib.data.index import RawRow, read_index
from solarwm_lib.data.video import decode
from solarwm_lib.inference import cases
from solarwm_lib.inference import plan as plans
from solarwm_lib.inference.comparison import compare
from solarwm_lib.inference.evaluation import prepare
from solarwm_lib.inference.infer import infer, open_infer
from solarwm_lib.inference.latents import LatentStore, beside
from solarwm_lib.inference.plan import build_plan, freeze_plan, load_plan
from solarwm_lib.inference.publication import name_of
from solarwm_lib.inference.validation import validate
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, DataError


@pytest.fixture(scope="module")
def world(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return long_world(tiny_world, tmp_path_factory.mktemp("long clips"))


@pytest.fixture(scope="module")
def root(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each stage."""
    root = tmp_path_factory.mktemp("stages")
    for stage in STAGES:
        publish_checkpoint(world, root, stage)
    return root


def frames_of(artifact: artifacts.Artifact, prefix: str) -> list[dict[str, str]]:
    text = artifact.file(f"{prefix}slot-000000/frames.csv").read_text()
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("stage", STAGES)
def test_a_rollout_may_exceed_the_clip_and_is_scored_where_it_has_ground_truth(
    world: TinyWorld, root: Path, stage: str, tmp_path: Path
) -> None:
    """8 latents (29 frames) from clips of 5 (19 frames): the last camera is repeated, 19 - start frames are scored."""
    passes = [a_pass(stage, "short", 4), a_pass(stage, "long", 8)]
    result = infer(resolve(world, root, stage, passes), tmp_path / "out")
    first = manifest(result, prefix="long/")
    scored = FRAMES - first["case"]["start_frame"]
    assert (first["status"], first["latent_frames"], first["pixel_frames"]) == ("ok", 8, 29)
    assert first["ground_truth_frames"] == scored
    assert first["camera"]["repeated_from_latent"] == 1 + (scored - 2) // 4 + 1
    assert decode(result.file("long/slot-000000/generated.mp4")).shape[0] == 29
    assert decode(result.file("long/slot-000000/ground_truth.mp4")).shape[0] == scored
    rows = frames_of(result, "long/")
    assert len(rows) == 29 and all(bool(row["psnr"]) == (i < scored) for i, row in enumerate(rows))
    assert all(row["mean"] and row["finite_fraction"] == "1" for row in rows)
    values = np.array([float(row["psnr"]) for row in rows[1:scored]])
    assert first["metrics"]["psnr"] == pytest.approx(-10 * np.log10(np.mean(10 ** (-values / 10))), abs=1e-3)
    # Chunks do not see the future: the long rollout begins with the short one.
    short, long = (kept_latents(tmp_path / "out", name) for name in ("short", "long"))
    assert short.shape[0] == 4 and long.shape[0] == 8
    assert torch.equal(long[:4], short)
    assert torch.isfinite(long).all()


def test_validation_and_inference_have_the_same_latents_and_plan(
    world: TinyWorld, root: Path, tmp_path: Path
) -> None:
    resolved = resolve(world, root, "sgf", [a_pass("sgf", "live", 4), a_pass("sgf", "ema", 4, weights="ema")])
    freeze_plan(resolved, tmp_path / "plan.json")
    there = validate(resolved, root / "sgf", tmp_path / "plan.json", "live", tmp_path / "live")
    here = infer(resolved, tmp_path / "out")
    assert manifest(there)["plan_digest"] == manifest(here, prefix="live/")["plan_digest"]
    for slot in (0, 1):
        live, ema = (kept_latents(tmp_path / "out", name, slot) for name in ("live", "ema"))
        validated = beside(tmp_path / "live") / f"slot-{slot:06d}" / "latents.safetensors"
        sampled = beside(tmp_path / "out", "live") / f"slot-{slot:06d}" / "latents.safetensors"
        assert validated.read_bytes() == sampled.read_bytes()
        assert not torch.equal(live, ema)
    both = compare([there.path, here.path], tmp_path / "both")
    assert not json.loads(both.file("summary.json").read_bytes())["plans_differ"]


def test_the_plan_of_a_fixed_length_is_that_of_stage0p5(world: TinyWorld, root: Path) -> None:
    """So that the same cases can be followed through all stages."""
    stage0p5 = build_plan(world.resolve(root))
    assert build_plan(resolve(world, root, "sgf", [a_pass("sgf", latents=8)])) == stage0p5


def test_camera_length_follows_the_track_and_is_published_by_clip(
    world: TinyWorld, root: Path, tmp_path: Path
) -> None:
    """19 frames are 4 latents in chunks of 2: 13 model frames, padded to 19; cameras are the source's own, float64."""
    resolved = resolve(world, root, "sgf", [a_pass("sgf")], inference__length="camera")
    result = infer(resolved, tmp_path / "out")
    case = manifest(result, prefix="live/")["case"]
    assert (case["start_frame"], case["latent_frames"], case["published_frames"]) == (0, 4, FRAMES)
    row = read_index(world.dataset / "test-index.jsonl")[case["row_ordinal"]]
    dataset, clip = name_of(row)
    video = decode(result.file(f"generate/{dataset}/{clip}.mp4"))
    assert len(video) == FRAMES
    assert len(decode(result.file("live/slot-000000/generated.mp4"))) == 13
    assert len(decode(result.file(f"compare/{dataset}/{clip}.mp4"))) == 13
    c2w = np.load(result.file(f"camera/{dataset}/{clip}.npy"))
    assert c2w.shape == (FRAMES, 4, 4) and c2w.dtype == np.float64
    reader = cases.Cases(resolved)
    assert np.array_equal(c2w, reader.source_c2w(case, FRAMES))
    stored = reader._read(row, row.camera_member)[row.camera_member]
    assert np.array_equal(c2w, np.load(io.BytesIO(stored))["c2w"].astype(np.float64))
    receipt = json.loads(result.file("publication/samples/slot-000000.json").read_bytes())
    assert receipt["model_output_pixel_frames"] == 13 and receipt["published_pixel_frames"] == FRAMES
    assert (receipt["tail_pad_frames"], receipt["trim_frames"]) == (6, 0)
    assert receipt["tail_padding_mode"] == "repeat_last_generated_frame"
    assert receipt["horizon_rounding"] == "documented" and receipt["weights_id"].endswith("#live")
    assert infer(resolved, tmp_path / "out").digest == result.digest
    other = {"inference__length": "camera", "inference__horizon_rounding": "covering"}
    with pytest.raises(ArtifactError, match="plan_digest"):
        infer(resolve(world, root, "sgf", [a_pass("sgf")], **other), tmp_path / "out")


def test_camera_length_has_its_own_plan_and_one_pass(world: TinyWorld, root: Path) -> None:
    fixed = resolve(world, root, "sgf", [a_pass("sgf")])
    camera = resolve(world, root, "sgf", [a_pass("sgf")], inference__length="camera")
    assert build_plan(camera)["payload_digest"] != build_plan(fixed)["payload_digest"]
    two = resolve(
        world, root, "sgf", [a_pass("sgf"), a_pass("sgf", "ema", weights="ema")], inference__length="camera"
    )
    with pytest.raises(ConfigError, match="found live, ema, expected exactly one pass"):
        open_infer(two)


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        (
            "sgf",
            {"model__causal__local_attention_latent_frames": 6},
            "trained with 4, this configuration says 6",
        ),
        (
            "sgf",
            {"train__self_gradient_forcing__denoising_timesteps": [1000, 250]},
            r"denoising_timesteps: .* trained with \[1000, 500\], this configuration says \[1000, 250\]",
        ),
        ("fm", {"model__causal__max_prior_clean_chunks": 2}, "trained with 1, this configuration says 2"),
        ("fm", {"model__timestep_shift": 5.0}, "trained with 3.0, this configuration says 5.0"),
        ("anyflow", {"checkpoint__path": "fm"}, "trained with 'flow_matching'.* 'anyflow_forward_map'"),
        ("sgf", {"checkpoint__path": "fm"}, "trained with 'stage1', this configuration says 'stage2'"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_naming_both_sides(
    world: TinyWorld, root: Path, stage: str, changes: dict[str, Any], message: str
) -> None:
    if "checkpoint__path" in changes:
        changes = changes | {"checkpoint__path": str(root / changes["checkpoint__path"])}
    with pytest.raises(ConfigError, match=message):
        open_infer(resolve(world, root, stage, [a_pass(stage)], **changes))


def test_passes_that_differ_in_length_have_different_identities(
    world: TinyWorld, root: Path, tmp_path: Path
) -> None:
    """Kept latents of a shorter rollout are refused, not continued."""
    runs = []
    for latents in (2, 4):
        resolved = resolve(world, root, "fm", [a_pass("fm", latents=latents)])
        plan, passes = build_plan(resolved), resolved.config.validation.passes
        runs.append(prepare(resolved, root / "fm", plan, passes[0]))
    short, long = (run.identity() for run in runs)
    assert short != long and long["causal"]["prior_chunks"] == 1
    LatentStore(tmp_path, short, []).publish(0, torch.zeros(2, 1, 1, 1))
    with pytest.raises(ArtifactError, match="rollout_latent_frames"):
        LatentStore(tmp_path, long, []).load(0)


def test_a_route_that_only_its_configurations_are_checked_of_is_refused(world: TinyWorld, root: Path) -> None:
    values = world.values(
        root,
        model__family="ltx25_video",
        model__architecture="ltx25-22b",
        model__text_length=1024,
        data__pixel_frames=9,
        validation__passes=[
            {
                "name": "l",
                "weights": "live",
                "mode": "bidirectional",
                "solver": "stg_euler",
                "num_inference_steps": 2,
            }
        ],
    )
    other = resolve_values(values)
    with pytest.raises(ConfigError, match=r"route ltx25_video:stage0p5:.* cannot be sampled by this version"):
        prepare(other, root / "fm", {}, other.config.validation.passes[0])


def test_rows_that_cannot_name_a_file_are_refused(world: TinyWorld) -> None:
    row = read_index(world.dataset / "test-index.jsonl")[0]
    named = row.model_copy(update={"dataset": "rooms"})
    named.model_extra.update({"clip_id": "clip 1"})  # type: ignore[union-attr]
    with pytest.raises(DataError, match="clip_id is 'clip 1', which cannot name a published file"):
        name_of(named)


def test_frozen_plan_with_horizons_survives_its_file(world: TinyWorld, root: Path, tmp_path: Path) -> None:
    camera = resolve(world, root, "sgf", [a_pass("sgf")], inference__length="camera")
    freeze_plan(camera, tmp_path / "plan.json")
    assert [case["latent_frames"] for case in load_plan(tmp_path / "plan.json")["cases"]] == [4, 4]


def test_covering_camera_length_goes_past_the_track_and_is_trimmed(
    world: TinyWorld, root: Path, tmp_path: Path
) -> None:
    """19 frames need 6 latents in chunks of 2: 21 model frames, trimmed to 19; the last camera is that of the last frame."""
    resolved = resolve(
        world,
        root,
        "sgf",
        [a_pass("sgf")],
        inference__length="camera",
        inference__horizon_rounding="covering",
    )
    result = infer(resolved, tmp_path / "out")
    first = manifest(result, prefix="live/")
    assert (first["case"]["latent_frames"], first["pixel_frames"]) == (6, FRAMES)
    receipt = json.loads(result.file("publication/samples/slot-000000.json").read_bytes())
    assert (receipt["model_output_pixel_frames"], receipt["published_pixel_frames"]) == (21, FRAMES)
    assert (receipt["trim_frames"], receipt["tail_pad_frames"], receipt["tail_padding_mode"]) == (
        2,
        0,
        "none",
    )
    assert receipt["horizon_rounding"] == "covering" and "ground_truth_frames" not in first
    documented = resolve(world, root, "sgf", [a_pass("sgf")], inference__length="camera")
    assert build_plan(documented)["payload_digest"] != first["plan_digest"]
    w2c = cases.Cases(resolved).read(first["case"], 6).w2c
    assert w2c.shape == (6, 4, 4) and not np.array_equal(w2c[4], w2c[5])


def test_camera_length_without_triplets(world: TinyWorld, root: Path, tmp_path: Path) -> None:
    changes = {"inference__length": "camera", "inference__output_layout": "transaction_v1"}
    result = infer(resolve(world, root, "sgf", [a_pass("sgf")], **changes), tmp_path / "out")
    assert {member.path.split("/")[0] for member in result.members} == {"live", "frozen-plan.json"}
    with pytest.raises(ConfigError, match=r"dataset_triplet_v1 is for inference.length camera, found fixed"):
        open_infer(
            resolve(world, root, "sgf", [a_pass("sgf")], inference__output_layout="dataset_triplet_v1")
        )


def test_source_variable_cases_are_as_long_as_their_source(
    world: TinyWorld, root: Path, tmp_path: Path
) -> None:
    """19 frames are 4 latents in chunks of 2; a start that leaves no room for them is drawn anew."""
    changes = {"validation__variable_rollout_by_source": True, "validation__min_rollout_latent_frames": 2}
    resolved = resolve(world, root, "sgf", [a_pass("sgf", latents=8)], **changes)
    result = infer(resolved, tmp_path / "out")
    for slot in (0, 1):
        first = manifest(result, slot, "live/")
        assert first["case"]["latent_frames"] == 4 and 0 <= first["case"]["start_frame"] <= FRAMES - 13
        assert first["pixel_frames"] == 13 and "ground_truth_frames" not in first
        assert kept_latents(tmp_path / "out", "live", slot).shape[0] == 4
    with pytest.raises(DataError, match=r"19 frames give 4 latent frames .* at least 6"):
        build_plan(
            resolve(
                world, root, "sgf", [a_pass("sgf", latents=8)],
                **changes | {"validation__min_rollout_latent_frames": 6},
            )
        )  # fmt: skip
    differing = [a_pass("sgf", "short", 4), a_pass("sgf", "long", 8)]
    with pytest.raises(ConfigError, match="rollout_latent_frames are 4, 8, expected one value"):
        build_plan(resolve(world, root, "sgf", differing, **changes))
    with pytest.raises(ConfigError, match="a stage0p5 model generates 2 latent frames at once; set false"):
        build_plan(world.resolve(root, validation__variable_rollout_by_source=True))


def test_start_frames_by_length() -> None:
    """A fixed start is kept where it fits, drawn anew under source-variable length, refused otherwise, 0 at camera length."""
    row = RawRow(
        sample_id="a", key="a", shard="s.tar", num_frames=160, start_frame=50, video_member="v", camera_member="c",
        manifest={},
    )  # fmt: skip
    variable = plans._Length("source", 153, 8, 159, {})
    assert plans._start(row, variable, 0, "a") == plans.drawn_start("variable-rollout-start:a", 0, 8) < 8
    assert plans._start(row.model_copy(update={"start_frame": 7}), variable, 0, "a") == 7
    assert plans._start(row, plans._Length("camera", 153, 1, 159, {}), 0, "a") == 0
    with pytest.raises(DataError, match=r"start_frame 50 is outside 0..7 \(160 frames, the clip spans 153\)"):
        plans._start(row, plans._Length("fixed", 153, 8, 159, {}), 0, "a")


def test_the_role_a_released_package_says_to_load_is_recorded(
    world: TinyWorld, root: Path, tmp_path: Path
) -> None:
    """Out as a package and in again: the same latents, and the receipt names the role sampled and the package's default."""
    from solarwm_lib.weights.convert import export_weights, import_weights

    package = export_weights(root / "sgf", tmp_path / "package", "released")
    import_weights(package.path, tmp_path / "imported", assets=world.assets)
    passes = [a_pass("sgf", "model", weights="ema")]
    ours, theirs = (
        infer(
            resolve(world, root, "sgf", passes, inference__length="camera", checkpoint__path=str(checkpoint)),
            tmp_path / name,
        )
        for checkpoint, name in ((root / "sgf", "ours"), (tmp_path / "imported", "theirs"))
    )
    receipts = [
        json.loads(r.file("publication/samples/slot-000000.json").read_bytes()) for r in (ours, theirs)
    ]
    assert [receipt["release_default_weights"] for receipt in receipts] == [None, "ema"]
    assert all(r["weights"] == "ema" and r["weights_id"].endswith("#ema") for r in receipts)
    assert torch.equal(*(kept_latents(tmp_path / name, "model") for name in ("ours", "theirs")))
