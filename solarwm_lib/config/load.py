"""From files and `--set` to one resolved configuration: parse, merge, override, expand, validate, make paths absolute."""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from solarwm_lib.config import identity, rules
from solarwm_lib.config.architectures import CONFIG_ROOT, did_you_mean, load_architecture
from solarwm_lib.config.routes import Route, route_for
from solarwm_lib.config.schema import RunConfig, unknown_keys, validate
from solarwm_lib.config.yaml12 import parse_json, parse_yaml
from solarwm_lib.runtime.errors import ConfigError

__all__ = [
    "Resolved",
    "did_you_mean",
    "load",
    "load_architecture",
    "load_resolved",
    "parse_yaml",
    "placeholders",
    "refuse_placeholders",
    "resolve_values",
    "write_resolved",
]

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True)
class Resolved:
    """A configuration with all defaults filled in and all paths absolute, and what identifies it."""

    values: dict[str, Any]
    config: RunConfig
    route: Route
    source: str
    source_digest: str  # sha256 of the file's bytes, or of the canonical JSON where there is no file
    semantic_digest: str  # decides "is this the same run"
    full_digest: str  # provenance: also paths, cadence, topology
    deviations: list[dict[str, Any]]  # [{key, value, released}] against the released recipe
    recipe: str | None  # that recipe, relative to config/recipes
    placeholders: list[str]  # keys whose value still is /path/to/...
    overlays: list[str]  # files merged over the source, in order
    sets: list[str]  # the --set texts, in order


