"""Every stage of Wan in every layout: the training of one process within tolerance, and checkpoints that change layout.

Tolerance, float32: the layouts add the same numbers in other orders (about 1e-7 relative each); a finite difference (AnyFlow) and
a rollout (Stage2) amplify that, and Adam divides by the root of gradients near zero. Losses and gradient norms within 1e-4
relative, weights within 1e-3 relative (L2 norm of the difference by that of the change that training made).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from stage_world import stage_world, train  # noqa: F401

from solarwm_lib import artifacts
from solarwm_lib.backbones.tiny import build_tiny_assets
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.training import checkpoint, metrics

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("sharded_worker.py")
# 20 by hand; six show every kind of update of every stage.
STEPS = int(os.environ.get("SOLARWM_LAYOUT_STEPS", "6"))
MIDDLE = STEPS // 2
A14B = "A14B"  # Stage0.5 of the image-conditioned network
STAGES = ("stage0p5", "flow_matching", "anyflow", "stage2", A14B)
BATCH = 4
# name -> nodes, processes a node, sequence-parallel size, strategy
LAYOUTS = {
    "two data-parallel": (1, 2, 1, "replicate"),
    "two parts": (1, 2, 1, "full_shard"),
    "two sequence-parallel": (1, 2, 2, "replicate"),
    "2x2 hybrid": (2, 2, 1, "hybrid_shard"),
    "2x2 parts and sequence-parallel": (1, 4, 2, "full_shard"),
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def values_of(world, stage: str, run_dir: Path, layout: tuple[int, int, int, str]) -> dict:
    nodes, local, sp, strategy = layout
    return world.stage(
        "stage0p5" if stage == A14B else stage,
        run_dir,
        **network_of(world, stage),
        distributed={"world_size": nodes * local, "sequence_parallel_size": sp},
        train__strategy=strategy,
        train__micro_batch_size=BATCH * sp // (nodes * local),
        train__global_batch_size=BATCH,
        train__optimizer={"learning_rate": 1e-4, "warmup_steps": 0},
        train__activation_checkpointing=strategy == "full_shard",
    )


def network_of(world, stage: str) -> dict[str, str]:
    """Changes that make a run of Stage0.5 one of A14B."""
    assets = str(a14b_assets(world))
    network = {"model__family": "wan22_i2v_a14b", "model__architecture": "wan22-tiny-i2v"}
    return {**network, "model__base_path": assets} if stage == A14B else {}


def a14b_assets(world) -> Path:
    folder = world.assets.with_name("assets-a14b")
    if not folder.exists():
        build_tiny_assets(folder, load_architecture("wan22-tiny-i2v"), seed=0)
    return folder


def launch(jobs: list, folder: Path, layout: tuple[int, int, int, str]) -> None:
    nodes, local, _, _ = layout
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes}",
        f"--nproc-per-node={local}",
    ]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    agents = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", str(WORKER), str(file)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(nodes)
    ]
    texts = [agent.communicate(timeout=600)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * nodes, texts[0][-3000:]


@pytest.fixture(scope="module")
def one(stage_world, tmp_path_factory):  # noqa: F811
    """Run directories of one process, by stage."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("one")
    for stage in STAGES:
        changes = {"learning_rate": 1e-4, "warmup_steps": 0}
        batch = {"train__micro_batch_size": BATCH, "train__global_batch_size": BATCH}
        name = "stage0p5" if stage == A14B else stage
        network = network_of(stage_world, stage)
        train(stage_world, name, root / stage, STEPS, **batch, **network, train__optimizer=changes)
    return root


@pytest.fixture(scope="module")
def trained(stage_world, tmp_path_factory):  # noqa: F811
    """Root of the run directories of a layout, by stage, trained in two segments."""
    known: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in known:
            root = known[name] = tmp_path_factory.mktemp("layout")
            runs = [values_of(stage_world, stage, root / stage, LAYOUTS[name]) for stage in STAGES]
            launch([[run, step] for run in runs for step in (MIDDLE, STEPS)], root, LAYOUTS[name])
        return known[name]

    return of


