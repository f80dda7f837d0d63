"""What one field demands of another: derived defaults, and refusals that give the nearest legal values.

Only what is structurally impossible is refused; a legal value that differs from the released recipe is recorded as a
deviation elsewhere.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from solarwm_lib.config import defaults, geometry, stage_rules
from solarwm_lib.config.architectures import architecture_names, load_architecture
from solarwm_lib.config.routes import FAMILY_ALIASES, ROUTES, Route, route_for
from solarwm_lib.runtime.errors import ConfigError

if TYPE_CHECKING:
    from solarwm_lib.config.schema import RunConfig
    from solarwm_lib.config.sections import Transport

TRANSPORT_SCHEMES = ("s3://", "gs://", "memory://")
UNUSED_SECTIONS: dict[str, set[str]] = {
    "train": {"inference", "preencode"},
    "infer": {"preencode"},
    "preencode": {"train", "validation", "checkpoint", "inference"},
}


def check_sections(values: Mapping[str, Any]) -> None:
    """A section the action never reads is refused: a setting there would silently do nothing."""
    action = values.get("action")
    unused = UNUSED_SECTIONS.get(action, set()) if isinstance(action, str) else set()
    for section in sorted(unused & values.keys()):
        raise ConfigError(f"section {section} is not used by action {action}; remove it or change action")


def fill(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with canonical family and objective names and all family, route and derived defaults; types unchecked."""
    result = copy.deepcopy(dict(values))
    model, data = _mapping(result, "model"), _mapping(result, "data")
    family = model.get("family")
    if isinstance(family, str):
        family = model["family"] = FAMILY_ALIASES.get(family.lower(), family)
    train = _mapping(result, "train")
    if train.get("objective") == "anyflow_forward_map" and not train.get("objective_variant"):
        train["objective_variant"] = "v1_5"
    if family == "ltx25_video" and train.get("objective") == "flow_matching":
        train["objective"] = "native_rectified_flow"
    parts = [
        family,
        *(train.get(name) for name in ("stage", "causal_mode", "objective", "objective_variant")),
    ]
    route = None
    if all(isinstance(part, str) or part is None for part in parts):
        key = ":".join(part for part in parts if part)
        _fill_missing(result, defaults.ROUTE.get(key, {}))
        route = next((found for found in ROUTES if found.key == key), None)
    if isinstance(family, str):
        _fill_missing(result, defaults.FAMILY.get(family, {}))
    if data.get("encoding") == "preencoded" or result.get("action") == "preencode":
        data.setdefault("random_start", False)
    if "text_length" not in model and model.get("architecture") in architecture_names():
        model["text_length"] = load_architecture(model["architecture"])["text"].get("text_length") or 0
    _derive(result, family)
    _derive_sampler(result, route)
    return result


def _derive(result: dict[str, Any], family: Any) -> None:
    """Fields that follow from others; wrong types are left for the schema to name."""
    data, train = _mapping(result, "data"), _mapping(result, "train")
    pixel = data.get("pixel_frames")
    if data.get("latent_frames") in (None, 0):
        data["latent_frames"] = 0
        if (
            family in geometry.FRAME_LAWS
            and _is_count(pixel)
            and geometry.nearest_pixel_frames(family, pixel) == (pixel,)
        ):
            data["latent_frames"] = geometry.latent_frames(family, pixel)
    _derive_latent_schema(result, family)
    if result.get("action") == "infer":
        _mapping(result, "checkpoint").setdefault("mode", "weights_only")
        inference, validation = _mapping(result, "inference"), _mapping(result, "validation")
        count = inference.get("sample_count") or validation.get("sample_count") or 16
        if not inference.get("sample_count"):
            inference["sample_count"] = count
        validation.setdefault("sample_count", count)
    if result.get("action") == "train" and not train.get("global_batch_size"):
        distributed = _mapping(result, "distributed")
        sizes = [distributed.get("world_size", 1), distributed.get("sequence_parallel_size", 1),
                 train.get("micro_batch_size", 1), train.get("gradient_accumulation_steps", 1)]  # fmt: skip
        if all(_is_count(size) for size in sizes) and sizes[0] % sizes[1] == 0:
            train["global_batch_size"] = sizes[0] // sizes[1] * sizes[2] * sizes[3]
    section = result.get("validation")
    passes = section.get("passes") if isinstance(section, dict) else None
    for entry in passes if isinstance(passes, list) else ():
        if isinstance(entry, dict) and not entry.get("rollout_latent_frames") and data.get("latent_frames"):
            entry["rollout_latent_frames"] = data["latent_frames"]


