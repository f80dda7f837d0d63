"""The memory plan against real optimizer steps, each in a process of its own (`tests/estimate_probe.py` measures).

Compared are bytes of tensors: what stays between steps, and the highest sum of allocations during one, as torch's profiler reports every
allocation and release. The process's size is no such measure: it holds the interpreter, libraries and what the allocator keeps; it
is bounded here and no more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from estimate_fake import peak
from estimate_probe import REPO

from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.load import load
from solarwm_lib.estimate.memory import plan
from solarwm_lib.estimate.workload import workload_of

MIDDLE = {"num_attention_heads": 12, "attention_head_dim": 64, "ffn_dim": 3072, "num_layers": 8}  # 80 million
LARGER = ["data.height=128", "data.width=192"]
CHECKPOINTED = ["train.activation_checkpointing=true"]
SINGLE = ["train.micro_batch_size=1", "train.global_batch_size=1"]
LOWER = [*SINGLE, "train.precision=bfloat16", "data.height=64", "data.width=64"]
TOLERANCE = 0.06  # what is claimed is 15 %; what was seen is within 3
PROCESS_SLACK = 10**9  # libraries that load late, the profiler's events, memory the allocator keeps

CASES = {
    "stage0p5": ("stage0p5", {}, []),
    "stage0p5-checkpointing": ("stage0p5", {}, CHECKPOINTED),
    "stage0p5-accumulation": (
        "stage0p5",
        {},
        ["train.gradient_accumulation_steps=2", "train.global_batch_size=4"],
    ),
    "stage1-bfloat16": ("stage1", {}, LOWER),
    "anyflow": ("anyflow", {}, []),
    "stage2-checkpointing": ("stage2", {}, CHECKPOINTED),
    "middle-stage0p5": ("stage0p5", MIDDLE, LARGER),
    "middle-stage0p5-checkpointing": ("stage0p5", MIDDLE, LARGER + CHECKPOINTED),
}


def probe(
    launcher: Sequence[str], stage: str, transformer: Mapping[str, Any], sets: Sequence[str]
) -> dict[str, Any]:
    case = json.dumps({"stage": stage, "transformer": transformer, "set": sets})
    result = subprocess.run(
        [sys.executable, *launcher, "tests/estimate_probe.py", case],
        cwd=REPO,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_state_in_parts_is_divided_by_the_processes():
    """What comes and goes with sharded blocks is not the same in every run: gloo lets go of buffers when it comes to it."""
    sets = ["distributed.world_size=2", "train.strategy=full_shard", "train.global_batch_size=4"]
    network = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "num_layers": 8}
    found = probe(
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], "stage0p5", network, sets
    )
    assert found["resident"] == pytest.approx(8 * found["parameters"], rel=0.01)
    assert found["predicted_resident"] == pytest.approx(found["resident"], rel=0.01)
    assert found["predicted_temporary"] == pytest.approx(found["temporary"], rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_predicted_memory_is_as_measured(name):
    found = probe([], *CASES[name])
    print(
        name, {key: round(value / 1e6, 1) for key, value in found.items() if isinstance(value, int | float)}
    )
    assert found["predicted_resident"] == pytest.approx(found["resident"], rel=0.01)
    assert found["predicted_temporary"] == pytest.approx(found["temporary"], rel=TOLERANCE)
    total = found["predicted_resident"] + found["predicted_temporary"]
    grown = found["rss_peak"] - found["rss_base"]
    assert 0.85 * total <= grown <= total + PROCESS_SLACK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layers", "checkpointing"),
    [
        ("wan22_ti2v_5b/train_stage0p5_fm_81f", 30, "false"),
        ("wan22_ti2v_5b/train_stage1_tf_fm_81f", 10, "true"),
        ("wan22_i2v_a14b/train_stage0p5_fm_153f", 10, "false"),
    ],
)
def test_full_size_activations_are_those_of_the_operators_on_fake_tensors(recipe, layers, checkpointing):
    """Full width, tokens and precision; the 5B network also in full depth."""
    sets = ["train.strategy=replicate", f"train.activation_checkpointing={checkpointing}"]
    sets += ["distributed.world_size=1", "distributed.sequence_parallel_size=1", "train.global_batch_size=1"]
    resolved = load(REPO / f"config/recipes/{recipe}.yaml", sets=sets)
    full = load_architecture(resolved.config.model.architecture)
    described = {**full, "transformer": {**full["transformer"], "num_layers": layers}}
    predicted = sum(plan(workload_of(resolved, described)).temporary.values())
    assert predicted == pytest.approx(peak(resolved, described), rel=TOLERANCE)
