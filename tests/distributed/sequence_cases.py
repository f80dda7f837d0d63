"""Ranks that share the tokens of a pass, compared with each of them alone. Run under torchrun; writes one report a rank.

Float64 throughout, diffusers' float32 islands included: what the ranks add up in another order stays below 1e-10.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from backbone_cases import ARCHITECTURE, I2V_ARCHITECTURE, double_precision, inputs, model_section, rigid
from peer_cases import comparisons
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from solarwm_lib.backbones import attention
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.runtime.errors import ConfigError, DistributedError
from solarwm_lib.training import collectives
from solarwm_lib.training.peers import Peers
from solarwm_lib.training.topology import from_environment

Case = dict[str, Tensor]
HEADS = 4
LAYOUT = {"chunk": 2, "max_prior_clean_chunks": 1, "sink": 2}


def model(anyflow: bool = False, image: bool = False, heads: int = HEADS) -> Wan22:
    """The same network on every rank; a second time that is not the first."""
    torch.manual_seed(0)
    architecture = I2V_ARCHITECTURE if image else ARCHITECTURE
    shape = architecture["transformer"] | {"num_attention_heads": heads, "attention_head_dim": 12}
    built = Wan22.from_config(architecture | {"transformer": shape}, model_section(), anyflow=anyflow)
    if anyflow:
        with torch.no_grad():
            for value in built.transformer.condition_embedder.delta_embedder.parameters():
                value += 0.1 * torch.randn_like(value)
    return built.double().train()


def clip(frames: int, cameras: bool = True) -> Case:
    case = rigid(inputs(frames=frames, dtype=torch.float64))
    return case if cameras else case | {"w2c": None, "intrinsics": None}


def bidirectional(network: Wan22, frames: int, cameras: bool = True, r: bool = False) -> Tensor:
    case = clip(frames, cameras)
    if network.image_conditioned:
        case["image_condition"] = torch.randn(2, frames, 12, 4, 6, dtype=torch.float64)
    return network.velocity(**case, r=case["timesteps"].flip(1) / 2 if r else None)


def teacher_forced(network: Wan22, frames: int, cameras: bool = True, r: bool = False) -> Tensor:
    case = clip(frames, cameras)
    noisy = case.pop("latents")
    second = case["timesteps"].flip(1) / 2 if r else None
    return network.teacher_forced_velocity(noisy.flip(0), noisy, **case, **LAYOUT, r=second)


def window(network: Wan22, frames: int, cameras: bool = True, r: bool = False, past: int = 2) -> Tensor:
    case = clip(frames, cameras)
    latents, times = case.pop("latents"), case.pop("timesteps")
    return network.window_velocity(
        latents[:, :past], latents[:, past:], times[:, :past] / 4, times[:, past:], **case,
        chunk=2, window=4, sink=2, r=times[:, past:] / 2 if r else None,
    )  # fmt: skip


def rollout(network: Wan22, frames: int, chunk: int, cameras: bool = True, r: bool = False) -> Tensor:
    """Two denoising passes and a commit per chunk; the last chunks' window has dropped frames between sink and tail."""
    case, outputs = clip(frames, cameras), []
    state = network.rollout_state(
        case["prompt_embeds"], case["intrinsics"], chunk=chunk, window=3 * chunk, sink=chunk
    )
    for start in range(0, frames, chunk):
        here = slice(start, start + chunk)
        x, t = case["latents"][:, here], case["timesteps"][:, here]
        w2c = case["w2c"][:, here] if cameras else None
        for commit in (False, False, True):
            second = t / 2 if r else None
            x = x - 0.3 * network.chunk_velocity(state, x, t, w2c, r=second, commit=commit)
            outputs.append(x)
    held = network.transformer.config.num_attention_heads
    held //= 1 if network._sequence_group is None else dist.get_world_size(network._sequence_group)
    assert {cache.key.shape[2] for cache in state.layers.values()} == {held}
    return torch.cat(outputs, dim=1)


