"""A small closed-form backbone in float64: every method of the protocol that objectives use, causal and non-linear."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

CHANNELS, SIZE = 4, 2


@dataclass
class Rollout:
    """Encodings of the committed chunks; `calls` counts chunk forwards."""

    prompt_embeds: Tensor
    chunk: int
    window: int
    encodings: list[Tensor] = field(default_factory=list)


class ToyBackbone(nn.Module):
    """Velocity = tanh of a mix of the frame, its chunk, the encodings of earlier chunks, times, prompt and camera.

    A clean chunk's encoding depends on the encodings before it, so what a chunk sees, and whether gradients reach the encoding
    of its context, makes a difference, as in a transformer. `calls` records the arguments of every forward.
    """

    def __init__(self, seed=0):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.own = nn.Parameter(torch.randn(CHANNELS, CHANNELS, generator=random, dtype=torch.float64) * 0.4)
        self.context = nn.Parameter(
            torch.randn(CHANNELS, CHANNELS, generator=random, dtype=torch.float64) * 0.4
        )
        self.calls = []

    def _mix(self, matrix, latents):
        return torch.einsum("dc,btchw->btdhw", matrix.to(latents.dtype), latents)

    def _encode(self, clean, before):
        own = self._mix(self.context, clean).mean(dim=1, keepdim=True)
        return torch.tanh(own + torch.stack([0.5 * e for e in before]).sum(dim=0) if before else own)

    def _chunk(self, noisy, timesteps, r, prompt_embeds, w2c, before):
        seen = sum(before) / len(before) if before else torch.zeros_like(noisy[:, :1])
        per_frame = timesteps.double() / 1000 + (0.7 * torch.cos(r.double() / 300) if r is not None else 0.0)
        if w2c is not None:
            per_frame = per_frame + w2c[:, :, 0, 3]
        text = prompt_embeds.mean(dim=(1, 2))[:, None]
        extra = (per_frame + text).to(noisy.dtype)[..., None, None, None]
        chunk_mean = noisy.mean(dim=1, keepdim=True)
        return torch.tanh(self._mix(self.own, noisy + 0.3 * chunk_mean) + 0.8 * seen + extra)

    def velocity(
        self, latents, timesteps, prompt_embeds, w2c=None, intrinsics=None, r=None, image_condition=None
    ):
        self.calls.append(("velocity", latents, timesteps, r, prompt_embeds))
        return self._chunk(latents, timesteps, r, prompt_embeds, w2c, [])

    def teacher_forced_velocity(
        self, clean, noisy, timesteps, prompt_embeds, w2c=None, intrinsics=None, *, chunk, max_prior_clean_chunks,
        sink=0, r=None, clean_timesteps=None, clean_r=None,
    ):  # fmt: skip
        self.calls.append(("teacher_forced", noisy, timesteps, r, prompt_embeds))
        encodings, outputs = [], []
        for first in range(0, clean.shape[1], chunk):
            here = slice(first, first + chunk)
            before = encodings[-max_prior_clean_chunks:] if max_prior_clean_chunks else []
            outputs.append(
                self._chunk(
                    noisy[:, here],
                    timesteps[:, here],
                    None if r is None else r[:, here],
                    prompt_embeds,
                    None if w2c is None else w2c[:, here],
                    before,
                )
            )
            encodings.append(self._encode(clean[:, here], encodings))
        return torch.cat(outputs, dim=1)

    def rollout_state(self, prompt_embeds, intrinsics=None, *, chunk, window, sink=0):
        return Rollout(prompt_embeds, chunk, window)

    def chunk_velocity(self, state, noisy_chunk, timesteps, w2c_chunk=None, *, r=None, commit=False):
        self.calls.append(("commit" if commit else "chunk", noisy_chunk, timesteps, r, state.prompt_embeds))
        prior = state.window // state.chunk - 1
        before = state.encodings[-prior:] if prior else []
        velocity = self._chunk(noisy_chunk, timesteps, r, state.prompt_embeds, w2c_chunk, before)
        if commit:
            state.encodings.append(self._encode(noisy_chunk, before))
        return velocity

    def made(self, kind):
        """The recorded forwards of one kind."""
        return [call for call in self.calls if call[0] == kind]


def random(*shape, seed=0):
    """Standard normal float64 of `shape`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clips(batch, frames, seed=1):
    """Latents, prompt embeddings, cameras and intrinsics of a batch, float64."""
    w2c = torch.eye(4, dtype=torch.float64).repeat(batch, frames, 1, 1)
    w2c[:, :, :3, 3] = 0.1 * random(batch, frames, 3, seed=seed + 1)
    return (
        random(batch, frames, CHANNELS, SIZE, SIZE, seed=seed),
        random(batch, 5, 3, seed=seed + 2),
        w2c,
        torch.eye(3, dtype=torch.float64).repeat(batch, 1, 1),
    )
