"""PRoPE: cameras as projective relative position encodings (spec wan22 2.2 and 2.3, mode `fused_prope`).

With K_n the normalised intrinsics whose principal point is forced to zero and V the first-frame-relative world-to-camera
matrix, P = lift(K_n) V. Attention uses q' = P_q^T q, k' = P_k^-1 k, v' = P_k^-1 v and o' = P_q o, so that logits become
q^T P_q P_k^-1 k. All tokens of a latent frame share a camera, hence one batched 4x4 product per frame and no per-token matrices.

Shapes: B batch, T latent frames, S tokens per latent frame, L = T*S, N heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TRANSLATION_TRANSFORMS = ("linear", "logd4")


@dataclass(frozen=True)
class CameraTransforms:
    """The three 4x4 matrices per latent frame, float32 `[B,T,4,4]`, laid out for row vectors: `x' = x @ matrix`."""

    query: Tensor
    key_value: Tensor
    output: Tensor

    def frames(self, part: slice) -> CameraTransforms:
        """Return the matrices of the latent frames in `part`."""
        return CameraTransforms(self.query[:, part], self.key_value[:, part], self.output[:, part])

    def twice(self) -> CameraTransforms:
        """Return the matrices of `[frames | frames]`: a clean and a noisy half look through the same cameras."""
        return CameraTransforms(
            *(torch.cat((m, m), dim=1) for m in (self.query, self.key_value, self.output))
        )


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def transform_translation(w2c: Tensor, mode: str) -> Tensor:
    """Return `w2c` `[...,4,4]` with its translation rescaled: `linear` leaves it, `logd4` uses t ln(1+|t|) / (4|t|)."""
    if mode == "linear":
        return w2c
    if mode != "logd4":
        raise ValueError(f"camera translation transform {mode!r}; known: {', '.join(TRANSLATION_TRANSFORMS)}")
    w2c = w2c.clone()
    translation = w2c[..., :3, 3]
    norm = translation.norm(dim=-1, keepdim=True)
    # log1p(n)/n tends to 1 at 0, and the translation is zero there, so any finite divisor gives the required zero.
    w2c[..., :3, 3] = translation * torch.log1p(norm) / (4 * norm.clamp_min(torch.finfo(norm.dtype).tiny))
    return w2c


def invert_rigid(w2c: Tensor) -> Tensor:
    """Return the inverse of rigid transforms `[...,4,4]` by rotation transpose: R^T and -R^T t."""
    rotation_t = w2c[..., :3, :3].transpose(-1, -2)
    inverse = torch.zeros_like(w2c)
    inverse[..., :3, :3] = rotation_t
    inverse[..., :3, 3:] = -rotation_t @ w2c[..., :3, 3:]
    inverse[..., 3, 3] = 1
    return inverse


def rebase(w2c: Tensor) -> Tensor:
    """Return cameras `[B,T,4,4]` relative to their own first one, which becomes the exact identity (a window of a longer path).

    Attention does not notice under `linear`; under `logd4`, applied afterwards, it does (spec 2.3).
    """
    relative = w2c @ invert_rigid(w2c[:, :1])
    relative[:, 0] = torch.eye(4, dtype=w2c.dtype, device=w2c.device)
    return relative


def centred_intrinsics(intrinsics: Tensor) -> Tensor:
    """Return K_n: `intrinsics` `[...,3,3]` (divided by the image size) with principal point 0 and K[2,2] = 1."""
    centred = torch.zeros_like(intrinsics)
    centred[..., :2, :2] = intrinsics[..., :2, :2]
    centred[..., 2, 2] = 1
    return centred


def lift(matrix: Tensor) -> Tensor:
    """Pad `[...,3,3]` to `[...,4,4]` with zeros and a final one."""
    lifted = matrix.new_zeros(*matrix.shape[:-2], 4, 4)
    lifted[..., :3, :3] = matrix
    lifted[..., 3, 3] = 1
    return lifted


def camera_transforms(w2c: Tensor, intrinsics: Tensor) -> CameraTransforms:
    """Build the matrices of `w2c` `[B,T,4,4]` and `intrinsics` `[B,3,3]` or `[B,T,3,3]`.

    They are float32 whatever the activations are, and float64 for float64 cameras.
    """
    w2c = at_least_float32(w2c)
    centred = centred_intrinsics(intrinsics.to(w2c.dtype))
    if centred.ndim == 3:
        centred = centred.unsqueeze(1)
    projection = lift(centred) @ w2c
    inverse = invert_rigid(w2c) @ lift(torch.linalg.inv(centred))
    return CameraTransforms(
        query=projection,
        key_value=inverse.transpose(-1, -2).contiguous(),
        output=projection.transpose(-1, -2).contiguous(),
    )


def apply(x: Tensor, matrices: Tensor, channels: slice | None = None) -> Tensor:
    """Multiply every consecutive group of four channels of `x` `[B,L,N,D]` by its frame's row-vector matrix `[B,T,4,4]`.

    `channels` restricts the groups to a range of D (Wan and LTX use the whole head, H3 its last quarter).
    """
    if channels is not None:
        start, stop, _ = channels.indices(x.shape[-1])
        parts = (x[..., :start], apply(x[..., start:stop], matrices), x[..., stop:])
        return torch.cat(parts, dim=-1)
    batch, frames = matrices.shape[:2]
    rows = x.reshape(batch * frames, -1, 4)
    return torch.bmm(rows, matrices.to(x.dtype).flatten(0, 1)).view(x.shape)