def _derive_sampler(result: dict[str, Any], route: Route | None) -> None:
    """Mode and solver of passes that leave them out, where the route has one way to sample."""
    section = result.get("validation")
    passes = section.get("passes") if isinstance(section, dict) else None
    if route is None or len(route.solvers) != 1 or not isinstance(passes, list):
        return
    for entry in passes:
        if isinstance(entry, dict):
            _fill_missing(entry, dict(zip(("mode", "solver"), route.solvers[0], strict=True)))


def _derive_latent_schema(result: dict[str, Any], family: Any) -> None:
    data, pixel = _mapping(result, "data"), _mapping(result, "data").get("pixel_frames")
    height = data.get("height")
    if not isinstance(family, str) or not _is_count(height) or not _is_count(pixel):
        return
    schema = geometry.latent_schema(family, height, pixel)
    if schema is not None and data.get("encoding") == "preencoded" and data.get("latent_schema") is None:
        data["latent_schema"] = schema
    if schema is not None and result.get("action") == "preencode":
        section = _mapping(result, "preencode")
        if section.get("latent_schema") is None:
            section["latent_schema"] = schema


def check(config: RunConfig) -> Route:
    """All rules across fields, cheapest and most telling first; returns the route."""
    route = route_for(config)
    architecture = load_architecture(config.model.architecture)
    _check_model(config, architecture)
    _check_data(config, route, architecture)
    if config.action == "preencode":
        if config.preencode is None:
            raise ConfigError("preencode: not set; add preencode.generation_id")
        _check_latent_schema("preencode.latent_schema", config.preencode.latent_schema, config)
        if config.data.random_start:
            raise ConfigError(
                "data.random_start: found true, expected false: latents are encoded from the starts in the index"
            )
        return route
    _check_processes(config, architecture)
    if config.action == "train":
        check_batch(config)
        if config.train.optimizer.warmup_steps > config.train.max_steps:
            raise ConfigError(
                f"train.optimizer.warmup_steps: found {config.train.optimizer.warmup_steps}, expected at most "
                f"train.max_steps={config.train.max_steps}; otherwise the peak rate is never reached"
            )
    stage_rules.check_blocks(config)
    stage_rules.check_checkpoint(config)
    _check_passes(config, route)
    return route


def _check_model(config: RunConfig, architecture: Mapping[str, Any]) -> None:
    family = config.model.family
    if architecture["family"] != family:
        raise ConfigError(
            f"model.architecture: {config.model.architecture} is a {architecture['family']} network, but model.family "
            f"is {family}; change one of them"
        )
    text_length = architecture["text"].get("text_length")
    if text_length is not None and config.model.text_length != text_length:
        raise ConfigError(
            f"model.text_length: found {config.model.text_length}, expected {text_length} for {config.model.architecture}"
        )
    for block, owner in (("ltx25", "ltx25_video"), ("minimax_h3", "minimax_h3")):
        if getattr(config.model, block) is not None and family != owner:
            raise ConfigError(f"model.{block}: only for model.family {owner}, found {family}; remove it")
    if family == "minimax_h3" and config.model.camera_translation_transform != "logd4":
        raise ConfigError(
            f"model.camera_translation_transform: found {config.model.camera_translation_transform}, "
            "expected logd4 for minimax_h3"
        )


def _check_data(config: RunConfig, route: Route, architecture: dict[str, Any]) -> None:
    data, family = config.data, config.model.family
    if geometry.nearest_pixel_frames(family, data.pixel_frames) != (data.pixel_frames,):
        raise ConfigError(geometry.frames_message(family, data.pixel_frames, route.pixel_frames))
    expected = geometry.latent_frames(family, data.pixel_frames)
    if data.latent_frames != expected:
        raise ConfigError(
            f"data.latent_frames: found {data.latent_frames}, expected {expected} for data.pixel_frames="
            f"{data.pixel_frames}; remove it, it follows from data.pixel_frames, or set {expected}"
        )
    if route.stage in ("stage1", "stage2") and family != "minimax_h3":
        geometry.check_chunks(
            family,
            data.pixel_frames,
            data.latent_frames,
            config.model.causal.chunk_latent_frames,
            route.pixel_frames,
        )
    geometry.check_size(architecture, data.height, data.width, route.resolutions)
    if config.action == "train" and data.encoding not in route.encodings:
        raise ConfigError(
            f"data.encoding: found {data.encoding}, {route.key} takes {' or '.join(route.encodings)}"
        )
    if data.encoding == "preencoded" and config.action == "train":
        if not data.latents_root:
            raise ConfigError(
                "data.latents_root: not set; data.encoding preencoded trains from the latent generation there"
            )
        _check_latent_schema("data.latent_schema", data.latent_schema, config)
        if data.random_start:
            raise ConfigError(
                "data.random_start: found true, expected false: stored latents have fixed starts"
            )
    for key in ("train_index", "test_index"):
        index = getattr(data, key)
        if index.startswith("/") or "\\" in index or ".." in index.split("/") or "://" in index:
            raise ConfigError(f"data.{key}: found {index!r}, expected a path below data.root without '..'")
    _check_transport(data.transport)


