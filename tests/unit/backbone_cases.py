"""A Wan architecture small enough for millisecond tests, cameras, and the weights to put on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor

from solarwm_lib.backbones import rope
from solarwm_lib.backbones.wan22 import Wan22

ARCHITECTURE = {
    "family": "wan22_ti2v_5b",
    "transformer": {
        "patch_size": [1, 2, 2],
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "in_channels": 8,
        "out_channels": 8,
        "text_dim": 12,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 2,
    },
    "latent_channels": 8,
    "temporal_stride": 4,
    "spatial_stride": 16,
}


# The same network with the image condition of I2V: 8 latents, 4 mask, 8 image latents in.
I2V_ARCHITECTURE = ARCHITECTURE | {
    "family": "wan22_i2v_a14b",
    "transformer": ARCHITECTURE["transformer"] | {"in_channels": 20},
    "spatial_stride": 8,
}


def model_section(transform: str = "linear", mode: str = "fused_prope") -> SimpleNamespace:
    return SimpleNamespace(camera_attention_mode=mode, camera_translation_transform=transform)


def backbone(transform: str = "linear", anyflow: bool = False, layers: int = 2) -> Wan22:
    torch.manual_seed(0)
    architecture = ARCHITECTURE | {"transformer": ARCHITECTURE["transformer"] | {"num_layers": layers}}
    return Wan22.from_config(architecture, model_section(transform), anyflow=anyflow)


def i2v_backbone() -> Wan22:
    torch.manual_seed(0)
    return Wan22.from_config(I2V_ARCHITECTURE, model_section())


@contextmanager
def double_precision() -> Iterator[None]:
    """Let diffusers' float32 islands (`.float()` around norms and modulation) be float64, for models made `.double()`."""
    narrow = Tensor.float
    Tensor.float = Tensor.double
    try:
        yield
    finally:
        Tensor.float = narrow


def cameras(batch: int, frames: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random rigid world-to-camera matrices `[B,T,4,4]`, first one identity, and intrinsics `[B,3,3]`."""
    generator = torch.Generator().manual_seed(seed)
    rotation, _ = torch.linalg.qr(torch.randn(batch, frames, 3, 3, generator=generator))
    rotation = rotation * torch.linalg.det(rotation)[..., None, None]
    w2c = torch.eye(4).repeat(batch, frames, 1, 1)
    w2c[..., :3, :3] = rotation
    w2c[..., :3, 3] = torch.randn(batch, frames, 3, generator=generator)
    w2c[:, 0] = torch.eye(4)
    intrinsics = torch.tensor([[0.5050505, 0.0, 0.5], [0.0, 0.8978676, 0.5], [0.0, 0.0, 1.0]]).repeat(
        batch, 1, 1
    )
    return w2c, intrinsics


def inputs(batch: int = 2, frames: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    w2c, intrinsics = cameras(batch, frames)
    case = {
        "latents": torch.randn(batch, frames, 8, 4, 6, generator=generator),
        "timesteps": 1000 * torch.rand(batch, frames, generator=generator),
        "prompt_embeds": torch.randn(batch, 5, 12, generator=generator),
        "w2c": w2c,
        "intrinsics": intrinsics,
    }
    return {name: value.to(dtype) for name, value in case.items()}


def rigid(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """`case` with w2c rotations orthogonal to float64's precision: cast from float32 they are so to 1e-7 only."""
    w2c = case["w2c"].clone()
    left, _, right = torch.linalg.svd(w2c[..., :3, :3])
    w2c[..., :3, :3] = left @ right
    return case | {"w2c": w2c}


def cos_sin(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The rotations of position ids `[L,3]` in diffusers' form: float32 (cos, sin) `[1,L,1,D]`, each twice, once per channel."""
    rotation = rope.rotations(positions, head_dim, dtype=torch.float64).repeat_interleave(2, dim=-1)
    return rotation.real.float(), rotation.imag.float()
