"""From a resolved configuration to the parts of a trainer: what is refused, what is loaded, what identifies the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, DataError
from solarwm_lib.training.topology import BatchPlan, Topology, from_environment, mesh_shape

if TYPE_CHECKING:
    import torch

    from solarwm_lib.backbones.protocol import Backbone, CausalBackbone
    from solarwm_lib.config.load import Resolved
    from solarwm_lib.config.sections import Optimizer
    from solarwm_lib.data.dataset import RawClips
    from solarwm_lib.data.latents import LatentClips
    from solarwm_lib.training.batches import Batches
    from solarwm_lib.training.learner import Learner, Objective, Witness
    from solarwm_lib.training.sources import LatentSource, OnlineSource

GATE = 0.25  # weight of the second time embedding, as `backbones.second_time` has it


@dataclass(frozen=True)
class Inputs:
    """The published artifacts a run is made from; their digests, not their paths, are its identity.

    `latents` is the merged index of the generation that a preencoded run trains from; `roles` are Stage2's checkpoints.
    """

    dataset: Artifact
    assets: Artifact
    initial: Artifact | None
    latents: Artifact | None = None
    roles: dict[str, Artifact] = field(default_factory=dict)

    @property
    def parents(self) -> list[Artifact]:
        """What everything the run publishes is made from."""
        roles = {artifact.path: artifact for artifact in self.roles.values()}
        found = (self.dataset, self.latents, self.assets, self.initial, *roles.values())
        return [artifact for artifact in found if artifact is not None]


def refuse_unsupported(resolved: Resolved) -> None:
    """Raise ConfigError for what the schema can say but this trainer cannot do."""
    config = resolved.config
    stage, mode = config.train.stage, config.train.timestep_mode
    wanted = "uniform_per_video" if stage == "stage0p5" else "per_block"
    anyflow, forcing = config.train.anyflow, config.train.self_gradient_forcing
    rollout = forcing.rollout_latent_frames if forcing else None
    problems = (
        (not resolved.route.runs, f"route {resolved.route.key}", "config is checked, but only wan22_ti2v_5b and wan22_i2v_a14b train"),
        (anyflow is not None and config.train.strategy != "replicate" and config.train.gradient_accumulation_steps > 1,
         f"train.gradient_accumulation_steps {config.train.gradient_accumulation_steps} of AnyFlow with train.strategy "
         f"{config.train.strategy}",
         "use 1: the loss of some samples is in units of a mean over the whole step, known after the last micro-batch"),
        (mode != wanted, f"train.timestep_mode {mode} in {stage}", f"use {wanted}"),
        (anyflow is not None and anyflow.gate != GATE,
         f"train.anyflow.gate {anyflow.gate if anyflow else ''}", f"use {GATE}"),
        (forcing is not None and forcing.context_timestep != 0,
         f"train.self_gradient_forcing.context_timestep {forcing.context_timestep if forcing else ''}", "use 0"),
        (rollout not in (None, config.data.latent_frames),
         f"train.self_gradient_forcing.rollout_latent_frames {rollout}",
         f"use null: data.latent_frames {config.data.latent_frames}"),
        (stage == "stage2" and config.checkpoint.mode == "full_resume", "checkpoint.mode full_resume in stage2",
         "use roles: the run continues by itself from the saves in its own directory"),
    )  # fmt: skip
    for refused, found, remedy in problems:
        if refused:
            raise ConfigError(f"{found} cannot be trained by this version; {remedy}")


def topology_of(resolved: Resolved) -> tuple[Topology, BatchPlan]:
    """Return this process's place and the deal of the global batch; ConfigError before anything is allocated."""
    config = resolved.config
    topology = from_environment(
        os.environ, config.distributed.world_size, config.distributed.sequence_parallel_size
    )
    plan = BatchPlan(
        config.train.global_batch_size,
        config.train.micro_batch_size,
        config.train.gradient_accumulation_steps,
        topology.data_world_size,
    )
    return topology, plan


