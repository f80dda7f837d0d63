"""The estimates against what they estimate: diffusers' classes, counted FLOPs, visibility plans, real checkpoints and caches."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from estimate_probe import REPO, resolve, trainer_of
from torch.utils.flop_counter import FlopCounterMode

from solarwm_lib import cli
from solarwm_lib.backbones import visibility
from solarwm_lib.backbones.kv_cache import RolloutState
from solarwm_lib.backbones.tiny import build_text_encoder
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import architecture_names, load_architecture
from solarwm_lib.config.load import load
from solarwm_lib.estimate import hardware, memory, memory_plan, meta, reference, sizes, visible
from solarwm_lib.estimate.flops import flops, forward, works
from solarwm_lib.estimate.jobs import sampling_job, training_job
from solarwm_lib.estimate.parameters import (
    codec_parameters,
    network_of,
    text_encoder_parameters,
    umt5_parameters,
)
from solarwm_lib.estimate.topology import fits, smallest
from solarwm_lib.estimate.traffic import traffic
from solarwm_lib.estimate.workload import workload_of
from solarwm_lib.runtime.errors import ConfigError

RECIPES = sorted((REPO / "config/recipes").rglob("train_*.yaml"))
WAN5B, A14B = REPO / "config/recipes/wan22_ti2v_5b", REPO / "config/recipes/wan22_i2v_a14b"
SMALL = ["data.height=32", "data.width=64", "train.micro_batch_size=1", "train.global_batch_size=1"]


@pytest.mark.parametrize("name", architecture_names())
def test_counts_are_those_of_the_classes_on_the_meta_device(name):
    described = load_architecture(name)
    network = network_of(described)
    assert (network.total, network.tensors) == meta.counts(described)
    if "parameters" in described:
        recorded = described["parameters"]
        assert (recorded["transformer"], recorded["tensors"]) == (network.total, network.tensors)


def test_counts_are_those_of_the_specifications():
    found = {name: network_of(load_architecture(name)) for name in architecture_names()}
    assert (found["wan22-ti2v-5b"].total, found["wan22-ti2v-5b"].tensors) == (4_999_787_712, 825)
    assert (found["wan22-i2v-a14b"].total, found["wan22-i2v-a14b"].tensors) == (14_288_901_184, 1095)
    assert (found["ltx25-22b"].total, found["ltx25-22b"].per_block) == (13_123_337_344, 268_791_872)
    assert (found["minimax-h3-33b"].total, found["minimax-h3-33b"].tensors) == (33_122_992_896, 638)
    assert found["ltx25-22b"].adapter(384) == 1_962_934_272
    assert found["minimax-h3-33b"].adapter(384, extra_blocks=2) == 2_075_394_048
    assert meta.counts(load_architecture("ltx25-22b"), audio=True) == (18_987_859_200, 4091)


def test_counts_of_encoders_are_those_of_their_modules():
    tiny = load_architecture("wan22-tiny")
    encoder = build_text_encoder(tiny, tiny["text"]["vocab_size"], seed=0)
    assert text_encoder_parameters(tiny) == sum(p.numel() for p in encoder.parameters())
    full = load_architecture("wan22-ti2v-5b")
    assert text_encoder_parameters(full) == umt5_parameters(256384, 4096, 64, 10240, 24, 64)
    from diffusers import AutoencoderKLWan

    from solarwm_lib.backbones.codec import LinearCausalCodec

    linear = LinearCausalCodec(48, 4, 16, [0.0] * 48, [1.0] * 48)
    assert codec_parameters(tiny) == sum(p.numel() for p in linear.parameters())
    sizes_5b = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "patch_size": 2}
    ends = {"in_channels": 12, "out_channels": 12, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
    with torch.device("meta"):
        codecs = AutoencoderKLWan(**sizes_5b, **ends), AutoencoderKLWan()
    for name, codec in zip(("wan22-ti2v-5b", "wan22-i2v-a14b"), codecs, strict=True):
        assert codec_parameters(load_architecture(name)) == sum(p.numel() for p in codec.parameters())


def test_a_flow_map_has_the_second_time_of_its_network():
    tiny = load_architecture("wan22-tiny")
    backbone = Wan22.from_config(tiny, resolve("anyflow", []).config.model, "meta", anyflow=True)
    trained = [p.numel() for _, p in backbone.trainable()]
    network = network_of(tiny, anyflow=True)
    assert (network.total, network.tensors) == (sum(trained), len(trained))


@pytest.mark.parametrize(
    ("frames", "chunk", "prior", "sink"),
    [(21, 3, 5, 0), (6, 3, 1, 0), (21, 3, 5, 3), (21, 3, 2, 6), (45, 5, 5, 0)],
)
def test_key_sums_are_those_of_the_visibility_plan(frames, chunk, prior, sink):
    plan = visibility.teacher_forcing(frames, chunk, prior, 1, sink)
    pairs = sum(segment.query.length * span.length for segment in plan.segments for span in segment.keys)
    apart = sum(span.length for segment in plan.segments if len(segment.keys) > 1 for span in segment.keys)
    assert visible.pairs(frames, chunk, prior, sink) == pairs
    assert visible.copied(frames, chunk, prior, sink) == apart


@pytest.mark.parametrize("stage", ["stage0p5", "stage1", "anyflow", "stage2"])
def test_flops_of_steps_are_those_counted(stage, tmp_path):
    resolved = resolve(stage, SMALL)
    workload = workload_of(resolved)
    trainer = trainer_of(resolved, load_architecture("wan22-tiny"), tmp_path)
    ratio = workload.critic_ratio or 1
    for _ in range(ratio):  # Stage2's first steps move the critic alone
        trainer.step()
    with FlopCounterMode(display=False) as counter:
        for _ in range(ratio):
            trainer.step()
    counted = counter.get_total_flops() / ratio
    assert flops(workload).model == pytest.approx(counted, rel=0.05)


def test_recomputation_costs_one_more_forward_of_the_passes_with_gradient():
    workload = workload_of(resolve("stage0p5", SMALL))
    again = replace(workload, topology=replace(workload.topology, checkpointing=True))
    once = sum(forward(workload, works(workload)[0]))
    assert flops(again).hardware - flops(workload).hardware == pytest.approx(once * workload.global_batch)
    assert flops(again).model == flops(workload).model == pytest.approx(3 * once, rel=0.01)


@pytest.mark.parametrize("stage", ["stage0p5", "stage2"])
def test_a_checkpoint_is_as_large_as_predicted(stage, tmp_path):
    resolved = resolve(stage, SMALL)
    trainer = trainer_of(resolved, load_architecture("wan22-tiny"), tmp_path)
    assert sizes.checkpoint(workload_of(resolved)) == pytest.approx(
        trainer.learner.tensors().bytes(), rel=0.002
    )


def test_a_rollout_s_cache_is_as_large_as_predicted():
    resolved = resolve("stage2", ["data.height=64", "data.width=96"])
    workload = replace(workload_of(resolved), frames=6, window=6, chunk=3)
    backbone = Wan22.from_config(load_architecture("wan22-tiny"), resolved.config.model)
    text = torch.zeros(workload.batch, workload.text_tokens, 64)
    state: RolloutState = backbone.rollout_state(text, torch.eye(3).expand(2, 3, 3), chunk=3, window=6)
    cameras = torch.eye(4).expand(2, 3, 4, 4)
    backbone.chunk_velocity(state, torch.zeros(2, 3, 48, 4, 6), torch.zeros(2, 3), cameras, commit=True)
    held = [t for layer in state.layers.values() for t in vars(layer).values() if isinstance(t, torch.Tensor)]
    held += [t for pair in state.text.values() for t in pair]
    assert memory.cache(workload) == sum(t.nbytes for t in held)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_plan_of_every_recipe_sums_to_its_parts(recipe):
    resolved = load(recipe)
    parts = memory_plan(resolved)
    plan = memory.plan(workload_of(resolved))
    assert sum(parts.values()) == plan.total and len(parts) == len(plan.resident) + len(plan.temporary)
    assert all(size > 0 for size in parts.values())
    assert max(plan.moments.values()) == sum(plan.temporary.values())


def test_strategies_divide_what_they_say():
    base = workload_of(
        load(WAN5B / "train_stage0p5_fm_81f.yaml", sets=["train.activation_checkpointing=true"])
    )

    def parts(**changes):
        return memory.plan(replace(base, topology=replace(base.topology, **changes)))

    whole, hybrid, full = (parts(strategy=s) for s in ("replicate", "hybrid_shard", "full_shard"))
    for name in ("weights", "optimizer", "ema"):
        assert whole.resident[name] == pytest.approx(8 * hybrid.resident[name], abs=64)
        assert whole.resident[name] == pytest.approx(256 * full.resident[name], abs=2048)
    assert "gathered blocks" not in whole.temporary and hybrid.temporary["gathered blocks"] > 0
    assert "weight copies" in whole.temporary and "weight copies" not in hybrid.temporary
    halves = parts(sequence=2)
    assert halves.temporary["activations"] == pytest.approx(hybrid.temporary["activations"] / 2, rel=0.01)
    assert parts(checkpointing=False).temporary["activations"] > 5 * hybrid.temporary["activations"]


def test_collectives_follow_the_strategy():
    base = workload_of(load(A14B / "train_stage0p5_fm_153f.yaml"))
    total = base.network.total
    full = traffic(base)
    assert full.all_gather == pytest.approx(2 * 2 * total * 255 / 256, rel=1e-6)  # twice, in bfloat16
    assert full.reduce_scatter == pytest.approx(4 * total * 255 / 256, rel=1e-6)
    assert full.all_reduce == 0 and full.all_to_all > 0
    alone = traffic(replace(base, topology=replace(base.topology, strategy="replicate", sequence=1)))
    assert alone.all_gather == alone.reduce_scatter == alone.all_to_all == 0
    assert alone.all_reduce == pytest.approx(2 * 4 * total * 255 / 256, rel=1e-6)
    hybrid = traffic(replace(base, topology=replace(base.topology, strategy="hybrid_shard")))
    assert hybrid.all_reduce == pytest.approx(2 * 4 * total / 8 * 31 / 32, rel=1e-6)


@pytest.mark.parametrize("gpu", ["h100-80", "h200-141"])
def test_the_smallest_topology_fits_and_half_of_it_does_not(gpu):
    chosen, workload = hardware.gpu(gpu), workload_of(load(A14B / "train_stage0p5_fm_153f.yaml"))
    small = smallest(workload, chosen)
    t = small.topology
    assert fits(small, chosen) and t.world < workload.topology.world
    assert t.world // t.sequence * t.micro_batch * t.accumulation == workload.global_batch
    for sequence in (1, 2, 4, 8):
        half = replace(t, world=t.world // 2, sequence=sequence, strategy="full_shard", checkpointing=True)
        assert not fits(replace(workload, topology=half), chosen)


def test_nothing_fits_a_gpu_that_is_too_small():
    tiny_gpu = replace(hardware.gpu("rtx4090-24"), memory=2 * hardware.GIB)
    assert smallest(workload_of(load(WAN5B / "train_stage0p5_fm_81f.yaml")), tiny_gpu) is None


def test_jobs_ask_for_gpus_where_arithmetic_is_bfloat16():
    cpu = training_job(resolve("stage0p5", []), processes=2)
    assert cpu.gpu == 0 and 2_000 < cpu.mem_mb < 12_000
    gpu = training_job(load(WAN5B / "train_stage0p5_fm_81f.yaml"), processes=8)
    assert gpu.gpu == 8 and gpu.mem_mb > 8 * 10_000
    assert sampling_job(load(WAN5B / "train_stage0p5_fm_81f.yaml")).gpu == 1
    assert sampling_job(resolve("stage2", [])).gpu == 0


def test_the_graph_plans_memory_without_torch():
    code = (
        "import sys; from pathlib import Path; from solarwm_lib.config.load import read_values;"
        "from solarwm_lib.graph import load_workflow;"
        "w = load_workflow(read_values(Path('config/config.yaml')), Path('.'));"
        "print([w.training_job(run).mem_mb > 0 and w.sampling_job('runs', run).mem_mb > 0 for run in w.config.runs]);"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\n")[:2] == [str([True] * 3), "False"]


SNAKEFILE = """
rule one:
    output: "one.txt"
    resources: mem_mb=config["mem"], gpu=config["mem"] - 1
    params: identity="a"
    shell: "echo > {output}"
