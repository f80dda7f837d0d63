"""Released SolarWM packages: `model.pt` with its manifests, read without unpickling code, and written (spec wan22 7, 6.6).

A package is a folder with `model.pt` (`generator`, `generator_ema`, `config`, `global_step`, ...), for a Stage2 training
pair also `critic.pt`, `checkpoint-manifest.json` and `COMPLETE.json` over them, and for a publication
`release-manifest.json`. A bare `model.pt` is read too, as initialisation only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.runtime.files import json_bytes
from solarwm_lib.runtime.manifests import member_path
from solarwm_lib.weights import contract, inventory, keys
from solarwm_lib.weights.contract import Contract

if TYPE_CHECKING:
    from solarwm_lib.weights.tensors import Weights

MODEL, CRITIC = "model.pt", "critic.pt"
MANIFEST, MARKER, RELEASE = "checkpoint-manifest.json", "COMPLETE.json", "release-manifest.json"
MANIFEST_SCHEMA, MARKER_SCHEMA = "solarwm.checkpoint.v2", "solarwm.checkpoint-complete.v2"
RELEASE_SCHEMA = "solarwm.public-weight-manifest.v1"
RELEASE_FORMAT = "solarwm_wan_stage2_transaction_v1"
STAGE2_FORMAT = "solarwm.wan22-stage2-sgf.v1"
INFERENCE_SCHEMA = "solarwm.wan22-stage2-inference.v1"
STATE_FIELDS = {"live": "generator", "ema": "generator_ema"}


@dataclass(frozen=True)
class Package:
    """A released package. `roles` (live, ema) and `critic` have diffusers names; nothing was read but names and shapes.

    `complete`: a manifest and marker vouch for the files. `ema_updates` is None where the package does not record it.
    `default_role` is what its release manifest says to load.
    """

    path: Path
    files: tuple[Path, ...]
    complete: bool
    kind: str
    contract: Contract
    config: Mapping[str, Any]
    step: int
    ema_updates: int | None
    student_step: int | None
    roles: Mapping[str, Weights]
    critic: Weights | None
    default_role: str | None


def is_package(path: Path) -> bool:
    """True for a folder with `model.pt`, or a `.pt` file that holds a trained payload; nothing else is decided here."""
    return (path / MODEL).is_file() if path.is_dir() else path.suffix == ".pt"


def read_package(path: Path | str) -> Package:
    """Read a package folder or a bare `model.pt` and check all that can be checked from names, shapes and counters.

    ArtifactError for an incomplete or altered folder, a payload that is not tensors and plain values, missing parts,
    tensors that are not exactly those of the network the config names, or steps that disagree.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    model = path / MODEL if path.is_dir() else path
    if not model.is_file():
        raise ArtifactError(f"{folder}: no {MODEL}; expected a released checkpoint folder")
    manifest = verify_folder(folder) if path.is_dir() else None
    payload = _payload(model, ("generator", "global_step", "config"))
    step = _step(payload, "global_step", model)
    if manifest is not None and manifest["step"] != step:
        raise ArtifactError(f"{folder}: {MANIFEST} says step {manifest['step']}, {MODEL} holds step {step}")

    roles = {
        role: _network(payload[field], f"{model}:{field}")
        for role, field in STATE_FIELDS.items()
        if payload.get(field)
    }
    architecture, difference = inventory.match_architecture(roles["live"].infos)
    if architecture is None:
        raise ArtifactError(f"{model}: generator is no network of config/models; {difference}")
    facts = contract.from_released(payload["config"], architecture, str(model))
    shapes = _shapes(architecture, facts.anyflow)
    for role, weights in roles.items():
        inventory.require(weights.infos, shapes, f"{model}: {STATE_FIELDS[role]} ({role})", "the package")

    critic = None
    found_critic = folder / CRITIC
    if path.is_dir() and found_critic.is_file():
        critic = _critic(found_critic, step, architecture)
    files = (model,) if critic is None else (model, found_critic)
    return Package(
        path,
        files,
        manifest is not None,
        _kind(facts, critic is not None, payload, folder),
        facts,
        payload["config"],
        step,
        _ema_updates(payload, roles, step, model),
        payload.get("student_step"),
        roles,
        critic,
        default_role(folder, roles) if path.is_dir() else None,
    )


def _shapes(architecture: str, anyflow: bool) -> dict[str, tuple[int, ...]]:
    from solarwm_lib.config.architectures import load_architecture

    return inventory.transformer_shapes(load_architecture(architecture)["transformer"], anyflow)


def _payload(path: Path, fields: tuple[str, ...]) -> Mapping[str, Any]:
    from solarwm_lib.weights.tensors import load_archive

    payload = load_archive(path)
    found = sorted(map(str, payload)) if isinstance(payload, Mapping) else [type(payload).__name__]
    if missing := [field for field in fields if not isinstance(payload, Mapping) or field not in payload]:
        raise ArtifactError(
            f"{path}: no {', '.join(missing)}; found {', '.join(found[:5])}, expected a released payload with {', '.join(fields)}"
        )
    return dict(payload)


