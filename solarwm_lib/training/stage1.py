"""The losses of Stage1: teacher-forced flow matching, and the AnyFlow forward map (spec wan22 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from solarwm_lib.objectives import anyflow, noise, teacher_forcing
from solarwm_lib.training.learner import Loss, Relative, Witness, unwitnessed

if TYPE_CHECKING:
    from solarwm_lib.backbones.protocol import CausalBackbone
    from solarwm_lib.config.load import Resolved
    from solarwm_lib.training.batches import Batch
    from solarwm_lib.training.learner import Objective


def arithmetic(resolved: Resolved, device: torch.device) -> torch.autocast:
    """Return the context of a forward pass in the run's precision.

    Without autocast's cache of cast weights: a pass uses each weight once, and a cache filled in a pass without gradient has cost
    the pass after it its gradients in some versions of torch.
    """
    lower = resolved.config.train.precision == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=lower, cache_enabled=False)


def flow_matching(
    resolved: Resolved, backbone: CausalBackbone, device: torch.device, same: Witness = unwitnessed
) -> Objective:
    """Return the loss of a micro-batch under the baseline: one timestep per chunk."""
    config, causal = resolved.config, resolved.config.model.causal
    table = noise.schedule(config.model.timestep_shift, config.train.num_train_timesteps)

    def objective(batch: Batch) -> Loss:
        draws = teacher_forcing.draw(
            tuple(batch.latents.shape[1:]),
            seed=config.data.seed,
            global_sample_indices=batch.indices,
            global_batch_size=config.train.global_batch_size,
            chunk=causal.chunk_latent_frames,
            image_condition_dropout=config.train.image_condition_dropout,
            num_train_timesteps=config.train.num_train_timesteps,
        )
        same(batch, draws)
        with arithmetic(resolved, device):
            output = teacher_forcing.loss(
                backbone,
                batch.latents,
                batch.prompt_embeds,
                batch.w2c,
                batch.intrinsics,
                draws,
                table,
                chunk=causal.chunk_latent_frames,
                max_prior_clean_chunks=causal.max_prior_clean_chunks,
                sink=causal.sink_latent_frames,
            )
        timesteps = table.timesteps[draws.index.numpy()[:, :: causal.chunk_latent_frames]]
        return Loss(output.loss, output.per_sample, timesteps.tolist())

    return objective


def forward_map(
    resolved: Resolved,
    backbone: CausalBackbone,
    device: torch.device,
    negative_embeds: torch.Tensor | None,
    same: Witness = unwitnessed,
) -> Objective:
    """Return the loss of a micro-batch under AnyFlow v1.5.

    Samples other than diffusion ones count in units of the mean diffusion error of the whole step, over ranks and
    micro-batches: their loss is relative, so that nobody waits for that mean before the backward pass.
    """
    config, causal, settings = resolved.config, resolved.config.model.causal, resolved.config.train.anyflow
    if settings is None:
        raise ValueError("train.anyflow is null; a checked configuration has it")
    table = noise.schedule(config.model.timestep_shift, config.train.num_train_timesteps)
    rows = range(config.train.global_batch_size)
    kinds = anyflow.kinds(rows, len(rows), settings.diffusion_ratio, settings.consistency_ratio)
    has_mean = bool((kinds == anyflow.Kind.DIFFUSION).any())

    def objective(batch: Batch) -> Loss:
        draws = anyflow.draw(
            tuple(batch.latents.shape[1:]),
            seed=config.data.seed,
            global_sample_indices=batch.indices,
            global_batch_size=config.train.global_batch_size,
            shift=config.model.timestep_shift,
            diffusion_ratio=settings.diffusion_ratio,
            consistency_ratio=settings.consistency_ratio,
            num_train_timesteps=config.train.num_train_timesteps,
        )
        same(batch, draws)
        with arithmetic(resolved, device):
            errors = anyflow.errors(
                backbone,
                batch.latents,
                batch.prompt_embeds,
                negative_embeds,
                batch.w2c,
                batch.intrinsics,
                draws,
                table,
                chunk=causal.chunk_latent_frames,
                max_prior_clean_chunks=causal.max_prior_clean_chunks,
                sink=causal.sink_latent_frames,
                epsilon=settings.epsilon,
                guidance_scale=settings.guidance_scale,
            )
        times = torch.stack([draws.t, draws.r], dim=1).tolist()
        if has_mean:
            return split(errors, times)
        output = anyflow.loss(errors, None)
        return Loss(output.loss, output.per_sample, times)

    return objective


def split(errors: anyflow.Errors, times: list[list[float]]) -> Loss:
    """Return the loss of a micro-batch with what is in units of the diffusion mean set apart.

    For every mean m, loss + m relative.loss is `anyflow.loss(errors, m)`.
    """
    diffusion = errors.diffusion
    direct, relative = (anyflow.loss(_masked(errors, chosen), 1.0) for chosen in (diffusion, ~diffusion))
    # The gradient of a part without samples is not a row of zeros but none: its backward pass is left out.
    loss = direct.loss if diffusion.any() else direct.loss.detach()
    rest = relative.loss if (~diffusion).any() else relative.loss.detach()
    total, count = anyflow.diffusion_sum(errors)
    return Loss(loss, direct.per_sample, times, Relative(rest, relative.per_sample, total, count))


def _masked(errors: anyflow.Errors, chosen: torch.Tensor) -> anyflow.Errors:
    """Return `errors` with the samples outside `chosen` set to 0, by selection: a non-finite one does not leak."""
    return anyflow.Errors(torch.where(chosen, errors.error, 0.0), errors.weight, errors.diffusion)