def seen_tokens(network: Wan22) -> tuple[set[tuple[int, int]], Callable[[], None]]:
    """Record the tokens that every block's hidden states and time embeddings are made of."""
    seen: set[tuple[int, int]] = set()

    def look(module, values):
        seen.add((values[0].shape[1], values[2].shape[1]))

    handles = [block.register_forward_pre_hook(look) for block in network.transformer.blocks]
    return seen, lambda: [handle.remove() for handle in handles]


def gradients(network: Wan22) -> dict[str, Tensor]:
    found = {name: value.grad for name, value in network.trainable()}
    network.zero_grad(set_to_none=True)
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items() if g is not None}


def differences(network: Wan22, run: Callable[[Wan22], Tensor], group: dist.ProcessGroup) -> dict[str, float]:
    """Run `network` alone and shared. Largest differences of output and of the mean over ranks of parameter gradients."""

    def once():
        torch.manual_seed(7)
        with double_precision():
            output = run(network)
            if output.requires_grad:
                (output.square().sum() / 50).backward()
        return output.detach(), gradients(network)

    output, single = once()
    network.set_sequence_group(group)
    seen, stop = seen_tokens(network)
    shared_output, shared = once()
    stop()
    network.set_sequence_group(None)
    report = {"output": float((output - shared_output).abs().max()), "size": float(output.abs().max())}
    report["tokens"] = sorted(seen)
    if single:
        assert single.keys() == shared.keys() == {name for name, _ in network.trainable()}
        for gradient in shared.values():
            dist.all_reduce(gradient, group=group)
        ranks = dist.get_world_size(group)
        report["gradient"] = max(float((single[n] - shared[n] / ranks).abs().max()) for n in single)
        report["least gradient"] = min(float(g.abs().max()) for g in single.values())
    return report


def checkpointed(network: Wan22) -> Wan22:
    network.transformer.enable_gradient_checkpointing()
    return network


def flex(network: Wan22) -> Wan22:
    attention.set_executor(network.transformer, "flex")
    return network


def two_rank_cases(group: dist.ProcessGroup) -> dict[str, dict[str, float]]:
    plain, second, image = model(), model(anyflow=True), model(image=True)
    cases = {
        "velocity of 5 frames": (plain, lambda n: bidirectional(n, 5)),
        "velocity without cameras": (plain, lambda n: bidirectional(n, 4, cameras=False)),
        "velocity with second times": (second, lambda n: bidirectional(n, 3, r=True)),
        "velocity of one frame": (plain, lambda n: bidirectional(n, 1)),
        "teacher forcing": (plain, lambda n: teacher_forced(n, 6)),
        "teacher forcing without cameras, second times": (second, lambda n: teacher_forced(n, 4, False, True)),
        "window": (plain, lambda n: window(n, 8)),
        "window with second times": (second, lambda n: window(n, 6, r=True)),
        "window without cameras": (plain, lambda n: window(n, 6, False)),
        "image condition": (image, lambda n: bidirectional(n, 5)),
        "rollout of chunks of 3": (plain, lambda n: rollout(n, 15, 3)),
        "rollout of single frames, second times": (second, lambda n: rollout(n, 5, 1, r=True)),
        "rollout without cameras": (plain, lambda n: rollout(n, 8, 2, cameras=False)),
        "checkpointed velocity": (checkpointed(model()), lambda n: bidirectional(n, 3)),
        "checkpointed image condition": (checkpointed(model(image=True)), lambda n: bidirectional(n, 3)),
        "checkpointed teacher forcing": (
            checkpointed(model(anyflow=True)),
            lambda n: teacher_forced(n, 6, r=True),
        ),
    }  # fmt: skip
    reports = {name: differences(network, run, group) for name, (network, run) in cases.items()}
    with torch.no_grad():
        reports["flex teacher forcing"] = differences(flex(model()), lambda n: teacher_forced(n, 4), group)
    return reports