def _network(state: Any, where: str) -> Weights:
    from solarwm_lib.weights.tensors import state_dict

    weights = state_dict(state, where)
    return weights.renamed(keys.transformer_names(weights.infos, "diffusers", where))


def _step(payload: Mapping[str, Any], field: str, path: Path) -> int:
    step = payload[field]
    if type(step) is not int or step < 1:
        raise ArtifactError(f"{path}: {field} is {step!r}, expected a positive number of steps")
    return step


def _ema_updates(payload: Mapping[str, Any], roles: Mapping[str, Any], step: int, path: Path) -> int | None:
    updates = payload.get("ema_num_updates")
    if "ema" not in roles:
        return 0
    if updates is not None and (type(updates) is not int or not 0 <= updates <= step):
        raise ArtifactError(f"{path}: ema_num_updates is {updates!r} at step {step}, expected 0..{step}")
    return updates


def _critic(path: Path, step: int, architecture: str) -> Weights:
    payload = _payload(path, ("checkpoint_format", "critic", "global_step"))
    if payload["checkpoint_format"] != STAGE2_FORMAT:
        raise ArtifactError(f"{path}: format {payload['checkpoint_format']!r}, expected {STAGE2_FORMAT!r}")
    if payload["global_step"] != step:
        raise ArtifactError(
            f"{path}: holds step {payload['global_step']}, {MODEL} beside it step {step}; they are not one save"
        )
    weights = _network(payload["critic"], f"{path}:critic")
    inventory.require(weights.infos, _shapes(architecture, False), f"{path}: critic", "the package")
    return weights


def _kind(facts: Contract, pair: bool, payload: Mapping[str, Any], folder: Path) -> str:
    stage2 = facts.stage == "stage2"
    if (found := payload.get("checkpoint_format")) not in (
        None,
        STAGE2_FORMAT,
        INFERENCE_SCHEMA,
        "embedded_config_v1",
    ):
        raise ArtifactError(
            f"{folder}: {MODEL} has checkpoint_format {found!r}, expected {STAGE2_FORMAT!r} or none"
        )
    if pair and not stage2:
        raise ArtifactError(f"{folder}: {CRITIC} beside weights of {facts.stage}; only Stage2 has a critic")
    if pair:
        return "stage2 training pair"
    return "stage2 inference package" if stage2 else f"{facts.stage} checkpoint"


def verify_folder(folder: Path) -> dict[str, Any] | None:
    """Return the checked `checkpoint-manifest.json` of a package, None if it has neither manifest nor marker.

    As the release does: schemas, BLAKE2s of the manifest in the marker, equal steps, every listed file a regular one of
    the recorded size. Contents are not hashed there; `tensors.check_archive` compares the archive's own checksums.
    """
    manifest_path, marker_path = folder / MANIFEST, folder / MARKER
    if not manifest_path.is_file():
        if marker_path.is_file() and _json(marker_path).get("schema") == MARKER_SCHEMA:
            raise ArtifactError(
                f"{folder}: {MARKER} without {MANIFEST}; the package is not complete, fetch it again"
            )
        return None
    if not marker_path.is_file():
        raise ArtifactError(f"{folder}: no {MARKER}; the package is not complete, fetch it again")
    manifest, marker = _json(manifest_path), _json(marker_path)
    for path, values, schema in (
        (manifest_path, manifest, MANIFEST_SCHEMA),
        (marker_path, marker, MARKER_SCHEMA),
    ):
        if values.get("schema") != schema:
            raise ArtifactError(f"{path}: schema {values.get('schema')!r}, expected {schema!r}")
    digest = hashlib.blake2s(manifest_path.read_bytes()).hexdigest()
    if str(marker.get("manifest_digest")).removeprefix("blake2s:") != digest:
        raise ArtifactError(
            f"{folder}: {MARKER} does not belong to {MANIFEST} beside it; one of the two was changed"
        )
    if manifest.get("step") != marker.get("step"):
        raise ArtifactError(
            f"{folder}: {MANIFEST} says step {manifest.get('step')}, {MARKER} step {marker.get('step')}"
        )
    files = manifest.get("files")
    if not isinstance(files, list) or not all(
        isinstance(f, Mapping) and {"path", "size"} <= f.keys() for f in files
    ):
        raise ArtifactError(f"{manifest_path}: has no list of files with path and size")
    for entry in files:
        file = folder / member_path(entry["path"])
        if file.is_symlink() or not file.is_file():
            raise ArtifactError(
                f"{folder}: {entry['path']} is missing or not a regular file; fetch the package again"
            )
        if file.stat().st_size != entry["size"]:
            raise ArtifactError(
                f"{folder}: {entry['path']} has {file.stat().st_size} bytes, {MANIFEST} says {entry['size']}; fetch it again"
            )
    if MODEL not in {entry["path"] for entry in files}:
        raise ArtifactError(f"{manifest_path}: does not list {MODEL}")
    return manifest


