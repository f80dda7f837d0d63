"""Importing foreign weights as artifacts of the graph, and exporting checkpoints for other programs.

Import: base weights become a diffusers pipeline folder (`solarwm.assets.v1`, what `model.base_path` names); trained weights
become a checkpoint without optimizer (`solarwm.checkpoint.v1`, what `checkpoint.path` names). Export: one role of a
checkpoint as diffusers or official transformer folder, or its roles as a released package. Nothing is changed but names
and, where said, the float type; import(export(x)) is x, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact, Transaction, json_bytes
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.runtime.errors import ArtifactError, ConfigError
from solarwm_lib.weights import contract, inventory, keys, official, released
from solarwm_lib.weights.contract import Contract

if TYPE_CHECKING:
    from solarwm_lib.weights.tensors import Weights

log = logging.getLogger(__name__)

ASSETS_SCHEMA, EXPORT_SCHEMA, SIDECAR_SCHEMA = "solarwm.assets.v1", "solarwm.export.v1", "solarwm.weights.v1"
FORMATS = ("diffusers", "official", "released")
DTYPES = ("float32", "bfloat16", "float16")
CRITIC = "critic.safetensors"
PACKAGE = "package"
FLOW_SHIFT = 5.0
NOT_IMPORTED = "the low-noise expert is not imported: the high-noise expert runs over the whole range"
_COPIED = ("vae", "text_encoder", "tokenizer", "scheduler", "conditioning")


def import_weights(
    source: Path | str, out: Path | str, *, assets: Path | str | None = None, architecture: str | None = None
) -> Artifact:
    """Publish foreign weights at `out` as an artifact; done already (same files) is verified and returned.

    `assets`: the base assets artifact that trained weights belong to (their codec and text encoder are not in a package);
    required for trained weights, refused for base weights. `architecture`: a name under config/models; by default the one
    whose tensors these are. Every source file is hashed, and the digests are the artifact's identity.
    """
    source, out = Path(source), Path(out)
    if (source / PACKAGE / released.MODEL).is_file():  # our export of a package
        source = source / PACKAGE
    if released.is_package(source):
        return _import_package(source, out, _needed(assets, source))
    if sidecar_of(source) is not None:
        return _import_export(source, out, _needed(assets, source))
    if assets is not None:
        raise ConfigError(
            f"{source}: holds base weights, which need no --assets; trained weights are a released package (model.pt) or an "
            f"export with {official.SIDECAR}"
        )
    return _import_base(official.find_base(source), out, architecture)


def _needed(assets: Path | str | None, source: Path) -> Artifact:
    if assets is None:
        raise ConfigError(
            f"{source}: holds trained weights; name the base assets they belong to with --assets"
        )
    return artifacts.read(assets, ASSETS_SCHEMA)


def digests(root: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return {path relative to `root`: SHA-256} of source files."""
    result = {}
    for file in sorted(files):
        with open(file, "rb") as stream:
            result[file.relative_to(root).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return result


def _import_base(base: official.Base, out: Path, architecture: str | None) -> Artifact:
    from solarwm_lib.weights import tensors

    if missing := base.missing():
        raise ArtifactError(
            f"{base.root}: a {base.layout} without {', '.join(missing)}; fetch the missing files, or import the transformer alone"
        )
    network, architecture = official.transformer(base.transformer, architecture)
    described = load_architecture(architecture)
    files = _base_files(base)
    identity = {"architecture": architecture, "layout": base.layout, "source": digests(base.root, files)}
    if (done := artifacts.reissue(out, ASSETS_SCHEMA, identity)) is not None:
        return done
    for file in files:
        if file.suffix == ".pth":
            tensors.check_archive(file)
    converted = {} if base.layout in (official.DIFFUSERS, official.BARE) else _converted(base, described)
    if (expert := base.left_out()) is not None:
        log.warning("%s: %s", expert, NOT_IMPORTED)
    size = sum(file.stat().st_size for file in files)
    with Transaction(out, ASSETS_SCHEMA, identity, expected_bytes=size) as transaction:
        tensors.write_component(transaction, "transformer", network)
        transaction.write_json("transformer/config.json", diffusers_config(described))
        for name, (weights, config, stem) in converted.items():
            tensors.write_component(transaction, name, weights, stem=stem)
            transaction.write_json(f"{name}/config.json", config)
        for name in _COPIED:
            folder = getattr(base, name)
            if folder is not None and folder.is_dir():
                _copy(transaction, folder, name)
        if base.layout != official.BARE:
            if base.scheduler is None:
                transaction.write_json("scheduler/scheduler_config.json", _scheduler_config())
            transaction.write_json("model_index.json", _model_index(base, described))
    return transaction.artifact


def _base_files(base: official.Base) -> list[Path]:
    files = [*inventory.shard_files(base.transformer)]
    for part in (base.vae, base.text_encoder, base.tokenizer, base.scheduler, base.conditioning):
        if part is not None:
            files += [part] if part.is_file() else _tree(part)
    if base.layout == official.DIFFUSERS:
        files.append(base.root / "model_index.json")
    return files


def _tree(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts)


def _copy(transaction: Transaction, folder: Path, name: str) -> None:
    for file in _tree(folder):
        with (
            open(file, "rb") as source,
            transaction.open(f"{name}/{file.relative_to(folder).as_posix()}") as target,
        ):
            shutil.copyfileobj(source, target, 2**20)


def _converted(
    base: official.Base, architecture: Mapping[str, Any]
) -> dict[str, tuple[Weights, dict[str, Any], str]]:
    """Return {component: (tensors, config, file stem)} of the parts that are torch archives."""
    assert base.vae and base.text_encoder  # `missing` was empty
    codec = official.vae(base.vae, architecture["latent_channels"])
    text = official.text_encoder(base.text_encoder, architecture["transformer"]["text_dim"])
    return {"vae": (*codec, "diffusion_pytorch_model"), "text_encoder": (*text, "model")}


def _scheduler_config() -> dict[str, Any]:
    from diffusers import UniPCMultistepScheduler

    # Our samplers pin their own grid by model.timestep_shift; this is for other programs that open the folder.
    scheduler: Any = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=FLOW_SHIFT,
        num_train_timesteps=1000,
    )
    return dict(json.loads(scheduler.to_json_string()))


