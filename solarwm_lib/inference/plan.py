"""The frozen validation plan: which held-out clips, from which frame, with which noise; written once, then only read.

A plan depends on the test index, the clip geometry, the seeds and the guards; not on paths, world size, passes or the
training step. So every checkpoint and every later pass sees the same cases, on any machine. (spec wan22 6.2,
operations 10.1 and 10.2, with the remedies of 15.4.) No torch is imported.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from solarwm_lib.artifacts import identity_diff, json_bytes, write_once
from solarwm_lib.config.geometry import latent_frames, pixel_frames
from solarwm_lib.config.identity import digest
from solarwm_lib.data import camera
from solarwm_lib.data.camera import CameraGuardError
from solarwm_lib.data.index import RawRow, read_index
from solarwm_lib.data.sampling import frame_offsets, last_offset, start_count
from solarwm_lib.data.shards import ShardReader
from solarwm_lib.data.transport import open_shards
from solarwm_lib.inference import horizon
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, DataError
from solarwm_lib.runtime.keyed import key64

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved

SCHEMA = "solarwm.validation-plan.v1"
NAMED_REJECTIONS = 8


def freeze_plan(resolved: Resolved, out: Path | str) -> dict[str, Any]:
    """Build the plan of a configuration and create `out`; an equal plan that is already there is accepted.

    Raises ArtifactError naming the fields if `out` holds another plan, otherwise as `build_plan`.
    """
    plan, path = build_plan(resolved), Path(out)
    if path.exists():
        found = load_plan(path)
        if plan != found:
            index = "test_index_digest"
            differing = identity_diff(found["settings"], plan["settings"])
            differing += identity_diff({index: found[index]}, {index: plan[index]})
            raise ArtifactError(
                f"{path}: holds another plan ({'; '.join(differing) or 'its cases differ'}) and is never overwritten; "
                "use a new run name or remove the run's validation"
            )
    write_once(path, plan_bytes(plan))
    return plan


def plan_bytes(plan: Mapping[str, Any]) -> bytes:
    """Return the plan as it stands in its file."""
    return json_bytes(plan)


def load_plan(path: Path | str) -> dict[str, Any]:
    """Read a frozen plan; ArtifactError if it is missing, not a plan, or was changed after it was frozen."""
    path = Path(path)
    try:
        plan = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no frozen plan; make one with `solarwm freeze-plan`") from None
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON ({error}); restore the plan that was frozen") from None
    if not isinstance(plan, dict) or plan.get("schema") != SCHEMA:
        found = plan.get("schema") if isinstance(plan, dict) else type(plan).__name__
        raise ArtifactError(f"{path}: schema is {found!r}, expected {SCHEMA!r}")
    if plan.get("payload_digest") != payload_digest(plan):
        raise ArtifactError(
            f"{path}: content does not match its payload_digest; a frozen plan must not be edited, restore it"
        )
    if [case["slot"] for case in plan["cases"]] != list(range(plan["case_count"])):
        raise ArtifactError(f"{path}: slots are not 0..{plan['case_count'] - 1} in order")
    return plan


def payload_digest(plan: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything but the digest itself, as canonical JSON."""
    return digest({key: value for key, value in plan.items() if key != "payload_digest"})


def check_plan(plan: Mapping[str, Any], resolved: Resolved) -> None:
    """Raise if `plan` is not the plan of this configuration and of the test index as it is now."""
    for key, here in plan_settings(resolved).items():
        there = plan["settings"].get(key)
        if there != here:
            raise ConfigError(
                f"{key}: the frozen plan says {there!r}, this configuration {here!r}; a plan holds for one setting, "
                "use the configuration it was frozen with or a new run name"
            )
    path = index_path(resolved)
    if (found := index_digest(path)) != plan["test_index_digest"]:
        raise DataError(
            f"{path}: digest {found[:16]} differs from the frozen plan's {plan['test_index_digest'][:16]}; "
            "the test index changed after the plan was frozen"
        )