def read_values(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or (suffix .json) JSON file, unexpanded; `ConfigError` names file and line."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    values = parse_json(text, str(path)) if path.suffix == ".json" else parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping at the top level")
    return values


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`overlay` over `base`: mappings merge key by key, everything else replaces. Neither argument changes."""
    result = copy.deepcopy(dict(base))
    for key, value in overlay.items():
        below = result.get(key)
        nested = isinstance(below, dict) and isinstance(value, Mapping)
        result[key] = merge(below, value) if nested and below is not None else copy.deepcopy(value)
    return result


def apply_set(values: dict[str, Any], text: str) -> None:
    """Apply one `a.b.c=VALUE` in place. VALUE is YAML, so it has the type it would have in a file."""
    path, equals, value_text = text.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        # Without "=" the text may be a pasted secret: only its key part is ever shown.
        raise ConfigError(
            "--set: expected KEY=VALUE with dotted KEY, such as train.optimizer.learning_rate=5e-5"
        )
    key = ".".join(parts)
    if value_text.strip() and any(identity.is_secret_name(part) for part in parts):
        raise ConfigError(
            f"--set {key}: a secret in a configuration is refused; give {key}_file, a path, instead"
        )
    value = parse_yaml(value_text, f"--set {key}")
    target: Any = values
    for depth, part in enumerate(parts[:-1]):
        if isinstance(target, list):
            target = target[_position(target, part, parts[:depth])]
        else:
            child = target.get(part)
            if child is None:
                child = target[part] = {}
            target = child
        if not isinstance(target, dict | list):
            raise ConfigError(f"--set {key}: {'.'.join(parts[: depth + 1])} is a value, not a section")
    if isinstance(target, list):
        target[_position(target, parts[-1], parts[:-1])] = value
    else:
        target[parts[-1]] = value


def _position(items: list[Any], part: str, above: Sequence[str]) -> int:
    if part.isascii() and part.isdigit() and int(part) < len(items):
        return int(part)
    raise ConfigError(
        f"--set {'.'.join([*above, part])}: {'.'.join(above)} is a list of {len(items)}; positions start at 0"
    )


def expand(value: Any, key: str = "") -> Any:
    """`${NAME}` in every text replaced by the environment variable; an unset one is an error that names the key."""
    if isinstance(value, dict):
        return {name: expand(child, f"{key}.{name}" if key else name) for name, child in value.items()}
    if isinstance(value, list):
        return [expand(child, f"{key}.{position}") for position, child in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if identity.is_secret_name(name):
            raise ConfigError(
                f"{key}: ${{{name}}} would write a secret into the run's records; it is refused"
            )
        if name not in os.environ:
            raise ConfigError(
                f"{key}: environment variable {name} is not set; set it or use --set {key}=VALUE"
            )
        return os.environ[name]

    return _VARIABLE.sub(replace, value)


def resolve_values(
    values: Mapping[str, Any],
    *,
    source: str = "<values>",
    sets: Iterable[str] = (),
    overlays: Sequence[Path | str | Mapping[str, Any]] = (),
    source_digest: str | None = None,
    base_dir: Path | None = None,
) -> Resolved:
    """Merge overlays and sets over `values`, validate, and make paths absolute below `base_dir` (default: here)."""
    sets = list(sets)
    merged = _merge_layers(values, source, overlays)
    for text in sets:
        apply_set(merged, text)
    # The layers below are known to be good, so what is wrong now came with --set.
    _refuse_layer(merged, "--set")
    try:
        expanded = expand(merged)
        identity.secrets_check(expanded)
        config = validate(_absolute(expanded, base_dir or Path.cwd()))
        _check_metadata(config.metadata)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    complete = config.values()
    recipe, deviations = released_recipe(complete)
    return Resolved(
        values=complete,
        config=config,
        route=route_for(config),
        source=source,
        source_digest=source_digest or identity.digest(dict(values)),
        semantic_digest=identity.digest(identity.semantic_view(complete)),
        full_digest=identity.digest(complete),
        deviations=deviations,
        recipe=recipe,
        placeholders=placeholders(complete),
        overlays=["<values>" if isinstance(overlay, Mapping) else str(overlay) for overlay in overlays],
        sets=sets,
    )


def _merge_layers(
    values: Mapping[str, Any], source: str, overlays: Sequence[Path | str | Mapping[str, Any]]
) -> dict[str, Any]:
    """`values` with the overlays over them; secrets and unknown keys are refused naming the layer they stand in."""
    merged = copy.deepcopy(dict(values))
    _refuse_layer(merged, source)
    for overlay in overlays:
        over = overlay if isinstance(overlay, Mapping) else read_values(Path(overlay))
        _refuse_layer(over, "<overlay>" if isinstance(overlay, Mapping) else str(overlay))
        # One overlay serves the train, infer and preencode recipes of a scale; each takes the sections it reads.
        unused = rules.UNUSED_SECTIONS.get(str(over.get("action", merged.get("action"))), set())
        merged = merge(merged, {key: value for key, value in over.items() if key not in unused})
    return merged


def _refuse_layer(values: Mapping[str, Any], source: str) -> None:
    try:
        identity.secrets_check(values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    unknown = list(unknown_keys(values))
    if unknown:
        raise ConfigError(f"{source}: {'; '.join(unknown)}")


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Metadata is free, but must have a JSON form (mappings given from Python may hold anything)."""
    try:
        identity.canonical_json(metadata)
    except (TypeError, ValueError):
        raise ConfigError(
            "metadata: expected text, numbers, true/false, null, lists and mappings only"
        ) from None


def load(
    path: Path | str,
    overlays: Sequence[Path | str | Mapping[str, Any]] = (),
    sets: Iterable[str] = (),
    *,
    base_dir: Path | None = None,
) -> Resolved:
    """Resolve a configuration file with overlay files (or mappings) and `--set` texts over it."""
    path = Path(path)
    values = read_values(path)
    file_digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return resolve_values(
        values, source=str(path), sets=sets, overlays=overlays, source_digest=file_digest, base_dir=base_dir
    )


def load_resolved(path: Path | str) -> Resolved:
    """Read back a `resolved-config.json`; its digests are those it was written with."""
    return load(path)


