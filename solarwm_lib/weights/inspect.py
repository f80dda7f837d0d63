"""`solarwm weights inspect`: what a file or folder of weights is and where it would load, without loading a tensor.

safetensors are described from their headers; torch archives are mapped, only their table of contents is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solarwm_lib import artifacts
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.weights import contract, convert, inventory, keys, official, released
from solarwm_lib.weights.contract import Contract

CHECKPOINT_SCHEMA = "solarwm.checkpoint.v1"


def inspect(path: Path | str) -> dict[str, Any]:
    """Return a JSON-able description of the weights at `path`.

    Keys: `path`, `kind`, `family`, `architecture`, `stage`, `objective`, `step`, `roles` ({role: tensors, parameters,
    bytes, dtypes, style, prefix, anyflow}), `facts` (what it was trained for), `loads` (list of {where, role, how}) and
    `problems`. What a file does not say is None. ArtifactError if it is damaged or no weights file at all.
    """
    path = Path(path)
    if not path.exists():
        raise ArtifactError(f"{path}: does not exist")
    if path.name == artifacts.MARKER:
        path = path.parent
    schema = _artifact_schema(path) if path.is_dir() else None
    if schema == CHECKPOINT_SCHEMA:
        report = _checkpoint(path)
    elif schema == convert.EXPORT_SCHEMA and (path / convert.PACKAGE).is_dir():
        report = _package(path / convert.PACKAGE)
    elif released.is_package(path):
        report = _package(path)
    elif path.suffix in (".pt", ".pth", ".bin"):
        report = _archive(path)
    elif convert.sidecar_of(path) is not None:
        report = _export(path)
    else:
        report = _base(path)
    return {"path": str(path), **report}


def _artifact_schema(path: Path) -> str | None:
    try:
        value = json.loads((path / artifacts.MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return value.get("schema") if isinstance(value, dict) else None


def _report(kind: str, facts: Contract | None = None, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "kind": kind,
        "family": facts.family if facts else None,
        "architecture": facts["model.architecture"] if facts else None,
        "stage": facts.stage if facts else None,
        "objective": facts["train.objective"] if facts else None,
        "route": facts.route if facts else None,
        "step": None,
        "roles": {},
        "facts": facts.facts() if facts else {},
        "loads": [],
        "problems": [],
    }
    return {**base, **fields}


def _role(infos: Mapping[str, Any], style: str, prefix: str = "") -> dict[str, Any]:
    """Counts of a transformer whose tensors have diffusers names in `infos`; style and prefix are those in the file."""
    counts = inventory.summary(infos)
    return {**counts, "style": style, "prefix": prefix, "anyflow": inventory.has_delta(infos)}


def _checkpoint(path: Path) -> dict[str, Any]:
    from solarwm_lib.training import checkpoint

    artifact = artifacts.read(path, checkpoint.SCHEMA)
    state = checkpoint.read_state(artifact)
    facts = contract.checked(convert.facts_of(state.run, path), str(path))
    shapes = _shapes(facts)
    members = checkpoint.members_in(member.path for member in artifact.members)
    roles, problems = {}, []
    for role, member in (*checkpoint.WEIGHTS.items(), ("critic", checkpoint.CRITIC)):
        if member not in members:
            continue
        infos = inventory.read_shards(checkpoint.files_of(artifact, member))[0]
        problems += [f"{member}: {problem}" for problem in inventory.problems(infos, shapes)]
        roles[role] = _role(infos, "diffusers")
    usable = convert.roles_of(artifact, state)
    if "ema" in roles and "ema" not in usable:
        problems.append(
            f"the EMA was never updated up to step {state.completed_steps}: role ema does not load"
        )
    whole = set(checkpoint.INVENTORY) <= members and not artifact.dropped
    loads = _uses(facts, usable, "as it is")
    if whole and facts.stage == "stage2":
        loads.insert(0, _load("its own run", "live+ema", "which goes on from it by itself"))
    elif whole:
        loads.insert(0, _load("checkpoint.path", "live+ema", "checkpoint.mode: full_resume, same run"))
    kind = "checkpoint" if whole else "checkpoint without optimizer (weights only)"
    return _report(
        kind, facts, step=state.completed_steps, roles=roles, loads=loads if not problems else [], problems=problems,
        ema_updates=state.ema_updates, imported=state.run.get("imported"),
    )  # fmt: skip


def _shapes(facts: Contract) -> dict[str, tuple[int, ...]]:
    architecture = load_architecture(facts["model.architecture"])
    return inventory.transformer_shapes(architecture["transformer"], facts.anyflow)


def _package(path: Path) -> dict[str, Any]:
    package = released.read_package(path)
    prefix = keys.PREFIX if package.contract.stage == "stage2" else ""
    roles = {role: _role(weights.infos, "official", prefix) for role, weights in package.roles.items()}
    if package.critic is not None:
        roles["critic"] = _role(package.critic.infos, "official", prefix)
    notes = [] if package.complete else ["no manifest vouches for this file: weight initialisation only"]
    return _report(
        f"released {package.kind}" if package.complete else f"bare {released.MODEL} of a {package.kind}",
        package.contract,
        step=package.step,
        roles=roles,
        loads=_uses(package.contract, list(package.roles), "after `solarwm weights import`"),
        notes=notes,
        ema_updates=package.ema_updates,
        default_role=package.default_role,
    )


def _export(path: Path) -> dict[str, Any]:
    sidecar = convert.sidecar_of(path)
    assert sidecar is not None
    weights, facts, record = convert.read_export(sidecar)
    stored = inventory.read_shards(inventory.shard_files(sidecar.parent))[0]
    style = keys.style_of(stored) or "diffusers"
    roles = {record["role"]: _role(weights.infos, style)}
    return _report(
        f"export of a {facts.stage} checkpoint in {style} form", facts, step=record["step"], roles=roles,
        loads=_uses(facts, [record["role"]], "after `solarwm weights import`"), ema_updates=record["ema_updates"],
    )  # fmt: skip


def _base(path: Path) -> dict[str, Any]:
    base = official.find_base(path)
    files = inventory.shard_files(base.transformer)
    stored, _ = inventory.read_shards(files)
    if keys.style_of(keys.strip_prefix(stored, str(base.transformer))) is None:
        return _report("safetensors of another network", roles={"weights": inventory.summary(stored)},
                       problems=["no Wan 2.2 transformer: nothing here loads it"])  # fmt: skip
    names = keys.transformer_names(stored, "diffusers", str(base.transformer))
    infos = {new: stored[old] for new, old in names.items()}
    bare = keys.strip_prefix(stored, str(base.transformer))
    role = _role(infos, keys.style_of(bare) or "", keys.PREFIX if set(bare) != set(stored) else "")
    name, difference = inventory.match_architecture(infos)
    problems = [f"missing {part}" for part in base.missing()]
    if name is None:
        problems.append(difference)
    elif role["anyflow"]:
        problems.append(
            "the second time embedding of AnyFlow is there, and nothing says what it was trained for"
        )
    loads = []
    if (
        not problems
        and base.layout == official.DIFFUSERS
        and _artifact_schema(base.root) == convert.ASSETS_SCHEMA
    ):
        loads.append(_load("model.base_path", "base", f"as it is, with model.architecture: {name}"))
    elif not problems:
        loads.append(
            _load(
                "model.base_path", "base", f"after `solarwm weights import`, with model.architecture: {name}"
            )
        )
    family = load_architecture(name)["family"] if name else None
    expert = base.left_out()
    parts = [p for p in ("vae", "text_encoder", "tokenizer", "scheduler", "conditioning") if getattr(base, p)]
    return _report(
        f"base weights ({base.layout})", family=family, architecture=name, roles={"base": role}, loads=loads,
        problems=problems, parts=["transformer", *parts], shards=len(files),
        notes=[f"{expert.name}: {convert.NOT_IMPORTED}"] if expert else [],
    )  # fmt: skip


def _archive(path: Path) -> dict[str, Any]:
    """A `.pth` that is one state dict: Wan's VAE or text encoder, or a bare transformer."""
    from solarwm_lib.weights.tensors import from_archive

    weights = from_archive(path)
    bare = set(keys.strip_prefix(weights.infos, str(path)))
    counts = {"weights": inventory.summary(weights.infos)}
    where = "after `solarwm weights import` of the folder it belongs to"
    if {"encoder.conv1.weight", "encoder.conv_in.weight"} & bare:
        channels = weights.infos.get("conv2.weight") or weights.infos.get("post_quant_conv.weight")
        family = {48: "wan22_ti2v_5b", 16: "wan22_i2v_a14b"}.get(channels.shape[0] if channels else 0)
        return _report(
            "Wan VAE", family=family, roles=counts, loads=[_load("model.base_path (vae)", "base", where)]
        )
    if "token_embedding.weight" in bare:
        return _report(
            "UMT5 text encoder", roles=counts, loads=[_load("model.base_path (text_encoder)", "base", where)]
        )
    problem = "not a VAE, a text encoder or a released payload: nothing here loads it"
    if keys.style_of(bare):
        problem = "a transformer without config and step: nothing says what it was trained for"
    return _report("state dict", roles=counts, problems=[problem])