def read_inputs(resolved: Resolved) -> Inputs:
    """Read the markers of data set, base assets and, for a run that starts from some, the initial checkpoints."""
    from solarwm_lib.data.dataset import read_dataset
    from solarwm_lib.training.initial import read_roles

    config = resolved.config
    initial = None
    if config.checkpoint.mode in ("weights_only", "full_resume"):
        from solarwm_lib.training.checkpoint import SCHEMA

        initial = artifacts.read(Path(config.checkpoint.path), SCHEMA)
    latents = None
    if config.data.encoding == "preencoded":
        from solarwm_lib.data.latents import read_generation

        latents = read_generation(config.data.latents_root)
    dataset = read_dataset(config.data.root, shards_elsewhere=bool(config.data.transport.root))
    assets = artifacts.read(Path(config.model.base_path))
    return Inputs(dataset, assets, initial, latents, read_roles(config))


def identity_of(resolved: Resolved, inputs: Inputs) -> dict[str, Any]:
    """Return what makes two checkpoints of the same step interchangeable."""
    return {
        "semantic_digest": resolved.semantic_digest,
        "dataset": inputs.dataset.digest,
        "assets": inputs.assets.digest,
        "initial": inputs.initial.digest if inputs.initial else None,
        **({"latents": inputs.latents.digest} if inputs.latents else {}),
        **{role: artifact.digest for role, artifact in inputs.roles.items()},
    }


def refuse_other_identity(found: Artifact, wanted: dict[str, Any]) -> None:
    """Raise ArtifactError with both digests if `found` was trained by another configuration or from other inputs."""
    held = {key: found.identity.get(key) for key in wanted}
    if held == wanted:
        return
    differences = "; ".join(artifacts.identity_diff(held, wanted))
    raise ArtifactError(
        f"{found.path}: cannot be continued by this run: {differences}. Restore the data set, assets or setting it was "
        f"trained with, or use a new run name (runtime.output_dir)"
    )


@dataclass(frozen=True)
class Run:
    """A run as one process sees it: configuration, directory, place in the world, inputs and identity."""

    resolved: Resolved
    run_dir: Path
    topology: Topology
    plan: BatchPlan
    inputs: Inputs
    identity: dict[str, Any]


def open_run(resolved: Resolved, run_dir: Path) -> Run:
    """Check all that can be checked before a model exists, and return the run; nothing is allocated or written."""
    from solarwm_lib.training import initial

    refuse_unsupported(resolved)
    topology, plan = topology_of(resolved)
    sp = topology.sequence_parallel_size
    mesh_shape(resolved.config.train.strategy, topology.world_size, topology.local_world_size, sp)
    inputs = read_inputs(resolved)
    found = inputs.roles if inputs.initial is None else {"initial": inputs.initial}
    initial.check(resolved, found, inputs.assets)
    _check_negative_embedding(resolved)
    return Run(resolved, run_dir, topology, plan, inputs, identity_of(resolved, inputs))


def _check_negative_embedding(resolved: Resolved) -> None:
    anyflow = resolved.config.train.anyflow
    if anyflow is not None and anyflow.negative_embedding:
        from solarwm_lib.training.prompts import embedding_file

        embedding_file(resolved)


def make_deterministic(device: torch.device) -> None:
    """Make CPU results a function of inputs, versions and thread count alone; on CUDA equality is within tolerance."""
    import torch

    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory finds reads of uninitialised values; it costs a pass over every buffer.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def build_learner(resolved: Resolved, backbone: Backbone, initial: Artifact | None) -> Learner:
    """Return parameters, optimizer and average at step 0, from base weights or from `initial` (weights_only).

    The source of a flow map has no second time: its four tensors become copies of the first, live and average alike.
    """
    from solarwm_lib.training import checkpoint
    from solarwm_lib.training.ema import Ema, EmaCadence
    from solarwm_lib.training.learner import Learner

    train = resolved.config.train
    parameters = dict(backbone.trainable())
    stored: Mapping[str, torch.Tensor] = parameters  # what a source without a second time holds
    if backbone.anyflow:
        from solarwm_lib.backbones import second_time

        stored = {name: p for name, p in parameters.items() if name not in second_time.TENSORS}
    average_files: list[Path] = []
    if initial is not None and resolved.config.checkpoint.mode == "weights_only":
        roles = _weight_roles(resolved.config.checkpoint.weights)
        source_step = resolved.config.checkpoint.source_step
        files = checkpoint.weight_files(initial.path, roles, source_step)
        checkpoint.load_into(files[roles[0]], stored)
        average_files = files[roles[1]]
        if backbone.anyflow:
            second_time.copy_time(backbone.transformer)
    cadence = EmaCadence(
        train.ema.decay, train.ema.start_step, train.ema.update_every, train.ema.warmup_steps
    )
    ema = Ema.of(parameters, cadence)
    if average_files:
        checkpoint.load_into(average_files, {name: ema.shadow[name] for name in stored})
    optimizer = build_optimizer(train.optimizer, parameters)
    rate = schedule(train.optimizer, train.max_steps)
    return Learner(parameters, optimizer, ema, rate, train.optimizer.gradient_clip)


