"""What a job of the graph asks of its machine. No torch: every cluster job computes it again while it parses the Snakefile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.geometry import geometry
from solarwm_lib.estimate.memory import plan
from solarwm_lib.estimate.parameters import codec_parameters, network_of, text_encoder_parameters
from solarwm_lib.estimate.sizes import GIB, PROCESS, PROMPT_CACHE, host
from solarwm_lib.estimate.workload import workload_of

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved

MARGIN = 1.25  # what the plan does not see: the allocator, decoders, pinned buffers
MEGABYTE = 10**6


@dataclass(frozen=True)
class Job:
    """Host memory in megabytes (10^6 bytes) and GPUs of a job, all its processes together; the names are those of Snakemake's slurm executor."""

    mem_mb: int
    gpu: int


def uses_gpu(resolved: Resolved) -> bool:
    """Whether a run is meant for GPUs: bfloat16 arithmetic is, because a CPU takes it one to two orders of magnitude slower."""
    return resolved.config.train.precision == "bfloat16"


def training_job(resolved: Resolved, processes: int) -> Job:
    """What `processes` training processes on one machine need; also a preflight, which samples one case after two steps.

    Host memory with GPUs is the process, its caches and the weights while they load; without, everything lies there.
    """
    workload = workload_of(resolved, local_world=processes)
    if uses_gpu(resolved):
        return _job(sum(host(resolved, workload).values()) * processes, processes)
    encoders = 0 if workload.online else _encoders(load_architecture(resolved.config.model.architecture))
    caches = int(resolved.config.data.decoded_cache_gib * GIB) + PROMPT_CACHE
    tensors = plan(workload).total + encoders + _decoding(resolved)
    return _job((PROCESS + caches + tensors) * processes, 0)


def sampling_job(resolved: Resolved) -> Job:
    """What one process needs that samples, decodes and measures: a validation or an inference."""
    architecture = load_architecture(resolved.config.model.architecture)
    network = 4 * network_of(architecture).total
    tensors = network + _encoders(architecture) + _decoding(resolved)
    return _job(PROCESS + PROMPT_CACHE + tensors, 1 if uses_gpu(resolved) else 0)


def _job(size: int, gpus: int) -> Job:
    return Job(ceil(size * MARGIN / MEGABYTE), gpus)


def _encoders(architecture: Mapping[str, Any]) -> int:
    return 4 * ((codec_parameters(architecture) or 0) + (text_encoder_parameters(architecture) or 0))


def _decoding(resolved: Resolved) -> int:
    """Bytes of a generated and a recorded clip in float32, twice, at the longest rollout; and a pass of the network over it."""
    config = resolved.config
    data, passes = config.data, config.validation.passes
    architecture = load_architecture(config.model.architecture)
    size = geometry(config.model.family, architecture, data.pixel_frames, data.height, data.width)
    latents = max([size.latent_frames, *(item.rollout_latent_frames for item in passes)])
    frames = 1 + int(architecture["temporal_stride"]) * latents
    network = network_of(architecture)
    rows = latents * size.tokens_per_latent_frame
    return 4 * (4 * 3 * frames * data.height * data.width + rows * (16 * network.width + 2 * network.ffn))