def _check_transport(transport: Transport) -> None:
    """Addresses have a known scheme, and there is a cache only for what must be staged."""
    roots = {"root": transport.root, "latents_root": transport.latents_root}
    for key, root in roots.items():
        if "://" in root and not root.startswith(TRANSPORT_SCHEMES):
            raise ConfigError(
                f"data.transport.{key}: found {root!r}, expected a folder or an address that starts with "
                f"{', '.join(TRANSPORT_SCHEMES)}"
            )
    if transport.cache_dir and not any("://" in root for root in roots.values()):
        raise ConfigError(
            "data.transport.cache_dir: set, but neither data.transport.root nor data.transport.latents_root is a bucket; "
            "folders are read where they are, remove it"
        )


def _check_latent_schema(key: str, found: str | None, config: RunConfig) -> None:
    """A layout's name states family, size and frames, and must be that of this geometry."""
    data = config.data
    expected = geometry.latent_schema(config.model.family, data.height, data.pixel_frames)
    if expected is None and found is None:
        raise ConfigError(f"{key}: not set; it names the layout of the stored latents")
    if expected is not None and found != expected:
        raise ConfigError(
            f"{key}: found {found}, expected {expected} for data.height {data.height} and data.pixel_frames "
            f"{data.pixel_frames}; remove it, it follows from them"
        )


def _check_processes(config: RunConfig, architecture: Mapping[str, Any]) -> None:
    world, parallel = config.distributed.world_size, config.distributed.sequence_parallel_size
    if world % parallel:
        near = " or ".join(str(n) for n in _multiples_around(world, parallel))
        raise ConfigError(
            f"distributed.world_size: found {world}, expected a multiple of distributed.sequence_parallel_size="
            f"{parallel}; nearest: {near}"
        )
    heads = architecture["transformer"].get("num_attention_heads")
    if isinstance(heads, int) and heads % parallel:
        legal = [n for n in range(1, heads + 1) if heads % n == 0]
        around = [max(n for n in legal if n < parallel), *[n for n in legal if n > parallel][:1]]
        raise ConfigError(
            f"distributed.sequence_parallel_size: found {parallel}, expected a divisor of the {heads} attention heads; "
            f"nearest: {' or '.join(str(n) for n in around)}"
        )


def check_batch(config: RunConfig) -> None:
    """global = world / SP * micro * accumulation, exactly; the message says which accumulation keeps the batch."""
    train, distributed = config.train, config.distributed
    samples = distributed.world_size // distributed.sequence_parallel_size
    step = samples * train.micro_batch_size
    found = step * train.gradient_accumulation_steps
    wanted = train.global_batch_size
    if found == wanted:
        return
    if wanted % step == 0:
        remedy = (
            f"set train.gradient_accumulation_steps={wanted // step} to keep the batch, "
            f"or train.global_batch_size={found} to change it"
        )
    else:
        near = " or ".join(str(n) for n in _multiples_around(wanted, step))
        remedy = (
            f"no accumulation reaches {wanted} with {step} clips per forward pass; nearest batches: {near}"
        )
        remedy += _other_split(wanted, distributed.sequence_parallel_size, samples, train.micro_batch_size)
    raise ConfigError(
        f"train.global_batch_size: found {wanted}, but world {distributed.world_size} / SP "
        f"{distributed.sequence_parallel_size} x micro {train.micro_batch_size} x accumulation "
        f"{train.gradient_accumulation_steps} = {found}; {remedy}"
    )