def _model_index(base: official.Base, architecture: Mapping[str, Any]) -> dict[str, Any]:
    """SolarWM runs the high-noise expert over the whole range: a second expert and its boundary are not imported."""
    if base.layout == official.DIFFUSERS:
        index = dict(json.loads((base.root / "model_index.json").read_bytes()))
        if index.get("transformer_2", [None])[0] is not None:
            index.update(transformer_2=[None, None], boundary_ratio=None)
        return index
    from diffusers import __version__

    image = architecture["transformer"]["in_channels"] != architecture["latent_channels"]
    return {
        "_class_name": "WanImageToVideoPipeline" if image else "WanPipeline",
        "_diffusers_version": __version__,
        "boundary_ratio": None,
        "expand_timesteps": not image,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", _tokenizer_class(base.tokenizer)],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
        **({"image_encoder": [None, None], "image_processor": [None, None]} if image else {}),
    }


def _tokenizer_class(folder: Path | None) -> str:
    """Return the class its `tokenizer_config.json` names; pipelines cannot load the generic AutoTokenizer."""
    path = folder / "tokenizer_config.json" if folder else None
    found = json.loads(path.read_bytes()).get("tokenizer_class") if path and path.is_file() else None
    return str(found or "PreTrainedTokenizerFast")


def diffusers_config(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return `transformer/config.json` of diffusers' WanTransformer3DModel for an architecture."""
    from diffusers import __version__

    return {
        "_class_name": "WanTransformer3DModel",
        "_diffusers_version": __version__,
        **architecture["transformer"],
    }


def _import_package(source: Path, out: Path, assets: Artifact) -> Artifact:
    from solarwm_lib.weights import tensors

    package = released.read_package(source)
    identity = _trained_identity(package.step, assets, digests(package.files[0].parent, package.files))
    updates = 1 if package.ema_updates is None else package.ema_updates
    run = {
        "route": package.contract.route,
        "config": dict(package.contract.config),
        "imported": {
            "kind": package.kind,
            "config": _plain(package.config),
            "default_role": package.default_role,
            "dtypes": {role: inventory.summary(w.infos)["dtypes"] for role, w in package.roles.items()},
            "ema_updates_recorded": package.ema_updates is not None,
            "student_step": package.student_step,
        },
    }
    parts = {**package.roles, **({"critic": package.critic} if package.critic is not None else {})}
    if (done := _done(out, identity)) is not None:
        return done
    for file in package.files:
        tensors.check_archive(file)
    return _write_checkpoint(out, identity, assets, parts, package.step, updates, run)


def _trained_identity(step: int, assets: Artifact, source: Mapping[str, str]) -> dict[str, Any]:
    return {
        "semantic_digest": None,
        "dataset": None,
        "assets": assets.digest,
        "initial": None,
        "source": dict(source),
        "step": step,
    }


def _done(out: Path, identity: dict[str, Any]) -> Artifact | None:
    from solarwm_lib.training import checkpoint

    return artifacts.reissue(out, checkpoint.SCHEMA, identity)


def _write_checkpoint(
    out: Path, identity: dict[str, Any], assets: Artifact, parts: Mapping[str, Weights], step: int, updates: int,
    run: dict[str, Any],
) -> Artifact:  # fmt: skip
    """Publish weights without optimizer, in float32 as masters are: full resume is refused for lack of that member."""
    from solarwm_lib.training import checkpoint
    from solarwm_lib.weights import tensors

    members = {**checkpoint.WEIGHTS, "critic": CRITIC}
    state = checkpoint.State(
        completed_steps=step,
        ema_updates=updates,
        stream_position=0,
        learning_rate=0.0,
        global_batch_size=0,
        run={"semantic_digest": None, **run},
    )
    masters = {role: weights.cast("float32") for role, weights in parts.items()}
    size = sum(info.bytes for weights in masters.values() for info in weights.infos.values())
    with Transaction(out, checkpoint.SCHEMA, identity, [assets], expected_bytes=size) as transaction:
        for role, weights in masters.items():
            with transaction.open(members[role]) as stream:
                tensors.write_stream(stream, weights)
        transaction.write_bytes(checkpoint.STATE, json_bytes(asdict(state)))
    return transaction.artifact


def _plain(value: Any) -> Any:
    """Return JSON values of a configuration (tuples become lists)."""
    return json.loads(json.dumps(value))


def sidecar_of(source: Path) -> Path | None:
    """Return the record our exports put beside a transformer's weights, None if there is none."""
    for folder in (source, source / "transformer"):
        if (folder / official.SIDECAR).is_file():
            return folder / official.SIDECAR
    return None


def read_sidecar(path: Path) -> dict[str, Any]:
    """Return the record beside exported weights; ArtifactError if it is damaged or of another schema."""
    try:
        record = json.loads(path.read_bytes())
        if record["schema"] != SIDECAR_SCHEMA:
            raise ValueError(f"schema {record['schema']!r}, expected {SIDECAR_SCHEMA!r}")
        if (
            record["role"] not in ("live", "ema")
            or type(record["step"]) is not int
            or not isinstance(record["config"], dict)
        ):
            raise ValueError("role, step or config is not what it must be")
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: damaged ({type(error).__name__}: {error})") from None
    return dict(record)


def read_export(path: Path) -> tuple[Weights, Contract, dict[str, Any]]:
    """Return (weights under diffusers names, contract, record) of our export in diffusers or official form."""
    from solarwm_lib.weights import tensors

    record = read_sidecar(path)
    facts = contract.checked(Contract(record["config"]), str(path))
    weights = tensors.from_safetensors(path.parent)
    weights = weights.renamed(keys.transformer_names(weights.infos, "diffusers", weights.where))
    arguments = load_architecture(facts["model.architecture"])["transformer"]
    shapes = inventory.transformer_shapes(arguments, facts.anyflow)
    inventory.require(weights.infos, shapes, str(path.parent), "the export")
    return weights, facts, record


def _import_export(source: Path, out: Path, assets: Artifact) -> Artifact:
    sidecar = sidecar_of(source)
    assert sidecar is not None
    weights, facts, record = read_export(sidecar)
    files = [sidecar, *inventory.shard_files(sidecar.parent)]
    identity = _trained_identity(record["step"], assets, digests(sidecar.parent, files))
    if (done := _done(out, identity)) is not None:
        return done
    run = {
        "route": facts.route,
        "config": record["config"],
        "imported": {"kind": "export", "role": record["role"]},
    }
    updates = record["ema_updates"]
    return _write_checkpoint(out, identity, assets, {record["role"]: weights}, record["step"], updates, run)


def export_weights(
    checkpoint: Path | str, out: Path | str, form: str, *, role: str | None = None, dtype: str | None = None
) -> Artifact:
    """Publish the weights of one of our checkpoints for other programs, as artifact `solarwm.export.v1`.

    `form`: "diffusers" or "official" (one `role`, "live" or "ema", under `transformer/`, with `solarwm-weights.json` beside
    it saying what it was trained for), or "released" (`package/`, every role the checkpoint has; give no role).
    `dtype` casts ("bfloat16" halves the size; the EMA of a package stays float32); None keeps what is stored.
    ArtifactError for a role the checkpoint does not have: an average never updated is not a result.
    """
    from solarwm_lib.training import checkpoint as checkpoints

    if form not in FORMATS:
        raise ConfigError(f"format {form!r}; expected one of {', '.join(FORMATS)}")
    if dtype not in (None, *DTYPES):
        raise ConfigError(
            f"dtype {dtype!r}; expected one of {', '.join(DTYPES)}, or none to keep what is stored"
        )
    if (form == "released") == (role is not None):
        found = f"role {role}" if role else "no role"
        raise ConfigError(
            f"format {form} with {found}; diffusers and official take live or ema, a released package holds both"
        )
    source = artifacts.verify(checkpoint, deep=True, schema=checkpoints.SCHEMA)
    state = checkpoints.read_state(source)
    facts = contract.checked(facts_of(state.run, source.path), str(source.path))
    present = roles_of(source, state)
    wanted = [role] if role else ["live", *(name for name in present if name != "live")]
    identity = {"source": source.digest, "format": form, "role": "+".join(wanted), "dtype": dtype}
    if (done := artifacts.reissue(Path(out), EXPORT_SCHEMA, identity, parents=[source])) is not None:
        return done
    if missing := [name for name in wanted if name not in present]:
        raise ArtifactError(
            f"{source.path}: has no {missing[0]} weights at step {state.completed_steps} (EMA updates: {state.ema_updates}); it has "
            f"{', '.join(present) or 'none'}"
        )
    arguments = load_architecture(facts["model.architecture"])["transformer"]
    shapes = inventory.transformer_shapes(arguments, facts.anyflow)
    from solarwm_lib.weights import tensors

    weights = {
        name: tensors.from_safetensors(checkpoints.files_of(source, checkpoints.WEIGHTS[name]))
        for name in wanted
    }
    for name, part in weights.items():
        inventory.require(
            part.infos, shapes, f"{source.path}: {checkpoints.WEIGHTS[name]}", "model.architecture"
        )
    size = sum(info.bytes for part in weights.values() for info in part.infos.values())
    with Transaction(out, EXPORT_SCHEMA, identity, [source], expected_bytes=size) as transaction:
        if form == "released":
            cast = {name: part.cast("float32" if name == "ema" else dtype) for name, part in weights.items()}
            config = state.run.get("imported", {}).get("config") or contract.to_released(facts)
            released.write_package(
                transaction.staging / PACKAGE, facts, config, cast, state.completed_steps, state.ema_updates
            )
        else:
            record = {
                "schema": SIDECAR_SCHEMA,
                "role": wanted[0],
                "step": state.completed_steps,
                "ema_updates": state.ema_updates,
                "config": dict(facts.config),
            }
            _write_transformer(transaction, form, weights[wanted[0]].cast(dtype), facts, record)
    return transaction.artifact


def facts_of(run: Mapping[str, Any], path: Path) -> Contract:
    """Return the contract of a checkpoint's `state.json`; ArtifactError if it does not describe its run."""
    config = run.get("config")
    if not isinstance(config, Mapping) or contract.lookup(config, "model.architecture") is None:
        raise ArtifactError(f"{path}: state.json does not say which model and route its weights are of")
    return Contract(config)


def roles_of(source: Artifact, state: Any) -> list[str]:
    """Return the roles a checkpoint can give: members that are there, the average only if it was ever updated."""
    from solarwm_lib.training import checkpoint

    members = checkpoint.members_in(member.path for member in source.members)
    present = [role for role, member in checkpoint.WEIGHTS.items() if member in members]
    return [role for role in present if role == "live" or state.ema_updates > 0]


def _write_transformer(
    transaction: Transaction, form: str, weights: Weights, facts: Contract, record: Mapping[str, Any]
) -> None:
    from solarwm_lib.weights import tensors

    architecture = load_architecture(facts["model.architecture"])
    if form == "official":
        weights = weights.renamed(keys.transformer_names(weights.infos, "official", weights.where))
        config = official.official_config(architecture)
    else:
        config = diffusers_config(architecture)
    tensors.write_component(transaction, "transformer", weights)
    transaction.write_json("transformer/config.json", config)
    transaction.write_json(f"transformer/{official.SIDECAR}", dict(record))