def write_resolved(resolved: Resolved, path: Path | str) -> None:
    """Write the resolved values as canonical single-line JSON, atomically; feeding the file back gives the same digests."""
    from solarwm_lib.runtime.files import write_atomic

    write_atomic(Path(path), identity.canonical_json(resolved.values).encode("utf-8"))


def placeholders(values: Mapping[str, Any]) -> list[str]:
    """Keys whose value still is the recipes' `/path/to/...`."""
    return [key for key, value in identity.flatten(values) if rules.placeholder(value)]


def used_paths(values: Mapping[str, Any]) -> list[str]:
    """Path keys this configuration's action opens: output, base weights, data, and the checkpoint where one is read."""
    keys = [key for key in identity.PATH_KEYS if not key.startswith("checkpoint.")]
    flat = dict(identity.flatten(values))
    if flat.get("checkpoint.mode", "none") != "none":
        keys += [key for key in identity.PATH_KEYS if key.startswith("checkpoint.")]
    return [key for key in keys if flat.get(key)]


def refuse_placeholders(values: Mapping[str, Any], used_keys: Iterable[str] | None = None) -> None:
    """Before a launch: no used field may still be `/path/to/...`."""
    flat = dict(identity.flatten(values))
    keys = (
        list(used_keys)
        if used_keys is not None
        else [*used_paths(values), "data.train_index", "data.test_index"]
    )
    found = [key for key in keys if rules.placeholder(flat.get(key))]
    if found:
        raise ConfigError(
            f"{', '.join(found)}: still the placeholder /path/to/...; set it in the file or with --set {found[0]}=PATH"
        )


def _absolute(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """A copy whose path fields are absolute; bucket addresses stay as they are."""
    result = copy.deepcopy(values)
    for key in identity.PATH_KEYS:
        *sections, leaf = key.split(".")
        target: Any = result
        for section in sections:
            target = target.get(section) if isinstance(target, dict) else None
        if (
            isinstance(target, dict)
            and isinstance(target.get(leaf), str)
            and target[leaf]
            and "://" not in target[leaf]
        ):
            target[leaf] = os.path.abspath(base / Path(target[leaf]).expanduser())
    reuse = result.get("preencode", {}).get("reuse") if isinstance(result.get("preencode"), dict) else None
    if isinstance(reuse, list):
        result["preencode"]["reuse"] = [
            os.path.abspath(base / Path(path).expanduser()) if isinstance(path, str) else path
            for path in reuse
        ]
    return result


@cache
def _recipes() -> dict[str, dict[str, Any]]:
    """Released recipes as validated values, by path relative to config/recipes."""
    root = CONFIG_ROOT / "recipes"
    return {
        path.relative_to(root).as_posix(): validate(read_values(path)).values()
        for path in sorted(root.rglob("*.yaml"))
    }


def released_recipe(values: Mapping[str, Any]) -> tuple[str | None, list[dict[str, Any]]]:
    """The released recipe nearest to `values` and every field that differs from it.

    Recipes of the same route and action count; first of the same frame count, then with the fewest differences. Paths
    and fields that never change a result are no deviation.
    """

    def route_key(candidate: Mapping[str, Any]) -> tuple[Any, ...]:
        train = candidate.get("train", {})
        parts = [train.get(name) for name in ("stage", "causal_mode", "objective", "objective_variant")]
        return candidate["action"], candidate["model"]["family"], *parts

    found: list[tuple[bool, int, str, list[dict[str, Any]]]] = []
    for name, recipe in _recipes().items():
        if route_key(recipe) != route_key(values):
            continue
        rows = [
            {"key": row.key, "value": row.a, "released": row.b}
            for row in identity.diff(values, recipe)
            if row.field_class != "free" and row.key not in identity.PATH_KEYS
        ]
        other_length = recipe["data"]["pixel_frames"] != values["data"]["pixel_frames"]
        found.append((other_length, len(rows), name, rows))
    return min(found)[2:] if found else (None, [])
