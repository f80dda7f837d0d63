"""Canonical JSON, digests, and which fields decide that two configurations are the same run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from solarwm_lib.runtime.errors import ConfigError

FieldClass = Literal["must_match", "may_change", "free"]

# Longest matching prefix decides; what no prefix matches is free. Order in the file does not matter.
_CLASSES: dict[str, FieldClass] = {
    "schema": "must_match",
    "action": "must_match",
    "name": "free",
    "model": "must_match",
    "model.base_path": "may_change",
    "data": "must_match",
    "data.root": "may_change",
    "data.latents_root": "may_change",
    "data.failure_budget": "may_change",
    "data.test_index": "may_change",
    "data.decoded_cache_gib": "free",
    "data.num_workers": "free",
    "data.transport": "may_change",
    "data.transport.cache_dir": "free",
    "data.transport.cache_max_gib": "free",
    "data.transport.prefetch_shards": "free",
    "data.transport.attempts": "free",
    "data.transport.timeout_seconds": "free",
    "distributed": "may_change",
    "train": "must_match",
    "train.micro_batch_size": "may_change",
    "train.gradient_accumulation_steps": "may_change",
    "train.activation_checkpointing": "may_change",
    "train.attention_executor": "may_change",
    "train.strategy": "may_change",
    "train.shard_teacher": "may_change",
    "validation": "may_change",
    "checkpoint": "must_match",
    "checkpoint.path": "may_change",
    "checkpoint.initialization.student.path": "may_change",
    "checkpoint.initialization.teacher.path": "may_change",
    "checkpoint.initialization.critic.path": "may_change",
    "checkpoint.save_every_steps": "free",
    "checkpoint.rolling_save_every_steps": "free",
    "checkpoint.keep_rolling": "free",
    "checkpoint.asynchronous": "free",
    "checkpoint.keep_full": "free",
    "checkpoint.keep_full_steps": "free",
    "inference": "must_match",
    "inference.preview": "free",
    "preencode": "must_match",
    "preencode.generation_id": "free",
    "preencode.parts": "may_change",
    "preencode.reuse": "free",
    "preencode.shard_max_samples": "may_change",
    "preencode.shard_max_bytes": "may_change",
    "runtime": "free",
    "metadata": "free",
}
# Sampling uses the network and the cases, not how the weights were trained.
_INFER_CLASSES: dict[str, FieldClass] = {
    **_CLASSES,
    "data.test_index": "must_match",
    "data.train_index": "may_change",
    "data.random_start": "may_change",
    "data.encoding": "may_change",
    "data.latent_schema": "may_change",
    "data.mixed_shards": "may_change",
    "train": "may_change",
    "train.stage": "must_match",
    "train.causal_mode": "must_match",
    "train.objective": "must_match",
    "train.objective_variant": "must_match",
    "train.num_train_timesteps": "must_match",
    "train.anyflow.gate": "must_match",
    "train.anyflow.delta_time": "must_match",
    "train.self_gradient_forcing.denoising_timesteps": "must_match",
    "train.self_gradient_forcing.context_timestep": "must_match",
    "validation": "must_match",
    "checkpoint.mode": "may_change",
    "checkpoint.weights": "may_change",
}
# Encoding uses the codec, the text encoder, the frames and the camera checks; nothing is drawn.
_PREENCODE_CLASSES: dict[str, FieldClass] = {
    **_CLASSES,
    "model": "may_change",
    "model.family": "must_match",
    "model.architecture": "must_match",
    "model.text_length": "must_match",
    "data.test_index": "must_match",
    "data.seed": "may_change",
    "data.random_start": "may_change",
    "data.mixed_shards": "may_change",
    "data.intrinsics_array_key": "may_change",
    "data.encoding": "may_change",
    "data.latent_schema": "may_change",
}
_BY_ACTION = {"train": _CLASSES, "infer": _INFER_CLASSES, "preencode": _PREENCODE_CLASSES}
PATH_KEYS = (
    "model.base_path",
    "data.root",
    "data.latents_root",
    "data.transport.root",
    "data.transport.latents_root",
    "data.transport.cache_dir",
    "checkpoint.path",
    "checkpoint.initialization.student.path",
    "checkpoint.initialization.teacher.path",
    "checkpoint.initialization.critic.path",
    "runtime.output_dir",
)

_SECRET = re.compile(r"(.*_)?(access_token|api_key|password|secret|token|access_key|private_key)$")
_CREDENTIALS = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://[^/@\s:]*:[^/@\s]+@")


def canonical_json(value: Any) -> str:
    """Sorted keys, no spaces, non-ASCII kept, NaN and Infinity refused, one newline at the end (operations.md 0)."""
    return (
        json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"
    )


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON, 64 hexadecimal characters."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves as (dotted key, value); entries of a list of mappings by position, other lists whole."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            value = {str(position): item for position, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def field_class(key: str, action: str = "train") -> FieldClass:
    """What a resumed run demands of a field: must_match, may_change (recorded) or free."""
    classes = _BY_ACTION.get(action, _CLASSES)
    while key:
        if key in classes:
            return classes[key]
        key = key.rpartition(".")[0]
    return "free"


CAUSAL_ONLY = (
    "model.causal",
    "validation.variable_rollout_by_source",
    "validation.min_rollout_latent_frames",
    "inference.length",
    "inference.horizon_rounding",
)


def semantic_view(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with only the must-match fields: algorithm, data selection, weights; no paths, cadence or topology."""
    action = str(values.get("action", "train"))
    train = values.get("train")
    # Chunks, windows and horizons have no effect on a bidirectional pass.
    bidirectional = isinstance(train, Mapping) and train.get("stage") == "stage0p5"
    without_effect = CAUSAL_ONLY if bidirectional else ()

    def keep(section: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in section.items():
            key = f"{prefix}{name}"
            if key in without_effect:
                continue
            if isinstance(value, Mapping) and value:
                inner = keep(value, f"{key}.")
                if inner:
                    result[name] = inner
            elif field_class(key, action) == "must_match":
                result[name] = value
        return result

    return keep(values, "")


class Difference(NamedTuple):
    """One field that two configurations give different values; None stands for absent."""

    key: str
    a: Any
    b: Any
    field_class: FieldClass


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Fields that differ, must_match first, then by key. Equal numbers are equal: 24 and 24.0."""
    action = str(a.get("action", "train"))
    left, right = dict(flatten(a)), dict(flatten(b))
    order = {"must_match": 0, "may_change": 1, "free": 2}
    rows = [
        Difference(key, left.get(key), right.get(key), field_class(key, action))
        for key in left.keys() | right.keys()
        if (key in left) != (key in right) or not _same(left[key], right[key])
    ]
    return sorted(rows, key=lambda row: (order[row.field_class], row.key))


def format_diff(rows: Sequence[Difference], oneline: bool = False) -> str:
    """One line per field (`class  key  old -> new`), or all in one line without the class; `no difference` for none."""
    if not rows:
        return "no difference"
    shown = [(row, canonical_json(row.a).strip(), canonical_json(row.b).strip()) for row in rows]
    if oneline:
        return ", ".join(f"{row.key} {a} -> {b}" for row, a, b in shown)
    width = max(len(row.key) for row in rows)
    return "\n".join(
        f"{row.field_class.replace('_', ' '):<10}  {row.key:<{width}}  {a} -> {b}" for row, a, b in shown
    )


def _same(a: Any, b: Any) -> bool:
    """Equality in which true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name holds a credential; `*_file` references do not."""
    return _SECRET.fullmatch(name.lower().replace("-", "_")) is not None


def secrets_check(values: Any, prefix: str = "") -> None:
    """Refuse credentials anywhere in `values`, before anything is written; the message never holds the value."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            if is_secret_name(str(key)) and value not in (None, "", [], {}):
                raise ConfigError(
                    f"{prefix}{key}: a secret in a configuration is refused; give {key}_file, a path, instead"
                )
            secrets_check(value, f"{prefix}{key}.")
    elif isinstance(values, list):
        for position, value in enumerate(values):
            secrets_check(value, f"{prefix}{position}.")
    elif isinstance(values, str) and _CREDENTIALS.match(values):
        raise ConfigError(
            f"{prefix[:-1]}: an address with a password in it is refused; use the client's own credentials"
        )
