"""Peak memory of real optimizer steps, measured in this process. Started fresh by tests/unit/test_estimate_memory.py, also under torchrun.

    python tests/estimate_probe.py '{"stage": "stage0p5", "transformer": {...}, "set": ["train.micro_batch_size=2"]}'

prints JSON: bytes of the tensors that stay (`resident`), the highest sum of what the allocator handed out beside them during a step
(`temporary`, from the profiler's allocation events, so that memory inside kernels counts), and the process's size (`rss_*`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.load import Resolved, load
from solarwm_lib.estimate.memory import plan
from solarwm_lib.estimate.workload import workload_of
from solarwm_lib.runtime.process import Heartbeat, StopRequest
from solarwm_lib.training import collectives, loop, setup, sharding, stage2
from solarwm_lib.training.batches import Batch
from solarwm_lib.training.ema import Ema
from solarwm_lib.training.learner import Learner
from solarwm_lib.training.topology import BatchPlan, Topology, from_environment

REPO = Path(__file__).parents[1]
TOPOLOGY = Topology()
RECIPES = {
    "stage0p5": ("train_stage0p5_fm_81f", ["smoke"]),
    "stage1": ("train_stage1_tf_fm_81f", ["smoke", "smoke_stage1"]),
    "anyflow": ("train_stage1_tf_anyflow_v1_5_81f", ["smoke", "smoke_stage1"]),
    "stage2": ("train_stage2_sgf_81f", ["smoke", "smoke_stage2"]),
}


def largest_size() -> int:
    """Peak resident bytes of this program; `ru_maxrss` would count the parent it was forked from, a large pytest for one."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) * 1024


def resolve(stage: str, sets: Sequence[str]) -> Resolved:
    """The configuration of `stage` at the size of the tests, with `sets` over it."""
    recipe, scales = RECIPES[stage]
    overlays = [REPO / f"config/scales/{scale}.yaml" for scale in scales]
    return load(REPO / f"config/recipes/wan22_ti2v_5b/{recipe}.yaml", overlays, sets)


def architecture(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tiny architecture with other arguments of the transformer."""
    tiny = load_architecture("wan22-tiny")
    return {**tiny, "transformer": {**tiny["transformer"], **changes}}


class RandomClips:
    """Batches of noise in the shape that the configuration asks for."""

    workers = 0

    def __init__(self, resolved: Resolved, text_dim: int) -> None:
        data, text = resolved.config.data, resolved.config.model.text_length
        self.latents = (data.latent_frames, 48, data.height // 16, data.width // 16)
        self.text = (text, text_dim)

    def load(self, indices: Sequence[int], following: Sequence[int] = (), allowed: int = 0) -> Batch:
        n, names = len(indices), tuple(f"clip-{i}" for i in indices)
        w2c, intrinsics = torch.eye(4).repeat(n, self.latents[0], 1, 1), torch.eye(3).repeat(n, 1, 1)
        latents, text = torch.randn(n, *self.latents), torch.randn(n, *self.text)
        return Batch(
            tuple(indices), names, names, (0,) * n, ("",) * n, latents, text, w2c, intrinsics
        )  # fmt: skip


def trainer_of(
    resolved: Resolved, described: Mapping[str, Any], folder: Path, topology: Topology = TOPOLOGY
) -> loop.Trainer:
    """The trainer of the configuration over a network of `described`, with random weights and random clips."""
    config, device = resolved.config, torch.device("cpu")
    settings = config.train
    layout = sharding.layout(settings.strategy, topology, device, settings.precision)

    def network() -> Wan22:
        backbone = Wan22.from_config(described, config.model, anyflow=settings.anyflow is not None)
        if settings.activation_checkpointing:
            backbone.transformer.enable_gradient_checkpointing()
        layout.apply(backbone.transformer)
        return backbone.train()

    text_dim = described["transformer"]["text_dim"]
    negative = torch.randn(1, config.model.text_length, text_dim)
    rest = (
        RandomClips(resolved, text_dim),
        BatchPlan(settings.global_batch_size, settings.micro_batch_size, settings.gradient_accumulation_steps,
            topology.data_world_size,
        ),
        topology,
        folder,
        Heartbeat(folder, 0),
        StopRequest(),
    )  # fmt: skip
    if settings.stage != "stage2":
        backbone = network()
        learner = setup.build_learner(resolved, backbone, None)
        objective = setup.build_objective(resolved, backbone, device, negative)
        return loop.Trainer(learner, objective, *rest, sharded=layout.is_sharded)
    forcing = settings.self_gradient_forcing
    models = stage2.Models(network().eval(), network().eval().requires_grad_(False), network().eval())
    models.teacher.transformer.disable_gradient_checkpointing()
    cadence = stage2.StudentCadence(0.9, 0)
    student, critic = (
        Learner(
            parameters := dict(model.trainable()),
            setup.build_optimizer(optimizer, parameters),
            Ema.of(parameters, cadence) if model is models.student else None,
            setup.schedule(optimizer, 10),
            1.0,
        )
        for model, optimizer in (
            (models.student, settings.optimizer),
            (models.critic, forcing.critic_optimizer),
        )
    )
    of_student, of_critic = stage2.objectives(resolved, models, device, negative)
    learner = stage2.Distillation(student, critic, forcing.critic_updates_per_student)
    learner.teacher = models.teacher  # so that its bytes are counted among what stays
    return stage2.DistillationTrainer(
        learner, of_critic, *rest, sharded=layout.is_sharded, student_objective=of_student
    )


def resident_bytes(learner: Any) -> int:
    """Bytes of parameters, slots and averages of every role."""

    def tensors() -> Iterator[torch.Tensor]:
        for part in learner.tensors().members().values():
            yield from part.values()
        teacher = getattr(learner, "teacher", None)
        yield from teacher.parameters() if teacher is not None else ()

    held = [sharding.local(t) for t in tensors()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


def peak_of(run: Any) -> int:
    """The highest sum of allocations minus releases while `run` runs, in bytes, by torch's own allocation events."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as record:
        run()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in record.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = highest = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        highest = max(highest, held)
    return highest


def measure(stage: str, transformer: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """Measure and predict; see the module."""
    torch.set_num_threads(1)
    process = psutil.Process()
    base = process.memory_info().rss
    resolved, described = resolve(stage, sets), architecture(transformer)
    topology = from_environment(os.environ, resolved.config.distributed.world_size)
    with tempfile.TemporaryDirectory() as folder, collectives.process_group(topology):
        trainer = trainer_of(resolved, described, Path(folder), topology)
        steps = 2 * trainer.learner.critic_updates_per_student + 1 if stage == "stage2" else 2
        for _ in range(steps - 1):
            trainer.step()
        temporary = peak_of(trainer.step)
    # Clips and prompts come from a random source here, so that neither codec nor text encoder is there.
    predicted = plan(replace(workload_of(resolved, described), online=False))
    return {
        "parameters": sum(p.numel() for p in trainer.learner.parameters.values()),
        "resident": resident_bytes(trainer.learner),
        "temporary": temporary,
        "predicted_resident": sum(predicted.resident.values()),
        "predicted_temporary": sum(predicted.temporary.values()),
        "predicted_parts": predicted.temporary,
        "moment": predicted.moment,
        "rss_base": base,
        "rss_peak": largest_size(),
    }


if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    found = measure(case["stage"], case.get("transformer", {}), case.get("set", []))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found))
