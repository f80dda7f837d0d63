"""Two and four gloo processes that share the tokens of a pass compute what one process computes, and the same data.

In float64, diffusers' float32 islands included: outputs and mean gradients agree within 1e-12 (measured: 2e-15).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peer_cases import CHANGES

from solarwm_lib.training.peers import Peers
from solarwm_lib.training.topology import Topology

ROOT = Path(__file__).parents[2]
EXACT = 1e-12
# Tokens that each rank's blocks see: six a latent frame, [clean | noisy] twice.
TOKENS = {
    2: {
        "velocity of 5 frames": (18, 12),
        "velocity without cameras": (12, 12),
        "velocity with second times": (12, 6),
        "velocity of one frame": (3, 3),
        "teacher forcing": (36, 36),
        "teacher forcing without cameras, second times": (24, 24),
        "window": (24, 24),
        "window with second times": (18, 18),
        "window without cameras": (18, 18),
        "image condition": (18, 12),
        "rollout of chunks of 3": (12, 6),
        "rollout of single frames, second times": (3, 3),
        "rollout without cameras": (6, 6),
        "checkpointed velocity": (12, 6),
        "checkpointed image condition": (12, 6),
        "checkpointed teacher forcing": (36, 36),
        "flex teacher forcing": (24, 24),
    },
    4: {
        "velocity of 3 frames": (5, 5, 4, 4),
        "velocity of 5 frames": (12, 6, 6, 6),
        "teacher forcing": (18, 18, 18, 18),
        "rollout of chunks of 3": (5, 5, 4, 4),
    },
}
WITHOUT_GRADIENT = ("rollout", "flex")


def launched(folder: Path, processes: int) -> list[dict]:
    worker = Path(__file__).with_name("sequence_cases.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(worker), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'unit'}"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("report-*.json"))]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("four"), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "case"), [(n, case) for n, cases in TOKENS.items() for case in cases], ids=str
)
def test_a_shared_pass_equals_one_process(request, ranks, case):
    reports = request.getfixturevalue({2: "two", 4: "four"}[ranks])
    found = [report["cases"][case] for report in reports]
    assert [f["tokens"] for f in found] == [[[tokens, tokens]] for tokens in TOKENS[ranks][case]]
    for f in found:
        assert f["size"] > 0.5 and f["output"] < EXACT
        if not case.startswith(WITHOUT_GRADIENT):
            assert f["least gradient"] > 1e-3 and f["gradient"] < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("case", ["velocity", "teacher forcing", "rollout"])
def test_parameters_in_parts_over_the_same_ranks_get_the_same_mean_gradient(two, case):
    for report in two:
        found = report["sharded"][case]
        assert found["size"] > 0.5 and found["output"] < EXACT
        assert case == "rollout" or found["gradient"] < EXACT


@pytest.mark.slow
def test_lower_precision_survives_the_exchange(two):
    """bfloat16 has 8 bits: products of other shapes may round the last of them otherwise."""
    for report in two:
        assert report["lower precision"]["output"] < 2**-5 * report["lower precision"]["size"]


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused(two, four):
    for report, ranks in ((two[0], 2), (two[1], 2), (four[3], 4)):
        assert report["refusals"] == {
            "heads": f"distributed.sequence_parallel_size: found {ranks}, expected a divisor of the 3 attention heads; "
            "legal values: 1, 3",
            "changed within a rollout": f"chunk of {4 // ranks} attention heads; this rollout began with 4: "
            "set the sequence group between rollouts",
        }


@pytest.mark.slow
def test_a_peer_that_ends_before_backward_is_an_error_not_a_wait(two):
    assert two[0]["broken"].startswith("exchanging tokens with the sequence-parallel peers failed: ")
    assert "a peer has ended" in two[0]["broken"]


TOLD = {
    "nothing": None,
    "occurrence": "occurrence: rank 2 ('0#0.0', '1#1.1'), rank 3 ('0#0.0', '9#9.9')",
    "start frame": "start frame: rank 2 (0, 4), rank 3 (0, 5)",
    "prompt": "prompt: rank 2 ... evening'), rank 3 ... evening rain')",
    "camera": "camera: rank 2 ",
    "lens": "camera: rank 2 ",
    "latents": "latents: rank 2 ",
    "image condition": "image condition: rank 2 None, rank 3 ",
    "noise": "noise: rank 2 ",
    "timestep": "timestep: rank 2 [700, 3], rank 3 [700, 4]",
    "flow map": "second time: rank 2 [250.0, 125.0], rank 3 [500.0, 250.0]",
    "exit step": "exit step: rank 2 [1, 2], rank 3 [1, 1]",
    "missing draws": "what they have: rank 2 23 parts, rank 3 14 parts",
    "step": "step: rank 2 6, rank 3 7",
}


@pytest.mark.slow
def test_peers_with_other_data_are_named_on_both_and_nobody_else_is_stopped(four):
    assert set(TOLD) | {"prompt and noise"} == set(CHANGES) | {"step"}
    for name, expected in TOLD.items():
        told = [report["peers"][name] for report in four]
        assert told[:2] == [None, None]
        if expected is None:
            assert told[2:] == [None, None]
            continue
        assert told[2].startswith(f"optimizer step 6: sequence-parallel peers differ in {expected}")
        assert told[3] == told[2] or name == "step"
        assert "rank 3 " in told[2] and "; in " not in told[2] and "\n" not in told[2]


@pytest.mark.slow
def test_everything_that_differs_is_named_at_once(four):
    told = four[3]["peers"]["prompt and noise"]
    assert "differ in prompt: rank 2 ('A slow" in told and "rank 3 ('a cat', 'a dog')" in told
    assert "; in noise: rank 2 " in told and told.count("of [2, 3, 4, 6, 6]") == 2


def test_without_peers_nothing_is_compared():
    peers = Peers(Topology())
    assert peers.group is None
    peers.same(1, {"noise": torch.zeros(2)}, object())