"""


def test_other_resources_rerun_nothing(tmp_path):
    """Snakemake's own behaviour, on which `resources` of the rules rely."""
    (tmp_path / "Snakefile").write_text(SNAKEFILE)

    def snakemake(mem: int) -> str:
        command = [sys.executable, "-m", "snakemake", "--cores", "1", "--workflow-profile", "none"]
        command += ["--rerun-triggers", "input", "params", "--config", f"mem={mem}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr + done.stdout

    assert "1 of 1 steps" in snakemake(1)
    assert "Nothing to be done" in snakemake(2)


def test_the_command_prints_every_section_and_json(capsys):
    recipe = str(WAN5B / "train_stage2_sgf_81f.yaml")
    assert cli.main(["estimate", "--config", recipe, "--gpu", "h200-141"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "4,999,787,712",
        "critic optimizer",
        "all-gather",
        "GPU hours",
        "Smallest topology",
        "assumed: 40%",
    ):
        assert words in shown
    assert cli.main(["estimate", "--config", recipe, "--mfu", "0.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["assumptions"] == {"mfu": 0.2} and found["topology"]["world_size"] == 256
    assert sum(found["memory"]["parts"].values()) == found["memory"]["total"]


def test_the_command_takes_a_run_of_the_workflow(capsys):
    configfile = str(REPO / "config/config.yaml")
    assert cli.main(["estimate", "wan5b_tiny_stage1", "--configfile", configfile, "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["parameters"]["student"]
        == network_of(load_architecture("wan22-tiny"), anyflow=True).total
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h100"], ["--gpu", "h100", "h100-80", "b200-180"]),
        (["--mfu", "40"], ["--mfu", "40"]),
        (["--gpus-per-node", "0"], ["--gpus-per-node", "0"]),
    ],
)
def test_the_command_refuses_what_makes_no_sense(arguments, words, capsys):
    recipe = str(WAN5B / "train_stage0p5_fm_81f.yaml")
    assert cli.main(["estimate", "--config", recipe, *arguments]) == ConfigError.exit_code
    message = capsys.readouterr().err
    assert all(word in message for word in words) and message.count("\n") == 1


def test_the_page_of_estimates_is_current():
    found = reference.PAGE.read_text(encoding="utf-8")
    assert found == reference.page(), "run: python -m solarwm_lib.estimate.reference"
    for name in ("wan22-i2v-a14b-stage0p5-fm-153f", "ltx25-stage0p5-153f", "minimax-h3-stage2-158f"):
        assert found.count(f"| {name} |") == 3


def test_only_training_is_estimated(capsys):
    recipe = WAN5B / "infer_stage0p5_fm_81f.yaml"
    assert cli.main(["estimate", "--config", str(recipe)]) == ConfigError.exit_code
    with pytest.raises(ConfigError, match="expected train"):
        memory_plan(load(recipe))
    assert cli.main(["estimate"]) == ConfigError.exit_code
    assert "--config" in capsys.readouterr().err