def _other_split(wanted: int, parallel: int, samples: int, micro: int) -> str:
    """A smaller micro-batch, else a smaller world, with which some accumulation does reach `wanted` clips."""
    for size in range(min(micro - 1, wanted // samples), 0, -1):
        if wanted % (samples * size) == 0:
            steps = wanted // (samples * size)
            return f"; train.micro_batch_size={size} with train.gradient_accumulation_steps={steps} keeps {wanted}"
    for count in range(min(samples - 1, wanted // micro), 0, -1):
        if wanted % (count * micro) == 0:
            world, steps = count * parallel, wanted // (count * micro)
            return f"; distributed.world_size={world} with train.gradient_accumulation_steps={steps} keeps {wanted}"
    return ""


def _check_passes(config: RunConfig, route: Route) -> None:
    passes = config.validation.passes
    if config.action == "infer" and not passes:
        raise ConfigError("validation.passes: empty; inference samples one or more passes")
    if config.action == "infer" and config.inference.sample_count != config.validation.sample_count:
        raise ConfigError(
            f"inference.sample_count: found {config.inference.sample_count}, but validation.sample_count is "
            f"{config.validation.sample_count}; set one of them"
        )
    if config.inference.length == "camera" and (config.action != "infer" or route.stage != "stage2"):
        raise ConfigError("inference.length: camera is for infer with stage2; set fixed")
    shuffled = [entry.name for entry in passes if entry.camera == "shuffled"]
    if shuffled and config.validation.sample_count < 2:
        raise ConfigError(
            f"validation.sample_count: found {config.validation.sample_count}; pass {shuffled[0]!r} with camera: shuffled "
            "takes the camera of the next clip and needs at least 2"
        )
    names = [entry.name for entry in passes]
    for position, entry in enumerate(passes):
        key = f"validation.passes.{position}"
        if names.count(entry.name) > 1:
            raise ConfigError(
                f"{key}.name: {entry.name!r} occurs {names.count(entry.name)} times; names are unique"
            )
        if (entry.mode, entry.solver) not in route.solvers:
            legal = " or ".join(f"mode {mode}, solver {solver}" for mode, solver in route.solvers)
            raise ConfigError(
                f"{key}: found mode {entry.mode}, solver {entry.solver}; {route.key} takes {legal}"
            )
        if entry.num_inference_steps > config.train.num_train_timesteps:
            raise ConfigError(
                f"{key}.num_inference_steps: found {entry.num_inference_steps}, expected at most "
                f"train.num_train_timesteps={config.train.num_train_timesteps}"
            )
        chunk = config.model.causal.chunk_latent_frames
        if entry.mode == "bidirectional" and entry.rollout_latent_frames != config.data.latent_frames:
            raise ConfigError(
                f"{key}.rollout_latent_frames: found {entry.rollout_latent_frames}, expected data.latent_frames="
                f"{config.data.latent_frames} in a bidirectional pass; remove it"
            )
        if entry.mode == "autoregressive" and entry.rollout_latent_frames % chunk:
            near = " or ".join(str(n) for n in _multiples_around(entry.rollout_latent_frames, chunk))
            raise ConfigError(
                f"{key}.rollout_latent_frames: found {entry.rollout_latent_frames}, expected a multiple of "
                f"model.causal.chunk_latent_frames={chunk}; nearest: {near}"
            )
        forcing = config.train.self_gradient_forcing
        if forcing is not None and entry.num_inference_steps != len(forcing.denoising_timesteps):
            raise ConfigError(
                f"{key}.num_inference_steps: found {entry.num_inference_steps}, expected "
                f"{len(forcing.denoising_timesteps)}: the steps the student is trained for "
                f"({', '.join(str(t) for t in forcing.denoising_timesteps)})"
            )


def placeholder(value: Any) -> bool:
    """Whether a value still is one of the recipes' `/path/to/...`."""
    return isinstance(value, str) and re.match(r"([a-z0-9]+://)?/?path/to(/|$)", value) is not None


def _multiples_around(value: int, step: int) -> list[int]:
    """The positive multiples of `step` next to `value`, which is none."""
    below = value // step * step
    return [n for n in (below, below + step) if n > 0]


def _mapping(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping under `key`, made if absent; a wrong type is left for the schema to report."""
    found = values.setdefault(key, {})
    return found if isinstance(found, dict) else {}


def _fill_missing(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Deep setdefault."""
    for key, value in source.items():
        if key not in target:
            target[key] = copy.deepcopy(value)
        elif isinstance(value, Mapping) and isinstance(target[key], dict):
            _fill_missing(target[key], value)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
