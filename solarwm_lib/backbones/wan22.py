"""Wan 2.2 TI2V-5B (and its tiny twin): diffusers' WanTransformer3DModel under cameras, spec wan22 sections 1 and 2.

Shapes: B batch, T latent frames, C latent channels, h w latent size, S tokens per latent frame, L = T*S.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from ..runtime.errors import ArtifactError, ConfigError
from . import attention, prope, rope
from .protocol import Geometry

CAMERA_ATTENTION_MODES = ("fused_prope",)


class Wan22(nn.Module):
    """A camera-controlled velocity field. `transformer` is diffusers' class; its state dict is the checkpoint format."""

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        geometry: Geometry,
        camera_translation_transform: str = "linear",
    ) -> None:
        super().__init__()
        if camera_translation_transform not in prope.TRANSLATION_TRANSFORMS:
            raise ConfigError(
                f"model.camera_translation_transform is {camera_translation_transform!r}; "
                f"expected one of {', '.join(prope.TRANSLATION_TRANSFORMS)}"
            )
        config = transformer.config
        if config.in_channels != geometry.latent_channels or config.out_channels != geometry.latent_channels:
            raise ConfigError(
                f"transformer takes {config.in_channels} and gives {config.out_channels} channels, the latents have "
                f"{geometry.latent_channels}: this backbone conditions on a clean first latent only (TI2V); "
                "choose another model.architecture"
            )
        if config.attention_head_dim % 4:
            raise ConfigError(
                f"attention_head_dim {config.attention_head_dim} is not a multiple of 4, which PRoPE needs"
            )
        self.transformer = transformer
        self.geometry = geometry
        self.camera_translation_transform = camera_translation_transform
        attention.install(transformer)

    @classmethod
    def from_config(
        cls, architecture: Mapping[str, Any], model_cfg: Any, device: str | torch.device = "cpu"
    ) -> Wan22:
        """Build an untrained backbone of `architecture`, on the meta device to plan the full size without memory."""
        with torch.device(device):
            transformer = WanTransformer3DModel(**architecture["transformer"])
        return cls(transformer, geometry_of(architecture), _translation_transform(model_cfg))

    @classmethod
    def from_pretrained(
        cls,
        base_path: str | Path,
        architecture: Mapping[str, Any],
        model_cfg: Any,
        dtype: torch.dtype = torch.float32,
    ) -> Wan22:
        """Load `base_path/transformer` and check it against `architecture` before and every tensor name while loading.

        `model_cfg` is the `model` section of a run config. Raises ArtifactError for a folder that does not hold exactly
        this model: diffusers alone would fill missing tensors with random values and go on.
        """
        folder = Path(base_path) / "transformer"
        if not (folder / "config.json").is_file():
            raise ArtifactError(
                f"no transformer at {folder} (config.json is missing); set model.base_path to a diffusers folder"
            )
        _check_config(folder, architecture["transformer"])
        transformer, info = WanTransformer3DModel.from_pretrained(
            folder, torch_dtype=dtype, output_loading_info=True
        )
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if info[problem]:
                names = ", ".join(str(name) for name in sorted(info[problem], key=str)[:5])
                raise ArtifactError(
                    f"{folder}: {len(info[problem])} {problem.replace('_', ' ')}: {names}; expected exactly the model's tensors"
                )
        return cls(transformer, geometry_of(architecture), _translation_transform(model_cfg))

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of the transformer under its diffusers name: Stage0.5 trains all of them."""
        return self.transformer.named_parameters()

    def velocity(
        self,
        latents: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        w2c: Tensor | None = None,
        intrinsics: Tensor | None = None,
    ) -> Tensor:
        """Return the predicted flow (noise - clean) `[B,T,C,h,w]`.

        latents: `[B,T,C,h,w]`. timesteps: raw t in [0,1000], `[B,T]`, one per latent frame. prompt_embeds: `[B,Lt,D]`.
        w2c: `[B,T,4,4]` world-to-camera relative to the first frame, translation untransformed. intrinsics: `[B,3,3]`,
        divided by the image size. Cameras come as both or neither.
        """
        batch, frames, _, height, width = latents.shape
        _, patch_h, patch_w = self.geometry.patch_size
        if timesteps.shape != (batch, frames):
            raise ValueError(
                f"timesteps {tuple(timesteps.shape)}; expected one per latent frame {(batch, frames)}"
            )
        if height % patch_h or width % patch_w:
            raise ValueError(
                f"latent size {height}x{width}; expected multiples of the patch {patch_h}x{patch_w}"
            )
        placement = attention.Placement(
            rotation=rope.grid_rotations(
                frames,
                height // patch_h,
                width // patch_w,
                self.transformer.config.attention_head_dim,
                latents.device,
            ),
            camera=self._camera(w2c, intrinsics, (batch, frames)),
        )
        token_timesteps = timesteps.repeat_interleave(self.geometry.tokens_per_frame(height, width), dim=1)
        with attention.placed(placement):
            output = self.transformer(
                hidden_states=latents.transpose(1, 2),
                timestep=token_timesteps,
                encoder_hidden_states=prompt_embeds,
                return_dict=False,
            )[0]
        return output.transpose(1, 2)

    def _camera(
        self, w2c: Tensor | None, intrinsics: Tensor | None, frames: tuple[int, int]
    ) -> prope.CameraTransforms | None:
        if w2c is None and intrinsics is None:
            return None
        if w2c is None or intrinsics is None:
            raise ValueError(
                f"camera given by half: {'intrinsics' if w2c is None else 'w2c'} only; pass both or neither"
            )
        if w2c.shape != (*frames, 4, 4):
            raise ValueError(
                f"w2c {tuple(w2c.shape)}; expected one camera per latent frame {(*frames, 4, 4)}"
            )
        return prope.camera_transforms(
            prope.transform_translation(w2c.float(), self.camera_translation_transform), intrinsics
        )


def geometry_of(architecture: Mapping[str, Any]) -> Geometry:
    """Return the geometry of an architecture file (config/models/*.yaml)."""
    patch = tuple(architecture["transformer"]["patch_size"])
    if len(patch) != 3 or patch[0] != 1:
        raise ConfigError(
            f"transformer.patch_size is {list(patch)}; expected [1, h, w]: tokens of a latent frame share a camera"
        )
    return Geometry(
        latent_channels=architecture["latent_channels"],
        temporal_stride=architecture["temporal_stride"],
        spatial_stride=architecture["spatial_stride"],
        patch_size=patch,
    )


def _translation_transform(model_cfg: Any) -> str:
    mode = model_cfg.camera_attention_mode
    if mode not in CAMERA_ATTENTION_MODES:
        raise ConfigError(
            f"model.camera_attention_mode is {mode!r}; expected {', '.join(CAMERA_ATTENTION_MODES)}"
        )
    return model_cfg.camera_translation_transform


def _check_config(folder: Path, expected: Mapping[str, Any]) -> None:
    found = WanTransformer3DModel.load_config(folder)
    for key, value in expected.items():
        actual = found.get(key)
        if (list(actual) if isinstance(actual, tuple | list) else actual) != (
            list(value) if isinstance(value, tuple | list) else value
        ):
            raise ArtifactError(
                f"{folder / 'config.json'}: {key} is {actual}, the architecture says {value}; "
                "change model.architecture or model.base_path"
            )
