"""What an encoder promises of every sample it writes, and the keys that say when a stored tensor may be used again.

The contract's digest goes into every latent row, so tensors of different encoders never mix. A content key names all
that decides a tensor's values; equal keys mean equal tensors, whatever the files are called. (spec operations 6.1)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from solarwm_lib.config.geometry import condition_channels, geometry
from solarwm_lib.config.identity import canonical_json
from solarwm_lib.config.identity import digest as content_digest
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, NonFiniteError

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "solarwm.encoder.v1"
ENCODER_VERSION = (
    1  # raise it with any change to this package's or the codec's code that moves a stored value
)
CAMERA_CONVENTION = "first-frame-relative-w2c-fp32"
FIT = "stretch"  # how a frame is brought to height x width; part of the key of its latents
FORMATS = {
    "wan22_ti2v_5b": "solarwm.wan22-ti2v-5b.online.v1",
    "wan22_i2v_a14b": "solarwm.wan22-i2v-a14b.online.v1",
}
CAMERA_TENSORS = (
    "camera_viewmats",
    "camera_K",
)  # promised, and rebuilt from the camera file instead of stored
_BYTES = {"bfloat16": 2, "float32": 4, "int64": 8}


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape (None: any length) and dtype of one tensor."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of the tensor, dimensions of any length counted as one."""
        size = _BYTES[self.dtype]
        for length in self.shape:
            size *= length or 1
        return size

    def matches(self, tensor: Tensor) -> bool:
        """Whether a tensor has this dtype and shape."""
        same = len(tensor.shape) == len(self.shape) and all(
            want in (None, have) for want, have in zip(self.shape, tensor.shape, strict=True)
        )
        return same and str(tensor.dtype) == f"torch.{self.dtype}"


@dataclass(frozen=True)
class EncoderContract:
    """The encoder contract `solarwm.encoder.v1`."""

    family: str
    format_version: str
    pixel_frames: int
    latent_frames: int
    height: int
    width: int
    camera_convention: str
    tensors: tuple[TensorSpec, ...]
    extras: Mapping[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """JSON form, in canonical types."""
        tensors = [asdict(spec) | {"shape": list(spec.shape)} for spec in self.tensors]
        return {"schema": SCHEMA, **asdict(self), "tensors": tensors, "extras": dict(self.extras)}

    @classmethod
    def from_values(cls, values: Any, label: str) -> EncoderContract:
        """Read `values()` back; ArtifactError with `label` for anything else."""
        try:
            fields = dict(values)
            if (found := fields.pop("schema")) != SCHEMA:
                raise ValueError(f"schema is {found!r}, expected {SCHEMA!r}")
            specs = [
                TensorSpec(spec["name"], tuple(spec["shape"]), spec["dtype"]) for spec in fields["tensors"]
            ]
            return cls(**fields | {"tensors": tuple(specs)})
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{label}: not an encoder contract ({error})") from None

    @property
    def digest(self) -> str:
        """BLAKE2s of the canonical JSON, 64 hexadecimal characters."""
        return hashlib.blake2s(canonical_json(self.values()).encode()).hexdigest()

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The tensors a sample's safetensors member holds."""
        return tuple(spec for spec in self.tensors if spec.name not in CAMERA_TENSORS)

    @property
    def sample_bytes(self) -> int:
        """Bytes of the stored tensors of one sample."""
        return sum(spec.bytes for spec in self.stored)

    def check(self, tensors: Mapping[str, Tensor], label: str) -> None:
        """Refuse tensors the contract does not promise: ConfigError for names, shapes and dtypes, NonFiniteError for values."""
        if missing := sorted({spec.name for spec in self.stored} ^ tensors.keys()):
            raise ConfigError(
                f"{label}: tensors {', '.join(sorted(tensors))}, the contract names {', '.join(s.name for s in self.stored)} "
                f"({', '.join(missing)} differ)"
            )
        for spec in self.stored:
            tensor = tensors[spec.name]
            if not spec.matches(tensor):
                raise ConfigError(
                    f"{label}: {spec.name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, expected "
                    f"{spec.dtype} {list(spec.shape)}; model.architecture does not describe the encoders of model.base_path"
                )
            if not bool(tensor.isfinite().all()):
                raise NonFiniteError(f"{label}: {spec.name} holds NaN or infinite values; nothing is written")


def wan_contract(
    family: str,
    architecture: Mapping[str, Any],
    *,
    pixel_frames: int,
    height: int,
    width: int,
    dtype: str,
    text_length: int,
    extras: Mapping[str, Any],
) -> EncoderContract:
    """The contract of a Wan encoder; A14B adds its image condition `i2v_y`, 4 mask and C latent channels."""
    sizes = geometry(family, dict(architecture), pixel_frames, height, width)
    frames, latent = sizes.latent_frames, (sizes.latent_height, sizes.latent_width)
    tokens = frames * sizes.tokens_per_latent_frame
    tensors = [
        TensorSpec("latents", (frames, sizes.latent_channels, *latent), dtype),
        TensorSpec("prompt_embeds", (text_length, architecture["transformer"]["text_dim"]), dtype),
    ]
    if condition := condition_channels(family, sizes.latent_channels):
        tensors.append(TensorSpec("i2v_y", (frames, condition, *latent), dtype))
    tensors += [
        TensorSpec("camera_viewmats", (tokens, 4, 4), "float32"),
        TensorSpec("camera_K", (tokens, 3, 3), "float32"),
    ]
    return EncoderContract(
        family,
        FORMATS[family],
        pixel_frames,
        frames,
        height,
        width,
        CAMERA_CONVENTION,
        tuple(tensors),
        dict(extras),
    )


def latents_key(
    *,
    video_sha256: str,
    source_frame_indices: Sequence[int],
    height: int,
    width: int,
    codec: str,
    dtype: str,
    latent_schema: str,
) -> str:
    """Content key of the tensors made from pixels; `codec` is the codec's identity digest.

    The frames are named by the digest of the file they are decoded from and their ordinals after rate conversion.
    """
    return content_digest(
        {
            "video_sha256": video_sha256,
            "source_frame_indices": list(source_frame_indices),
            "height": height,
            "width": width,
            "fit": FIT,
            "codec": codec,
            "dtype": dtype,
            "latent_schema": latent_schema,
            "encoder_version": ENCODER_VERSION,
        }
    )


def prompt_key(*, text: str, encoder: str, text_length: int, dtype: str) -> str:
    """Content key of the tensors made from a cleaned caption; `encoder` is the digest of its weights and tokenizer."""
    return content_digest(
        {
            "text": text,
            "text_encoder": encoder,
            "text_length": text_length,
            "dtype": dtype,
            "encoder_version": ENCODER_VERSION,
        }
    )