def plan_settings(resolved: Resolved) -> dict[str, Any]:
    """Return the settings that decide the cases, by configuration key; lengths that follow the source add theirs."""
    config = resolved.config
    data, validation = config.data, config.validation
    return {
        "model.family": config.model.family,
        "data.pixel_frames": data.pixel_frames,
        "data.height": data.height,
        "data.width": data.width,
        "data.fps": data.fps,
        "data.camera_array_key": data.camera_array_key,
        "data.camera_axes": data.camera_axes,
        "data.camera_scale": data.camera_scale,
        "validation.sample_count": validation.sample_count,
        "validation.selection_seed": validation.selection_seed,
        "validation.noise_seed": validation.noise_seed,
        "validation.max_relative_translation": validation.max_relative_translation,
        "validation.max_camera_absolute": validation.max_camera_absolute,
        **horizon.settings_of(config),
    }


def index_path(resolved: Resolved) -> Path:
    """Return the held-out index of a configuration."""
    return Path(resolved.config.data.root) / resolved.config.data.test_index


def index_digest(path: Path) -> str:
    """Return the SHA-256 of an index file: its rows carry the sizes and digests of the shards."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); check data.root and data.test_index"
        ) from None


def build_plan(resolved: Resolved) -> dict[str, Any]:
    """Choose the cases: walk a seeded order of the test index, skip clips whose camera leaves the guards.

    Raises ConfigError if the index has fewer rows than cases are wanted, DataError if too few pass the guards or any
    clip or camera is bad in another way.
    """
    config, path = resolved.config, index_path(resolved)
    rows, wanted = read_index(path), config.validation.sample_count
    if len(rows) < wanted:
        raise ConfigError(
            f"validation.sample_count is {wanted}, {path.name} has {len(rows)} rows; lower it to {len(rows)} or add clips"
        )
    shards = open_shards(config.data, config.data.root)
    cases: list[dict[str, Any]] = []
    rejected: list[dict[str, str]] = []
    for ordinal in selection_order(len(rows), config.validation.selection_seed):
        if len(cases) == wanted:
            break
        try:
            cases.append({"slot": len(cases), **_case(config, shards, rows[ordinal], ordinal)})
        except CameraGuardError as error:
            rejected.append({"sample_id": rows[ordinal].sample_id, "reason": str(error)})
    shards.close()
    if len(cases) < wanted:
        named = "; ".join(item["reason"] for item in rejected[:NAMED_REJECTIONS])
        raise DataError(
            f"{path}: only {len(cases)} of {wanted} cases pass the camera guards: {named}; raise "
            f"validation.max_relative_translation or validation.max_camera_absolute, or lower validation.sample_count"
        )
    plan: dict[str, Any] = {
        "schema": SCHEMA,
        "settings": plan_settings(resolved),
        "test_index_digest": index_digest(path),
        "fps": config.data.fps,
        "pixel_frames": config.data.pixel_frames,
        "latent_frames": latent_frames(config.model.family, config.data.pixel_frames),
        "height": config.data.height,
        "width": config.data.width,
        "case_count": len(cases),
        "cases": cases,
        "rejected": rejected,
    }
    return {**plan, "payload_digest": payload_digest(plan)}


def selection_order(rows: int, selection_seed: int) -> list[int]:
    """Return the released order in which candidates are tried: Python's generator, all rows."""
    return random.Random(selection_seed).sample(range(rows), rows)


def release_seed(*parts: str | int) -> int:
    """Return the release's derived seed: the low 31 bits of BLAKE2b-64 of the parts. (spec wan22 6.2)"""
    return key64(*parts) & 0x7FFFFFFF


def drawn_start(key: str, occurrence: int, starts: int) -> int:
    """Return the start frame, of `starts` possible ones, of a row that does not fix it.

    The release's draw, keyed by the sample's occurrence in place of its slot: a guard that rejects another row then
    does not move this one's clip.
    """
    return int(np.random.RandomState(release_seed(key, 0, 0, occurrence)).randint(0, starts))


