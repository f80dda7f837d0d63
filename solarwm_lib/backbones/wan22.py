"""Wan 2.2 TI2V-5B and I2V-A14B (and their tiny twins): diffusers' WanTransformer3DModel under cameras, spec wan22 1, 2, 4.1, 5.3.

The transformer runs four ways: all frames at once, teacher-forced over `[clean | noisy]`, causal over a window, and chunk by
chunk with a cache. They differ only in the placement that travels with the tokens. I2V-A14B runs the first way only; its
first image comes as further input channels (`image_condition`), that of TI2V-5B as a clean latent 0.

Shapes: B batch, T latent frames, C latent channels, h w latent size, S tokens per latent frame, L = T*S.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from ..config.geometry import MASK_CHANNELS
from ..runtime.errors import ArtifactError, ConfigError
from . import attention, prope, rope, second_time, sequence_parallel, visibility
from .kv_cache import RolloutState
from .protocol import Geometry

CAMERA_ATTENTION_MODES = ("fused_prope",)


class Wan22(nn.Module):
    """A camera-controlled velocity field. `transformer` is diffusers' class; its state dict is the checkpoint format."""

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        geometry: Geometry,
        camera_translation_transform: str = "linear",
        anyflow: bool = False,
    ) -> None:
        """Wrap `transformer`; `anyflow` adds the second time, a copy of the time MLP unless the transformer has it already."""
        super().__init__()
        if camera_translation_transform not in prope.TRANSLATION_TRANSFORMS:
            raise ConfigError(
                f"model.camera_translation_transform is {camera_translation_transform!r}; "
                f"expected one of {', '.join(prope.TRANSLATION_TRANSFORMS)}"
            )
        config, channels = transformer.config, geometry.latent_channels
        condition = config.in_channels - channels
        if config.out_channels != channels or condition not in (0, MASK_CHANNELS + channels):
            raise ConfigError(
                f"transformer takes {config.in_channels} and gives {config.out_channels} channels, the latents have {channels}; "
                f"expected {channels} in (TI2V) or {MASK_CHANNELS + 2 * channels} (I2V: latents, {MASK_CHANNELS} mask, image "
                f"latents), {channels} out: choose another model.architecture"
            )
        if config.attention_head_dim % 4:
            raise ConfigError(
                f"attention_head_dim {config.attention_head_dim} is not a multiple of 4, which PRoPE needs"
            )
        self.transformer = transformer
        self.geometry = geometry
        self.camera_translation_transform = camera_translation_transform
        self.anyflow = anyflow
        self.image_conditioned = condition > 0
        self._sequence_group: dist.ProcessGroup | None = None
        attention.install(transformer)
        if anyflow:
            second_time.install(transformer)

    @classmethod
    def from_config(
        cls,
        architecture: Mapping[str, Any],
        model_cfg: Any,
        device: str | torch.device = "cpu",
        anyflow: bool = False,
    ) -> Wan22:
        """Build an untrained backbone of `architecture`, on the meta device to plan the full size without memory."""
        with torch.device(device):
            transformer = WanTransformer3DModel(**architecture["transformer"])
        return cls(transformer, geometry_of(architecture), _translation_transform(model_cfg), anyflow)

    @classmethod
    def from_pretrained(
        cls,
        base_path: str | Path,
        architecture: Mapping[str, Any],
        model_cfg: Any,
        dtype: torch.dtype = torch.float32,
        anyflow: bool = False,
    ) -> Wan22:
        """Load `base_path/transformer` and check it against `architecture` before and every tensor name while loading.

        `model_cfg` is the `model` section of a run config. With `anyflow` the second time MLP is loaded where the folder
        has it and copied from the time MLP where it has none of it. Raises ArtifactError for a folder that does not hold
        exactly this model: diffusers alone would fill missing tensors with random values and go on.
        """
        folder = Path(base_path) / "transformer"
        if not (folder / "config.json").is_file():
            raise ArtifactError(
                f"no transformer at {folder} (config.json is missing); set model.base_path to a diffusers folder"
            )
        check_config(folder, architecture["transformer"])
        transformer, info = WanTransformer3DModel.from_pretrained(
            folder, torch_dtype=dtype, output_loading_info=True
        )
        has_second_time = anyflow and set(info["unexpected_keys"]) >= second_time.TENSORS
        if has_second_time:
            info["unexpected_keys"] = set(info["unexpected_keys"]) - second_time.TENSORS
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if info[problem]:
                names = ", ".join(str(name) for name in sorted(info[problem], key=str)[:5])
                raise ArtifactError(
                    f"{folder}: {len(info[problem])} {problem.replace('_', ' ')}: {names}; expected exactly the model's tensors"
                )
        backbone = cls(transformer, geometry_of(architecture), _translation_transform(model_cfg), anyflow)
        if has_second_time:
            second_time.load(transformer, folder)
        return backbone

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of the transformer under its diffusers name: all stages train all of them."""
        return self.transformer.named_parameters()

    def set_sequence_group(self, group: dist.ProcessGroup | None) -> None:
        """Share the tokens of every pass among the ranks of `group` from now on; None or a group of one runs alone.

        All its ranks must then make the same passes over the same inputs; each gets the whole output. Means over the group of
        parameter gradients are what one process has (`sequence_parallel`). Set it between rollouts: a cache holds the heads of
        this rank alone. Raises ConfigError where the attention heads do not divide by the group's size.
        """
        ranks = 1 if group is None else dist.get_world_size(group)
        sequence_parallel.check_heads(self.transformer.config.num_attention_heads, ranks)
        self._sequence_group = group if ranks > 1 else None

    def velocity(
        self,
        latents: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        w2c: Tensor | None = None,
        intrinsics: Tensor | None = None,
        r: Tensor | None = None,
        image_condition: Tensor | None = None,
    ) -> Tensor:
        """Return the predicted flow (noise - clean) `[B,T,C,h,w]`, every frame seeing all.

        latents: `[B,T,C,h,w]`. timesteps: raw t in [0,1000], `[B,T]`, one per latent frame. prompt_embeds: `[B,Lt,D]`.
        w2c: `[B,T,4,4]` world-to-camera relative to the first frame, translation untransformed. intrinsics: `[B,3,3]`,
        divided by the image size. Cameras come as both or neither. r: raw second times `[B,T]` of a flow-map model, None
        where r = t. image_condition: y `[B,T,4+C,h,w]`, always for I2V and never for TI2V (spec 1.5). Raises ValueError for
        shapes that do not fit, for r on a model without the second time, for y on a TI2V model and none on an I2V model.
        """
        frames = latents.shape[1]
        self._check_condition(latents, image_condition)
        placement = attention.Placement(
            rotation=self._rotation(range(frames), latents),
            camera=self._camera(w2c, intrinsics, (len(latents), frames)),
        )
        return self._flow(latents, timesteps, prompt_embeds, r, placement, image_condition)

    def teacher_forced_velocity(
        self,
        clean: Tensor,
        noisy: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        w2c: Tensor | None = None,
        intrinsics: Tensor | None = None,
        *,
        chunk: int,
        max_prior_clean_chunks: int,
        sink: int = 0,
        r: Tensor | None = None,
        clean_timesteps: Tensor | None = None,
        clean_r: Tensor | None = None,
    ) -> Tensor:
        """Return the flow `[B,T,C,h,w]` of the noisy half in one forward over `[clean | noisy]` (spec 4.1).

        clean, noisy: `[B,T,C,h,w]`, T whole chunks of `chunk` latent frames; both halves share positions and cameras
        `[B,T,4,4]`. timesteps and r `[B,T]` are the noisy half's; the clean half's are 0 unless given, its r then equals
        its t. `visibility.teacher_forcing` says who sees whom. Raises ValueError as `velocity` and for broken chunks.
        """
        self._refuse_causal_with_condition()
        if clean.shape != noisy.shape:
            raise ValueError(f"clean {tuple(clean.shape)} and noisy {tuple(noisy.shape)}; expected one shape")
        batch, frames = noisy.shape[:2]
        if clean_timesteps is None:
            clean_timesteps = torch.zeros_like(timesteps)
        camera = self._camera(w2c, intrinsics, (batch, frames))
        placement = attention.Placement(
            rotation=self._rotation((*range(frames), *range(frames)), noisy),
            camera=None if camera is None else camera.twice(),
            visibility=visibility.teacher_forcing(
                frames, chunk, max_prior_clean_chunks, self._tokens_per_frame(noisy), sink
            ),
        )
        output = self._flow(
            torch.cat((clean, noisy), dim=1),
            torch.cat((clean_timesteps, timesteps), dim=1),
            prompt_embeds,
            _joined_times(clean_r, clean_timesteps, r, timesteps),
            placement,
        )
        return output[:, frames:]

    def window_velocity(
        self,
        history: Tensor,
        noisy: Tensor,
        history_timesteps: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        w2c: Tensor | None = None,
        intrinsics: Tensor | None = None,
        *,
        chunk: int,
        window: int | None = None,
        sink: int = 0,
        r: Tensor | None = None,
        history_r: Tensor | None = None,
        rebase: bool = True,
    ) -> Tensor:
        """Return the flow `[B,Fn,C,h,w]` of `noisy` after clean `history` `[B,Fc,C,h,w]` without a cache (spec 6.1).

        Both are whole chunks, the history may be empty; positions count from the first frame given. w2c `[B,Fc+Fn,4,4]`
        is taken relative to that frame unless `rebase` is off. history_r defaults to history_timesteps. `window` (latent
        frames, own chunk and sink included) limits what each chunk sees; None is the whole prefix. Equals a cached rollout
        until frames leave its window (and after that without cameras only: there, positions shift under the cameras).
        Raises ValueError as `velocity` and for broken chunks.
        """
        self._refuse_causal_with_condition()
        batch, past = history.shape[:2]
        frames = past + noisy.shape[1]
        if rebase and w2c is not None:
            w2c = prope.rebase(prope.at_least_float32(w2c))
        placement = attention.Placement(
            rotation=self._rotation(range(frames), noisy),
            camera=self._camera(w2c, intrinsics, (batch, frames)),
            visibility=visibility.causal_window(
                past, noisy.shape[1], chunk, self._tokens_per_frame(noisy), window, sink
            ),
        )
        output = self._flow(
            torch.cat((history, noisy), dim=1),
            torch.cat((history_timesteps, timesteps), dim=1),
            prompt_embeds,
            _joined_times(history_r, history_timesteps, r, timesteps),
            placement,
        )
        return output[:, past:]

    def rollout_state(
        self,
        prompt_embeds: Tensor,
        intrinsics: Tensor | None = None,
        *,
        chunk: int,
        window: int,
        sink: int = 0,
    ) -> RolloutState:
        """Return the state of a cached rollout before its first chunk (spec 5.3).

        prompt_embeds `[B,Lt,D]` and intrinsics `[B,3,3]` hold for the whole rollout. `window` counts latent frames with the
        chunk being denoised and the `sink` in it. Raises ValueError for a window, sink or chunk that do not fit together.
        """
        self._refuse_causal_with_condition()
        return RolloutState(prompt_embeds, intrinsics, chunk, window, sink)

    @torch.no_grad()
    def chunk_velocity(
        self,
        state: RolloutState,
        noisy_chunk: Tensor,
        timesteps: Tensor,
        w2c_chunk: Tensor | None = None,
        *,
        r: Tensor | None = None,
        commit: bool = False,
    ) -> Tensor:
        """Return the flow `[B,chunk,C,h,w]` of the rollout's next chunk, without gradient.

        The chunk sees the window of committed chunks and itself. timesteps and r: `[B,chunk]`; w2c_chunk `[B,chunk,4,4]`
        relative to the rollout's first frame, never rebased. With `commit` the chunk's keys and values join the cache and
        the next call is for the next chunk; without, nothing is written. Raises ValueError for a chunk that does not fit.
        """
        self._refuse_causal_with_condition()
        batch, frames = noisy_chunk.shape[:2]
        if frames != state.chunk or batch != len(state.prompt_embeds):
            raise ValueError(
                f"chunk of {frames} latent frames in a batch of {batch}; "
                f"the rollout takes {state.chunk} in a batch of {len(state.prompt_embeds)}"
            )
        if state.frames and (state.w2c is None) != (w2c_chunk is None):
            raise ValueError(f"camera {'missing' if w2c_chunk is None else 'new'} at frame {state.frames}")
        past, tokens = state.visible, self._tokens_per_frame(noisy_chunk)
        rotation = self._rotation(range(state.window), noisy_chunk)
        placement = attention.Placement(
            rotation=rotation[:, past * tokens : (past + frames) * tokens],
            camera=self._camera(w2c_chunk, state.intrinsics, (batch, frames)),
            visibility=visibility.cached_window(past, frames, frames, tokens),
            rollout=state,
            window_rotation=rotation[:, : past * tokens],
            window_camera=None if state.is_placed else self._window_camera(state),
            commit=commit,
        )
        output = self._flow(noisy_chunk, timesteps, state.prompt_embeds, r, placement)
        state.placed_at = state.frames
        if commit:
            state.advance(w2c_chunk)
        return output

    def _flow(
        self,
        latents: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        r: Tensor | None,
        placement: attention.Placement,
        image_condition: Tensor | None = None,
    ) -> Tensor:
        """Run the transformer on latents `[B,T,C,h,w]` at raw t and r `[B,T]`, placed by `placement`, with y if it takes one."""
        batch, frames, _, height, width = latents.shape
        _, patch_h, patch_w = self.geometry.patch_size
        for name, times in (("timesteps", timesteps), ("r", r)):
            if times is not None and times.shape != (batch, frames):
                raise ValueError(
                    f"{name} {tuple(times.shape)}; expected one per latent frame {(batch, frames)}"
                )
        if height % patch_h or width % patch_w:
            raise ValueError(
                f"latent size {height}x{width}; expected multiples of the patch {patch_h}x{patch_w}"
            )
        if r is not None and not self.anyflow:
            raise ValueError("r given to a model without a second time; build it with anyflow=True")
        tokens = self._tokens_per_frame(latents)
        own, shares = slice(None), None
        if self._sequence_group is not None:
            shares = sequence_parallel.shares(self._sequence_group, frames, tokens)
            own = shares.own
        t_tokens, r_tokens = (
            None if times is None else times.repeat_interleave(tokens, dim=1)[:, own]
            for times in (timesteps, r)
        )
        placement = replace(placement, second_times=r_tokens, shares=shares)
        inputs = latents if image_condition is None else torch.cat((latents, image_condition), dim=2)
        with attention.placed(placement):
            output = self.transformer(
                hidden_states=inputs.transpose(1, 2),
                timestep=t_tokens,
                encoder_hidden_states=prompt_embeds,
                return_dict=False,
            )[0]
        return output.transpose(1, 2)

    def _check_condition(self, latents: Tensor, image_condition: Tensor | None) -> None:
        if not self.image_conditioned:
            if image_condition is not None:
                raise ValueError(
                    f"image_condition {tuple(image_condition.shape)} given to a TI2V model, whose image is a clean latent 0"
                )
            return
        batch, frames, channels, height, width = latents.shape
        expected = (batch, frames, MASK_CHANNELS + channels, height, width)
        if image_condition is None or image_condition.shape != expected:
            found = (
                "no image_condition"
                if image_condition is None
                else f"image_condition {tuple(image_condition.shape)}"
            )
            raise ValueError(f"{found} given to an I2V model; expected {expected}")

    def _refuse_causal_with_condition(self) -> None:
        if self.image_conditioned:
            raise ValueError(
                "an I2V model sees all frames of a clip at once and has no causal form; call velocity()"
            )

    def _tokens_per_frame(self, latents: Tensor) -> int:
        return self.geometry.tokens_per_frame(*latents.shape[-2:])

    def _rotation(self, frame_ids: Sequence[int], latents: Tensor) -> Tensor:
        """Return the rotations of frames at `frame_ids` for latents of this size, device and precision."""
        _, patch_h, patch_w = self.geometry.patch_size
        return rope.frame_rotations(
            frame_ids,
            latents.shape[-2] // patch_h,
            latents.shape[-1] // patch_w,
            self.transformer.config.attention_head_dim,
            latents.device,
            torch.float64 if latents.dtype == torch.float64 else torch.float32,
        )

    def _window_camera(self, state: RolloutState) -> prope.CameraTransforms | None:
        """Return the transforms of the committed frames the next chunk sees."""
        if state.w2c is None or not state.visible:
            return None
        return self._camera(state.w2c, state.intrinsics, (len(state.prompt_embeds), state.visible))

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
            prope.transform_translation(prope.at_least_float32(w2c), self.camera_translation_transform),
            intrinsics,
        )


def _joined_times(
    first_r: Tensor | None, first_t: Tensor, second_r: Tensor | None, second_t: Tensor
) -> Tensor | None:
    """Return r over two joined parts `[B,Ta+Tb]`, each part's t where its r is not given; None if neither is."""
    if first_r is None and second_r is None:
        return None
    return torch.cat(
        (first_t if first_r is None else first_r, second_t if second_r is None else second_r), dim=1
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


def check_config(folder: Path, expected: Mapping[str, Any]) -> None:
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