def _load(where: str, role: str, how: str) -> dict[str, str]:
    return {"where": where, "role": role, "how": how}


def _uses(facts: Contract, roles: list[str], how: str) -> list[dict[str, str]]:
    """Where weights of a stage load: operations 9.5, spec wan22 7.4."""
    uses = []
    for role in roles:
        uses.append(_load(f"validation and inference of {facts.route}", role, how))
        if facts.stage == "stage0p5":
            uses.append(
                _load("checkpoint.path", role, f"{how}; checkpoint.mode: weights_only of a Stage0.5 run")
            )
            if facts.family == "wan22_ti2v_5b":
                uses.append(
                    _load(
                        "checkpoint.initialization.teacher and .critic", role, f"{how}; Stage2, both the same"
                    )
                )
        if facts.stage == "stage0p5" and role == "ema" and facts.family == "wan22_ti2v_5b":
            uses.append(
                _load("checkpoint.path", role, f"{how}; checkpoint.mode: weights_only of a Stage1 run")
            )
        if facts.stage == "stage1" and role == "ema" and facts.anyflow:
            uses.append(
                _load(
                    "checkpoint.initialization.student",
                    role,
                    f"{how}; Stage2, the 4 delta tensors are dropped",
                )
            )
    return uses


def format_report(report: Mapping[str, Any]) -> str:
    """Return the report as a few lines for people."""
    lines = [f"{report['path']}: {report['kind']}"]
    for name in ("family", "architecture", "route", "step", "ema_updates", "default_role"):
        if report.get(name) is not None:
            lines.append(f"  {name}: {report[name]}")
    for role, counts in report["roles"].items():
        dtypes = ", ".join(f"{name} {count:,}" for name, count in counts["dtypes"].items())
        extra = ", with the AnyFlow time embedding" if counts.get("anyflow") else ""
        style = f", {counts['style']} keys" if counts.get("style") else ""
        style += f" with prefix {counts['prefix']!r}" if counts.get("prefix") else ""
        lines.append(
            f"  {role}: {counts['parameters']:,} parameters in {counts['tensors']} tensors ({dtypes}){style}{extra}"
        )
    if report["facts"]:
        lines.append(
            "  trained for: " + ", ".join(f"{name} {value}" for name, value in report["facts"].items())
        )
    lines += [f"  loads: {load['where']} as {load['role']}, {load['how']}" for load in report["loads"]]
    lines += [f"  note: {note}" for note in report.get("notes", [])]
    lines += [f"  problem: {problem}" for problem in report["problems"]]
    return "\n".join(lines)