def default_role(folder: Path, roles: Mapping[str, Any]) -> str | None:
    """Return the role `release-manifest.json` says to load, None without one; ArtifactError if it says what is not there."""
    path = folder / RELEASE
    if not path.is_file():
        return None
    values = _json(path)
    found = {
        "schema": values.get("schema"),
        "load.format": contract.lookup(values, "load.format"),
        "load.entrypoint": contract.lookup(values, "load.entrypoint"),
    }
    wanted = {"schema": RELEASE_SCHEMA, "load.format": RELEASE_FORMAT, "load.entrypoint": "."}
    for key, value in wanted.items():
        if found[key] != value:
            raise ArtifactError(f"{path}: {key} is {found[key]!r}, expected {value!r}")
    role = contract.lookup(values, "load.default_weights")
    offered = str(contract.lookup(values, "identity.model.weight_role")).split("+")
    if role not in STATE_FIELDS or role not in offered or role not in roles:
        raise ArtifactError(
            f"{path}: load.default_weights is {role!r}; the manifest offers {'+'.join(offered)}, {MODEL} holds {'+'.join(roles)}"
        )
    return str(role)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{path}: damaged ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: {type(value).__name__}, expected a JSON object")
    return value


def write_package(
    folder: Path,
    facts: Contract,
    config: Mapping[str, Any],
    roles: Mapping[str, Weights],
    step: int,
    ema_updates: int,
) -> None:
    """Write `model.pt`, its manifests and, for Stage2, the release manifest into the empty `folder`.

    `roles` ("live", "ema") have diffusers names. Stage2 keys get the `model.` prefix, as released; Stage2 becomes an
    inference package. Optimizer states are not written: other projects' optimizers could not use ours. All tensors of a
    role pass through memory unless they are mapped and not cast.
    """
    import torch

    stage2 = facts.stage == "stage2"
    payload: dict[str, Any] = {"global_step": step, "config": dict(config)}
    for role, weights in roles.items():
        names = keys.transformer_names(weights.infos, "official", weights.where)
        prefix = keys.PREFIX if stage2 else ""
        payload[STATE_FIELDS[role]] = {prefix + new: weights.get(old) for new, old in names.items()}
    if "ema" in roles:
        payload["ema_num_updates"] = ema_updates
    if stage2:
        payload["checkpoint_format"] = STAGE2_FORMAT
    folder.mkdir()
    torch.save(payload, folder / MODEL)
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "step": step,
        "contract": _release_contract(facts, stage2),
        "required_components": [MODEL],
        "files": [{"path": MODEL, "size": (folder / MODEL).stat().st_size}],
        "metadata": _release_metadata(roles, stage2),
    }
    data = json_bytes(manifest)
    (folder / MANIFEST).write_bytes(data)
    marker = {"schema": MARKER_SCHEMA, "step": step, "manifest_digest": hashlib.blake2s(data).hexdigest()}
    if stage2:
        role = "ema" if "ema" in roles else "live"
        release = {
            "schema": RELEASE_SCHEMA,
            "identity": {"model": {"weight_role": "+".join(roles)}},
            "load": {"default_weights": role, "entrypoint": ".", "format": RELEASE_FORMAT},
        }
        (folder / RELEASE).write_bytes(json_bytes(release))
    (folder / MARKER).write_bytes(json_bytes(marker))


def _release_contract(facts: Contract, stage2: bool) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if stage2:
        extras = {
            "denoising_step_list": facts["train.self_gradient_forcing.denoising_timesteps"],
            "local_attn_size": facts["model.causal.local_attention_latent_frames"],
            "sink_size": facts["model.causal.sink_latent_frames"],
        }
    return {
        "family": facts.family,
        "stage": facts.stage,
        "causal_mode": facts["train.causal_mode"],
        "objective": facts["train.objective"],
        "objective_variant": facts["train.objective_variant"] or "",
        "camera_translation_transform": facts["model.camera_translation_transform"],
        "parameterization": "full-parameter-live-ema" if stage2 else "full-parameter",
        "sp_size": 1,
        "data_generation": "inference-portable:v1",
        "extras": extras,
    }


def _release_metadata(roles: Mapping[str, Any], stage2: bool) -> dict[str, Any]:
    schema = INFERENCE_SCHEMA if stage2 else "solarwm.wan22-weights.v1"
    return {"schema": schema, "available_weights": list(roles), "ema_present": "ema" in roles}