def four_rank_cases(group: dist.ProcessGroup) -> dict[str, dict[str, float]]:
    plain, second = model(), model(anyflow=True)
    cases = {
        "velocity of 3 frames": (plain, lambda n: bidirectional(n, 3)),
        "velocity of 5 frames": (second, lambda n: bidirectional(n, 5, r=True)),
        "teacher forcing": (plain, lambda n: teacher_forced(n, 6)),
        "rollout of chunks of 3": (plain, lambda n: rollout(n, 12, 3)),
    }
    return {name: differences(network, run, group) for name, (network, run) in cases.items()}


def sharded_cases(group: dist.ProcessGroup) -> dict[str, dict[str, float]]:
    """Parameters in parts over the same ranks, whose own average of the gradients is then right without a factor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    cases = {
        "velocity": lambda n: bidirectional(n, 5, r=True),
        "teacher forcing": lambda n: teacher_forced(n, 6, r=True),
        "rollout": lambda n: rollout(n, 8, 2, r=True),
    }
    reports = {}
    single = checkpointed(model(anyflow=True))
    network = checkpointed(copy.deepcopy(single))
    for block in network.transformer.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(network.transformer, mesh=mesh)
    network.set_sequence_group(group)
    for name, run in cases.items():
        found = []
        for n in (single, network):
            torch.manual_seed(7)
            with double_precision():
                output = run(n)
                if output.requires_grad:
                    (output.square().sum() / 50).backward()
            found.append((output.detach(), gradients(n)))
        (output, alone), (other, shared) = found
        reports[name] = {"output": float((output - other).abs().max()), "size": float(output.abs().max())}
        assert alone.keys() == shared.keys()
        if alone:
            reports[name]["gradient"] = max(float((alone[n] - shared[n]).abs().max()) for n in alone)
    return reports


def lower_precision(group: dist.ProcessGroup) -> dict[str, float]:
    """Under autocast queries and keys are wider than values; every part keeps its type through the exchange."""
    network = model().float()
    case = {name: value.float() for name, value in clip(3).items()}
    outputs = []
    for shared in (None, group):
        network.set_sequence_group(shared)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            outputs.append(network.velocity(**case).detach().float())
    network.set_sequence_group(None)
    return {
        "output": float((outputs[0] - outputs[1]).abs().max()),
        "size": float(outputs[0].abs().max()),
    }


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    network, found = model(), {}
    with torch.no_grad():
        case = clip(2)
        state = network.rollout_state(case["prompt_embeds"], case["intrinsics"], chunk=1, window=2)
        steps = [(case["latents"][:, i : i + 1], case["timesteps"][:, :1], case["w2c"][:, i : i + 1]) for i in (0, 1)]  # fmt: skip
        with double_precision():
            network.chunk_velocity(state, *steps[0], commit=True)
            network.set_sequence_group(group)
            try:
                network.chunk_velocity(state, *steps[1])
            except ValueError as error:
                found["changed within a rollout"] = str(error)
    try:
        model(heads=3).set_sequence_group(group)
    except ConfigError as error:
        found["heads"] = str(error)
    return found


def broken(group: dist.ProcessGroup) -> str:
    """What rank 0 is told in its backward pass when rank 1 has ended after the forward pass."""
    network = model()
    network.set_sequence_group(group)
    with double_precision():
        loss = bidirectional(network, 3).sum()
        dist.barrier()
        if dist.get_rank() == 1:
            sys.stdout.flush()
            os._exit(0)
        try:
            loss.backward()
        except DistributedError as error:
            return str(error)
    return "nothing"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    topology = from_environment(os.environ, int(os.environ["WORLD_SIZE"]), int(os.environ["WORLD_SIZE"]))
    with collectives.process_group(topology, timeout_seconds=60):
        group = Peers(topology).group
        assert group is not None
        two = topology.world_size == 2
        report = {"cases": (two_rank_cases if two else four_rank_cases)(group), "refusals": refusals(group)}
        if two:
            report["sharded"] = sharded_cases(group)
            report["lower precision"] = lower_precision(group)
        else:
            report["peers"] = comparisons(topology.rank)
        path = folder / f"report-{topology.rank}.json"
        path.write_text(json.dumps(report))
        if two:
            path.write_text(json.dumps(report | {"broken": broken(group)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
