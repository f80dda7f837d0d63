"""What a set of trained weights was trained for, in our configuration names and in those of the released configurations.

The trained facts travel with the weights: route, geometry, timestep shift, camera transform, chunks, step list. One table
says how each is called in the config embedded in a released `model.pt` (spec wan22 9.2) and in ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.routes import ROUTES
from solarwm_lib.runtime.errors import ArtifactError

FAMILIES = {  # accepted spellings -> family; name of the model in released configurations
    "wan22_ti2v_5b": "wan22_ti2v_5b",
    "wan2.2-ti2v-5b": "wan22_ti2v_5b",
    "wan22_i2v_a14b": "wan22_i2v_a14b",
    "wan2.2-i2v-a14b": "wan22_i2v_a14b",
}
MODEL_NAMES = {
    "wan22_ti2v_5b": "Wan2.2-TI2V-5B-Camera",
    "wan22_i2v_a14b": "Wan2.2-I2V-A14B-High-Camera",
}
_ABSENT = object()
_NEEDED = object()
# (our key, released key, value where the released configuration leaves it out). `_NEEDED`: it must be there; `_ABSENT`:
# then it is left out here too.
TABLE: tuple[tuple[str, str, Any], ...] = (
    ("model.family", "model.family", _NEEDED),
    ("model.timestep_shift", "model.timestep_shift", _NEEDED),
    ("model.camera_attention_mode", "model.camera_attention_mode", _NEEDED),
    ("model.camera_translation_transform", "model.camera_translation_transform", "linear"),
    # The release knows only the fixed pinhole and has no key for it.
    ("model.camera_intrinsics_mode", "model.camera_intrinsics_mode", "wan_fixed"),
    ("model.causal.chunk_latent_frames", "model.num_frame_per_block", _ABSENT),
    ("model.causal.max_prior_clean_chunks", "model.max_prior_clean_chunks", _ABSENT),
    ("model.causal.local_attention_latent_frames", "model.local_attn_size", _ABSENT),
    ("model.causal.sink_latent_frames", "model.sink_size", _ABSENT),
    ("data.pixel_frames", "data.pixel_frames", _NEEDED),
    ("data.height", "data.height", _NEEDED),
    ("data.width", "data.width", _NEEDED),
    ("data.fps", "data.fps", 16.0),
    ("train.stage", "train.stage", _NEEDED),
    ("train.causal_mode", "train.causal_mode", _NEEDED),
    ("train.objective", "train.objective", _NEEDED),
    ("train.objective_variant", "train.objective_variant", ""),
    ("train.num_train_timesteps", "train.num_train_timesteps", 1000),
    ("train.anyflow.gate", "train.anyflow_gate", _ABSENT),
    ("train.anyflow.delta_time", "train.anyflow_deltatime_type", _ABSENT),
    ("train.self_gradient_forcing.denoising_timesteps", "train.denoising_step_list", _ABSENT),
    ("train.self_gradient_forcing.context_timestep", "train.context_timestep", _ABSENT),
)
_INTEGERS_AS_FLOATS = ("model.timestep_shift", "data.fps", "train.anyflow.gate")
ANYFLOW = "anyflow_forward_map"


@dataclass(frozen=True)
class Contract:
    """The facts as our nested configuration (a part of a run's semantic configuration)."""

    config: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return lookup(self.config, key)

    @property
    def family(self) -> str:
        return str(self["model.family"])

    @property
    def stage(self) -> str:
        return str(self["train.stage"])

    @property
    def anyflow(self) -> bool:
        """True if the network has the second time embedding."""
        return self["train.objective"] == ANYFLOW

    @property
    def route(self) -> str:
        """`family:stage:causal_mode:objective[:variant]`."""
        parts = (
            self.family,
            *(self[f"train.{k}"] for k in ("stage", "causal_mode", "objective", "objective_variant")),
        )
        return ":".join(str(part) for part in parts if part)

    def facts(self) -> dict[str, Any]:
        """What a person compares before using the weights."""
        names = {
            "timestep_shift": "model.timestep_shift",
            "camera_translation_transform": "model.camera_translation_transform",
            "pixel_frames": "data.pixel_frames",
            "height": "data.height",
            "width": "data.width",
            "denoising_timesteps": "train.self_gradient_forcing.denoising_timesteps",
        }
        return {name: value for name, key in names.items() if (value := self[key]) is not None}


def lookup(values: Any, key: str) -> Any:
    """Return the value at a dotted key, None if there is none."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return None
        values = values[part]
    return values


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, leaf = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[leaf] = value


def from_released(config: Any, architecture: str, where: str) -> Contract:
    """Return the contract of a released configuration; `architecture` is the file its tensors match.

    ArtifactError if a fact is missing, the family is another one than the tensors', or the route is not a Wan route.
    """
    if not isinstance(config, Mapping):
        raise ArtifactError(
            f"{where}: config is {type(config).__name__}, expected the resolved configuration of the run"
        )
    ours: dict[str, Any] = {}
    for key, released, default in TABLE:
        value = lookup(config, released)
        if value is None:
            if default is _NEEDED:
                raise ArtifactError(
                    f"{where}: its config has no {released}; the weights cannot be placed without it"
                )
            if default is _ABSENT:
                continue
            value = default
        if key == "model.family":
            value = FAMILIES.get(str(value), value)
        _put(ours, key, float(value) if key in _INTEGERS_AS_FLOATS else value)
    if ours["train"]["stage"] == "stage0p5":
        ours["model"].pop("causal", None)  # has no effect on a bidirectional pass, so ours leave it out
    described = load_architecture(architecture)
    _put(ours, "model.architecture", architecture)
    _put(ours, "model.text_length", described["text"]["text_length"])
    return checked(Contract(ours), where)


def checked(contract: Contract, where: str) -> Contract:
    """Return `contract` if its architecture is of its family and its route exists; ArtifactError names both sides."""
    architecture = contract["model.architecture"]
    family = load_architecture(architecture)["family"]
    if family != contract.family:
        raise ArtifactError(
            f"{where}: config says family {contract.family}, the tensors are {architecture} ({family}); these do not belong together"
        )
    routes = [route.key for route in ROUTES if route.family == family and "train" in route.actions]
    if contract.route not in routes:
        raise ArtifactError(f"{where}: route {contract.route} is not one of {family}: {', '.join(routes)}")
    return contract


def to_released(contract: Contract) -> dict[str, Any]:
    """Return the configuration in released names that stands in an exported `model.pt`."""
    result: dict[str, Any] = {"schema": "solarwm.run.v1", "action": "train"}
    for key, released, _ in TABLE:
        if (value := contract[key]) is not None:
            _put(result, released, value)
    architecture = load_architecture(contract["model.architecture"])
    patch = architecture["transformer"]["patch_size"]
    stride = architecture["spatial_stride"]
    height, width = (contract[f"data.{name}"] // stride for name in ("height", "width"))
    _put(result, "model.name", MODEL_NAMES[contract.family])
    _put(result, "model.causal", contract.stage != "stage0p5")
    _put(result, "model.latent_channels", architecture["latent_channels"])
    _put(result, "model.frame_sequence_length", (height // patch[1]) * (width // patch[2]))
    frames = 1 + (contract["data.pixel_frames"] - 1) // architecture["temporal_stride"]
    _put(result, "model.num_output_frames", frames)
    _put(result, "data.latent_frames", frames)
    return result
