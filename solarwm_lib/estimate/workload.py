"""What one process computes in one optimizer step, read off a resolved configuration. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.geometry import condition_channels, geometry
from solarwm_lib.estimate.parameters import Network, codec_parameters, network_of, text_encoder_parameters

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved

LONGEST_CAPTION = 512  # text tokens assumed where an architecture pads to no fixed length
LOCAL_WORLD = 8  # processes per node, where nothing else is known


@dataclass(frozen=True)
class Topology:
    """How a step is spread over processes, and what is kept for its backward pass.

    `strategy` and the names are those of the configuration; `local_world` is the processes of a node.
    """

    world: int
    sequence: int
    micro_batch: int
    accumulation: int
    strategy: str
    checkpointing: bool
    local_world: int = LOCAL_WORLD

    @property
    def shards(self) -> int:
        """Processes that parameters, gradients, optimizer and average are spread over."""
        if self.strategy == "replicate":
            return 1
        return self.world if self.strategy == "full_shard" else min(self.world, self.local_world)

    @property
    def nodes(self) -> int:
        return -(-self.world // self.local_world)


@dataclass(frozen=True)
class Workload:
    """A training run by its numbers. Tokens and frames are of one clip; `batch` is clips per process and forward."""

    family: str
    stage: str
    objective: str
    network: Network
    topology: Topology
    global_batch: int
    max_steps: int
    lower: bool  # bfloat16 arithmetic; masters are float32
    frames: int  # latent frames
    tokens_per_frame: int
    text_tokens: int
    latent_values: int  # numbers in the latents of a clip
    input_values: int  # the same with the image condition
    chunk: int
    prior_chunks: int
    window: int
    sink: int
    guidance: bool  # Stage1: a forward for the negative prompt
    diffusion_rows: (
        int  # AnyFlow: the first rows of a global batch, whose gradients are kept apart from the others'
    )
    critic_ratio: int
    denoising_steps: int
    whole_teacher: bool  # not in parts, though the student is
    real_guidance: bool
    fake_guidance: bool
    adapter: int  # parameters of LoRA; 0: all parameters train
    connector: int  # frozen parameters beside the network (LTX-2.5)
    codec: int | None
    text_encoder: int | None
    online: bool  # codec and text encoder are in memory while training
    prompt_rows: int  # of the prompt among the tokens of a clip (MiniMax-H3: image and caption)
    pixels: int  # of a clip

    @property
    def tokens(self) -> int:
        return self.frames * self.tokens_per_frame

    @property
    def trainable(self) -> int:
        return self.adapter or self.network.total

    @property
    def frozen(self) -> int:
        return (self.network.total if self.adapter else 0) + self.connector

    @property
    def batch(self) -> int:
        return self.topology.micro_batch

    # A process has consecutive rows of the global batch, a micro-batch consecutive ones of these.

    @property
    def kinds_per_micro_batch(self) -> int:
        return 2 if self.diffusion_rows % self.batch else 1

    @property
    def kinds_per_process(self) -> int:
        return 2 if self.diffusion_rows % (self.batch * self.topology.accumulation) else 1

    @property
    def moving_share(self) -> float:
        """AnyFlow: share of a micro-batch that a difference is taken of, at least one clip."""
        return max(1 / self.batch, 1 - self.diffusion_rows / self.global_batch)


def workload_of(
    resolved: Resolved, architecture: Mapping[str, Any] | None = None, local_world: int = LOCAL_WORLD
) -> Workload:
    """The numbers of a resolved training configuration; `architecture` in place of the file that it names."""
    config = resolved.config
    model, data, train, causal = config.model, config.data, config.train, config.model.causal
    described = dict(architecture or load_architecture(model.architecture))
    size = geometry(model.family, described, data.pixel_frames, data.height, data.width)
    latents = size.latent_height * size.latent_width * size.latent_frames
    condition = condition_channels(model.family, size.latent_channels)
    anyflow, forcing = train.anyflow, train.self_gradient_forcing
    network = network_of(described, anyflow is not None and model.family.startswith("wan22_"))
    text = model.text_length or LONGEST_CAPTION
    rollout = forcing.rollout_latent_frames if forcing else None
    if model.minimax_h3 is not None and train.stage == "stage1":
        rollout = model.minimax_h3.target_latent_frames  # whole chunks of the clip
    return Workload(
        family=model.family,
        stage=train.stage,
        objective=train.objective,
        network=network,
        topology=Topology(
            config.distributed.world_size,
            config.distributed.sequence_parallel_size,
            train.micro_batch_size,
            train.gradient_accumulation_steps,
            train.strategy,
            train.activation_checkpointing,
            min(local_world, config.distributed.world_size),
        ),
        global_batch=train.global_batch_size,
        max_steps=train.max_steps,
        lower=train.precision == "bfloat16",
        frames=rollout or size.latent_frames,
        tokens_per_frame=size.tokens_per_latent_frame,
        text_tokens=text,
        latent_values=size.latent_channels * latents,
        input_values=(size.latent_channels + condition) * latents,
        chunk=causal.chunk_latent_frames,
        prior_chunks=causal.max_prior_clean_chunks,
        window=causal.local_attention_latent_frames,
        sink=causal.sink_latent_frames,
        guidance=anyflow is not None and anyflow.guidance_scale != 1,
        diffusion_rows=round(anyflow.diffusion_ratio * train.global_batch_size) if anyflow else 0,
        critic_ratio=forcing.critic_updates_per_student if forcing else 0,
        denoising_steps=len([label for label in forcing.denoising_timesteps if label]) if forcing else 0,
        whole_teacher=not train.shard_teacher,
        real_guidance=forcing is not None and forcing.real_guidance_scale != 0,
        fake_guidance=forcing is not None and forcing.fake_guidance_scale != 0,
        adapter=network.adapter(model.adapter.rank, _refiners(described)) if model.adapter else 0,
        connector=int(described.get("parameters", {}).get("connector", 0)),
        codec=codec_parameters(described),
        text_encoder=text_encoder_parameters(described),
        online=data.encoding == "online",
        prompt_rows=0 if network.cross_attention else text + size.tokens_per_latent_frame,
        pixels=3 * (1 if train.stage == "stage2" else data.pixel_frames) * data.height * data.width,
    )


def _refiners(architecture: Mapping[str, Any]) -> int:
    return int(architecture["transformer"].get("num_refiner_layers", 0))