def build_optimizer(
    settings: Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Return AdamW over `parameters` with its slots allocated."""
    from solarwm_lib.training import optim

    return optim.adamw(
        parameters.values(),
        learning_rate=settings.learning_rate,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def schedule(settings: Optimizer, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the completed updates of a network that will make `total_steps`."""
    from functools import partial

    from solarwm_lib.training import optim

    return partial(
        optim.learning_rate,
        base=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        total_steps=total_steps,
        minimum_ratio=settings.min_learning_rate_ratio,
    )


def _weight_roles(weights: Any) -> tuple[str, str]:
    """Return (source of live, source of EMA) from checkpoint.weights: one role for both, or a pair."""
    if isinstance(weights, str):
        return weights, weights
    if isinstance(weights, list | tuple) and len(weights) == 2:
        return weights[0], weights[1]
    raise ConfigError(
        f"checkpoint.weights is {weights!r}; weights_only needs live, ema or a pair [source of live, source of EMA]"
    )


def open_clips(resolved: Resolved) -> RawClips | LatentClips:
    """Open what the run trains on, raw or latent; needs no torch.

    DataError for a bad row, a video that is shorter than the clip, a generation of another encoder contract, or fewer
    clips than data-parallel ranks.
    """
    config = resolved.config
    data, batch = config.data, config.train.global_batch_size
    clips: RawClips | LatentClips
    if data.encoding == "preencoded":
        from solarwm_lib.config.architectures import load_architecture
        from solarwm_lib.config.geometry import geometry
        from solarwm_lib.data.latents import LatentClips

        architecture = load_architecture(config.model.architecture)
        clips = LatentClips(
            data.latents_root,
            data,
            family=config.model.family,
            geometry=geometry(config.model.family, architecture, data.pixel_frames, data.height, data.width),
            text_length=config.model.text_length,
            text_dim=architecture["transformer"]["text_dim"],
            global_batch_size=batch,
            intrinsics_mode=config.model.camera_intrinsics_mode,
        )
    else:
        from solarwm_lib.data.dataset import RawClips

        clips = RawClips(
            data.root,
            data.train_index,
            data,
            data.decoded_cache_gib / 2,
            family=config.model.family,
            global_batch_size=batch,
            intrinsics_mode=config.model.camera_intrinsics_mode,
        )
    clips.plan.require_readers(config.distributed.world_size // config.distributed.sequence_parallel_size)
    return clips


def check_clips(resolved: Resolved, topology: Topology) -> None:
    """Raise DataError for a training index that cannot be used or does not fit its shards; needs no torch.

    Only the main rank looks: every rank reads the same files, and a failed rank ends the others before they write.
    """
    if topology.is_main:
        clips = open_clips(resolved)
        _check_index(resolved, clips)
        clips.check()
        clips.close()


def _check_index(resolved: Resolved, clips: RawClips | LatentClips) -> None:
    """Raise DataError unless the training index is the published one: its digest, not its size, says so."""
    inputs, path = read_inputs(resolved), clips.rows.path
    artifact = inputs.latents or inputs.dataset
    assert path is not None  # opened from a file
    name = Path(os.path.relpath(path, artifact.path)).as_posix()
    published = {member.path: member.sha256 for member in artifact.members}
    if name not in published:
        indexes = ", ".join(member for member in published if member.endswith((".jsonl", ".jsonl.gz")))
        raise DataError(
            f"data.train_index: {path} is no member of {artifact.path}, which holds {indexes}; name one of them, or publish "
            "the other index as a data set"
        )
    if clips.rows.sha256 != published[name]:
        raise DataError(
            f"{path}: sha256 is {clips.rows.sha256}, {artifact.path} was published with {published[name]}; the index was "
            "changed, restore it or publish the change as a new data set"
        )


def build_batches(resolved: Resolved, device: torch.device, topology: Topology) -> Batches:
    """Open the training clips, and the frozen encoders unless latents are stored; on every rank at the same point."""
    from solarwm_lib.training.batches import Batches

    config = resolved.config
    return Batches(
        build_source(resolved, device),
        device,
        cache_bytes=int(config.data.decoded_cache_gib / 2 * 2**30),
        workers=config.data.num_workers,
        topology=topology,
    )


def build_source(resolved: Resolved, device: torch.device) -> OnlineSource | LatentSource:
    """Open the training clips with what makes tensors of them; DataError for latents of other encoders than the run's."""
    from solarwm_lib.data.dataset import RawClips
    from solarwm_lib.training.sources import LatentSource, OnlineSource, check_encoders

    clips, model = open_clips(resolved), resolved.config.model
    if not isinstance(clips, RawClips):
        check_encoders(clips.contract, artifacts.read(model.base_path))
        return LatentSource(clips)
    from solarwm_lib.backbones.codec import load_codec
    from solarwm_lib.backbones.text import TextEncoder
    from solarwm_lib.config.geometry import IMAGE_CONDITIONED

    codec = load_codec(model.base_path)
    codec.vae.to(device)
    text = TextEncoder.from_pretrained(model.base_path, model.text_length)
    text.encoder.to(device)
    return OnlineSource(
        clips,
        codec,
        text,
        device,
        anchor_only=resolved.config.train.stage == "stage2",
        image_conditioned=model.family in IMAGE_CONDITIONED,
    )


def build_objective(
    resolved: Resolved,
    backbone: CausalBackbone,
    device: torch.device,
    negative_embeds: torch.Tensor | None = None,
    same: Witness | None = None,
) -> Objective:
    """Return the loss of a micro-batch of Stage0.5 or Stage1; all its randomness is keyed by sample index.

    `negative_embeds` `[1,L,D]` is what an AnyFlow guidance leads away from; `same` sees every micro-batch and its draws.
    """
    from solarwm_lib.training.learner import unwitnessed

    same = same or unwitnessed
    if resolved.config.train.stage == "stage1":
        from solarwm_lib.training import stage1

        if resolved.config.train.anyflow is not None:
            return stage1.forward_map(resolved, backbone, device, negative_embeds, same)
        return stage1.flow_matching(resolved, backbone, device, same)
    import torch

    from solarwm_lib.objectives import flow_matching
    from solarwm_lib.training.batches import Batch
    from solarwm_lib.training.learner import Loss

    config = resolved.config
    table = flow_matching.schedule(config.model.timestep_shift, config.train.num_train_timesteps)
    lower_precision = config.train.precision == "bfloat16"

    def objective(batch: Batch) -> Loss:
        draws = flow_matching.draw(
            tuple(batch.latents.shape[1:]),
            seed=config.data.seed,
            global_sample_indices=batch.indices,
            global_batch_size=config.train.global_batch_size,
            image_condition_dropout=config.train.image_condition_dropout,
            num_train_timesteps=config.train.num_train_timesteps,
        )
        same(batch, draws)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=lower_precision):
            output = flow_matching.loss(
                backbone,
                batch.latents,
                batch.prompt_embeds,
                batch.w2c,
                batch.intrinsics,
                draws,
                table,
                batch.image_condition,
            )
        return Loss(output.loss, output.per_sample, table.timesteps[draws.index.numpy()].tolist())

    return objective