def tensors(path: Path, member: str) -> dict[str, torch.Tensor]:
    """All tensors of a member, whatever its parts."""
    artifact = artifacts.verify(path, deep=True)
    stem = member.removesuffix(".safetensors")
    found: dict[str, torch.Tensor] = {}
    for entry in artifact.members:
        if entry.path == member or (entry.path.startswith(f"{stem}-") and "-of-" in entry.path):
            with safe_open(artifact.path / entry.path, framework="pt") as file:
                names = set(file.keys())
                assert not names & found.keys()
                found |= {name: file.get_tensor(name) for name in names}
    return found


def require_equal(world, one: Path, other: Path, stage: str) -> None:
    for a, b in zip(*(metrics.read(path / stage / metrics.FILE) for path in (one, other)), strict=True):
        assert a["step"] == b["step"] and a["batch_digest"] == b["batch_digest"]
        assert a["details"].keys() == b["details"].keys()
        pairs = [(a[k], b[k]) for k in ("loss", "gradient_norm", "learning_rate")]
        for x, y in pairs + [(a["details"][k], b["details"][k]) for k in a["details"]]:
            assert y == pytest.approx(x, rel=1e-4, abs=1e-9)
    left, right = (path / stage / checkpoint.directory_name(STEPS) for path in (one, other))
    for member in (checkpoint.MODEL, checkpoint.EMA, *([checkpoint.CRITIC] if stage == "stage2" else [])):
        start = first_weights(world, stage, member)
        ours, theirs = tensors(left, member), tensors(right, member)
        assert ours.keys() == theirs.keys() and len(ours) > 50
        names = [name for name in ours if name in start]
        difference = sum((ours[n] - theirs[n]).double().square().sum() for n in names)
        change = sum((ours[n] - start[n]).double().square().sum() for n in names)
        assert change > 0 and float((difference / change).sqrt()) < 1e-3, member
    states = [checkpoint.read_state(artifacts.read(path)) for path in (left, right)]
    assert states[0].completed_steps == states[1].completed_steps == STEPS
    assert states[0].ema_updates == states[1].ema_updates
    assert states[0].stream_position == states[1].stream_position


def first_weights(world, stage: str, member: str) -> dict[str, torch.Tensor]:
    if stage in ("stage0p5", A14B):
        folder = (a14b_assets(world) if stage == A14B else world.assets) / "transformer"
        with safe_open(next(folder.glob("*.safetensors")), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if member == checkpoint.CRITIC:
        return tensors(world.stage0p5, checkpoint.MODEL)
    return tensors(world.stage1 if stage == "stage2" else world.stage0p5, checkpoint.EMA)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_like_one_process(stage_world, one, trained, name, stage):  # noqa: F811
    require_equal(stage_world, one, trained(name), stage)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("2x2 hybrid", (1, 1, 1, "replicate")),
        ("2x2 hybrid", (1, 2, 1, "full_shard")),
        ("2x2 parts and sequence-parallel", (1, 2, 2, "replicate")),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(stage_world, one, trained, tmp_path, name, target):  # noqa: F811
    source = trained(name)
    for stage in STAGES:
        shutil.copytree(source / stage, tmp_path / stage)
        shutil.rmtree(tmp_path / stage / checkpoint.directory_name(STEPS))
    launch(
        [[values_of(stage_world, stage, tmp_path / stage, target), STEPS] for stage in STAGES],
        tmp_path,
        target,
    )
    for stage in STAGES:
        require_equal(stage_world, one, tmp_path, stage)
        state = checkpoint.read_state(artifacts.read(tmp_path / stage / checkpoint.directory_name(STEPS)))
        assert [(h["from_step"], h["to_step"], h["world_size"]) for h in state.history] == [
            (0, MIDDLE, 4),
            (MIDDLE, STEPS, target[0] * target[1]),
        ]