def _case(config: Any, shards: ShardReader, row: RawRow, ordinal: int) -> dict[str, Any]:
    """Return a case without its slot; CameraGuardError if the camera leaves the guards."""
    data, name = config.data, f"sample {row.sample_id!r}"
    length = _length(config, row, name)
    frames, occurrence = length.pixel_frames, 0
    offsets = frame_offsets(frames, row.fps or data.fps, data.fps)
    start = _start(row, length, occurrence, name)
    stored = shards.read(row, row.camera_member)
    c2w = camera.load_cameras(
        stored,
        data.camera_array_key,
        axes=data.camera_axes,
        scale=data.camera_scale,
        name=f"{name}: {row.camera_member}",
    )
    latent = camera.latent_frame_indices(frames, config.model.family)
    source = [min(start + offsets[index], length.last_frame) for index in latent]
    if source[-1] >= len(c2w):
        raise DataError(f"{name}: camera has {len(c2w)} rows, the clip needs row {source[-1]}")
    camera.audit(
        camera.relative_c2w(c2w, source),
        latent,
        fps=data.fps,
        pixel_frames=frames,
        max_relative_translation=config.validation.max_relative_translation,
        max_camera_absolute=config.validation.max_camera_absolute,
        name=name,
    )
    return {
        "sample_id": row.sample_id,
        "key": row.key,
        "shard": row.shard,
        "row_ordinal": ordinal,
        "start_frame": start,
        "occurrence": occurrence,
        "prompt": _prompt(row, shards),
        "noise_seed": config.validation.noise_seed,
        "camera_fingerprint": hashlib.sha256(stored).hexdigest(),
        **length.facts,
    }


@dataclass(frozen=True)
class _Length:
    """Pixel frames of a case, how it starts, the source frame at which cameras end, and what the case records."""

    mode: str
    pixel_frames: int
    starts: int  # start frames that are possible
    last_frame: int
    facts: dict[str, Any]


def _length(config: Any, row: RawRow, name: str) -> _Length:
    """Return how long a row's case is; DataError for a row that is too short. (spec wan22 6.3, 6.4)"""
    data, model = config.data, config.model
    mode = horizon.mode_of(config)
    rate = row.fps or data.fps
    if mode == horizon.FIXED:
        starts = start_count(row, last_offset(data.pixel_frames, rate, data.fps))
        assert row.num_frames is not None  # start_count refuses a row without it
        return _Length(mode, data.pixel_frames, starts, row.num_frames - 1, {})
    num_frames = row.num_frames
    if num_frames is None:
        raise DataError(f"{name}: field 'num_frames' is absent, expected the decoded frame count")
    published = horizon.published_frames(num_frames, rate, data.fps)
    chunk = model.causal.chunk_latent_frames
    if mode == horizon.CAMERA:
        rounding = horizon.rounding_of(config)
        latents = horizon.camera_length(
            num_frames, rate, data.fps, chunk, rounding, family=model.family, name=name
        )
        facts = {"latent_frames": latents, "published_frames": published}
        return _Length(mode, pixel_frames(model.family, latents), 1, num_frames - 1, facts)
    settings = horizon.settings_of(config)
    latents = horizon.source_variable(
        published,
        chunk,
        settings["validation.min_rollout_latent_frames"],
        settings["validation.passes.rollout_latent_frames"],
        name=name,
    )
    frames = pixel_frames(model.family, latents)
    starts = start_count(row, last_offset(frames, rate, data.fps))
    return _Length(mode, frames, starts, num_frames - 1, {"latent_frames": latents})


def _start(row: RawRow, length: _Length, occurrence: int, name: str) -> int:
    """Return the start frame of a case: the row's, else a draw; 0 for a whole camera track.

    A source-variable case draws anew where the row's start does not leave room for its length. (spec wan22 6.2)
    """
    if length.mode == horizon.CAMERA:
        return 0
    if row.start_frame is None:
        return drawn_start(row.key, occurrence, length.starts)
    if row.start_frame < length.starts:
        return row.start_frame
    if length.mode == horizon.SOURCE:
        return drawn_start(f"variable-rollout-start:{row.key}", occurrence, length.starts)
    raise DataError(
        f"{name}: start_frame {row.start_frame} is outside 0..{length.starts - 1} ({row.num_frames} frames, the clip spans "
        f"{length.last_frame + 2 - length.starts}); correct the test index"
    )


def _prompt(row: RawRow, shards: ShardReader) -> str:
    if row.caption is not None:
        return row.caption
    manifest = row.manifest
    if manifest is None and row.manifest_member is not None:
        try:
            manifest = json.loads(shards.read(row, row.manifest_member))
        except ValueError as error:
            raise DataError(
                f"sample {row.sample_id!r}: {row.manifest_member} is not JSON ({error})"
            ) from None
    prompt = manifest.get("prompt") if isinstance(manifest, dict) else None
    text = prompt.get("text") if isinstance(prompt, dict) else None
    if not isinstance(text, str):
        raise DataError(
            f"sample {row.sample_id!r}: no caption in the row and no prompt.text in the manifest; write one, it may be empty"
        )
    return text
