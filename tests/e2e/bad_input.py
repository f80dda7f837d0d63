"""The table of bad input: what is wrong, which command meets it, the line it prints and the code it exits with.

`test_bad_input.py` runs every case; docs/reference/errors.md holds the same table, printed by
`python tests/e2e/bad_input.py`. In a message `…` stands for a path, digest or number of the case at hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_bench import CHECKPOINT, Bench, Case
from bad_buckets import CASES as BUCKETS
from bad_data import CASES as DATA
from bad_latents import CASES as LATENTS
from bad_samples import CASES as SAMPLES

from solarwm_lib import artifacts

RECIPE = Path(__file__).parents[2] / "config/recipes/wan22_ti2v_5b/train_stage0p5_fm_81f.yaml"


def _train(**changes: Any) -> Callable[[Bench], list[str]]:
    return lambda bench: ["train", *bench.config("new", **changes)]


def _set(*texts: str) -> Callable[[Bench], list[str]]:
    return lambda bench: [
        "train",
        *bench.config("new"),
        *(word for text in texts for word in ("--set", text)),
    ]


def _recipe(*texts: str) -> Callable[[Bench], list[str]]:
    return lambda bench: ["train", "--config", str(RECIPE), *(w for text in texts for w in ("--set", text))]


def _text(content: str) -> Callable[[Bench], list[str]]:
    return lambda bench: ["train", *bench.text(content)]


def _resume_damaged(bench: Bench) -> list[str]:
    bench.damaged("optimizer.safetensors")
    return ["train", *bench.config(), "--until-step", "3"]


def _validate_damaged(bench: Bench) -> list[str]:
    checkpoint = bench.damaged("model.safetensors")
    plan = str(bench.run / "validation/frozen-plan.json")
    words = ["--checkpoint", str(checkpoint), "--plan", plan, "--pass", "live"]
    return ["validate", *bench.config(), *words, "--out", str(bench.path / "out")]


def _verify_damaged(bench: Bench) -> list[str]:
    return ["verify", "--deep", str(bench.damaged("ema.safetensors"))]


def _truncated_checkpoint(bench: Bench) -> list[str]:
    path = bench.run / CHECKPOINT / "ema.safetensors"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    return bench.infer(bench.run / CHECKPOINT)


def _unfinished_checkpoint(bench: Bench) -> list[str]:
    (bench.run / CHECKPOINT / artifacts.MARKER).unlink()
    return bench.infer(bench.run / CHECKPOINT)


def _other_plan(bench: Bench) -> list[str]:
    plan = bench.run / "validation/frozen-plan.json"
    return ["freeze-plan", *bench.config("new", validation__noise_seed=7), "--out", str(plan)]


def _route(family: str, architecture: str, stage: str, mode: str) -> Callable[[Bench], list[str]]:
    def prepare(bench: Bench) -> list[str]:
        model = {"family": family, "architecture": architecture, "base_path": str(bench.world.assets)}
        return ["train", *bench.config("new", model=model, train__stage=stage, train__causal_mode=mode)]

    return prepare


CONFIGURATION: tuple[Case, ...] = (
    Case("configuration file is missing", "…/absent.yaml: cannot be read: No such file or directory", 2,
         lambda bench: ["train", "--config", str(bench.path / "absent.yaml")], early=True),
    Case("tab as indentation", "…/run.yaml: line 3, column 1: not valid YAML: a tab; indent with spaces", 2,
         _text("schema: solarwm.run.v1\nmodel:\n\tfamily: wan22_ti2v_5b\n"), early=True),
    Case("key given twice", "…/run.yaml: line 3: duplicate key 'name'; keep one", 2,
         _text("schema: solarwm.run.v1\nname: a\nname: b\n"), early=True),
    Case("unknown key in the file",
         "…/new.json: unknown key train.optimizer.learning_rat; did you mean train.optimizer.learning_rate?", 2,
         _train(train__optimizer__learning_rat=1e-4), early=True),
    Case("unknown key in `--set`", "--set: unknown key train.optimiser; did you mean train.optimizer?", 2,
         _set("train.optimiser.learning_rate=1e-4"), early=True),
    Case("secret in the file (never shown)",
         "…/new.json: metadata.api_key: a secret in a configuration is refused; give api_key_file, a path, instead", 2,
         _train(metadata__api_key="s3cr3t-value"), early=True, secret="s3cr3t-value"),
    Case("secret in `--set` (never shown)", "--set metadata.wandb_token: a secret in a configuration is refused; "
         "give metadata.wandb_token_file, a path, instead", 2,
         _set("metadata.wandb_token=s3cr3t-value"), early=True, secret="s3cr3t-value"),
    Case("placeholder path at launch", "model.base_path, data.root, runtime.output_dir: still the placeholder "
         "/path/to/...; set it in the file or with --set model.base_path=PATH", 2, _recipe(), early=True),
    Case("environment variable not set", "…/new.json: data.root: environment variable SOLARWM_ABSENT is not set; "
         "set it or use --set data.root=VALUE", 2, _train(data__root="${SOLARWM_ABSENT}/data"), early=True),
    Case("command of another action", "…/new.json: action is 'train', but the command is `solarwm infer`; "
         "use `solarwm train` or change the key `action`", 2, lambda bench: ["infer", *bench.config("new")], early=True),
    Case("A14B Stage1", "…/new.json: unsupported route wan22_i2v_a14b:stage1:teacher_forcing:flow_matching; "
         "routes of wan22_i2v_a14b: wan22_i2v_a14b:stage0p5:bidirectional:flow_matching; "
         "change train.stage, causal_mode, objective, objective_variant", 2,
         _route("wan22_i2v_a14b", "wan22-i2v-a14b", "stage1", "teacher_forcing"), early=True),
    Case("LTX Stage2", "…/new.json: unsupported route ltx25_video:stage2:self_gradient_forcing:native_rectified_flow; "
         "routes of ltx25_video: ltx25_video:stage0p5:bidirectional:native_rectified_flow; "
         "change train.stage, causal_mode, objective, objective_variant", 2,
         _route("ltx25_video", "ltx25-22b", "stage2", "self_gradient_forcing"), early=True),
    Case("frame count", "…/new.json: data.pixel_frames: found 80, expected 4k+1 for wan22_ti2v_5b; nearest: 77 or 81; "
         "the released route uses 81 or 153", 2, _train(data__pixel_frames=80), early=True),
    Case("height and width", "…/new.json: data.height: found 66, expected a multiple of 32; nearest: 64 or 96; "
         "data.width: found 50, expected a multiple of 32; nearest: 32 or 64; "
         "the released route uses 480x864 or 704x1280", 2, _set("data.height=66", "data.width=50"), early=True),
    Case("batch that no accumulation reaches", "…/new.json: train.global_batch_size: found 10, but world 1 / SP 1 x "
         "micro 4 x accumulation 1 = 4; no accumulation reaches 10 with 4 clips per forward pass; nearest batches: "
         "8 or 12; train.micro_batch_size=2 with train.gradient_accumulation_steps=5 keeps 10", 2,
         _train(train__global_batch_size=10), early=True),
    Case("batch of another accumulation", "…/new.json: train.global_batch_size: found 8, but world 1 / SP 1 x micro 4 "
         "x accumulation 1 = 4; set train.gradient_accumulation_steps=2 to keep the batch, "
         "or train.global_batch_size=4 to change it", 2,
         _train(train__global_batch_size=8, train__gradient_accumulation_steps=1), early=True),
    Case("world size", "WORLD_SIZE is 2 but distributed.world_size is 1: start 1 process(es) "
         "(torchrun --standalone --nproc-per-node=1 ...) or set distributed.world_size=2", 2, _train(), early=True,
         environment=tuple(dict(WORLD_SIZE="2", RANK="0", LOCAL_WORLD_SIZE="2", LOCAL_RANK="0").items())),
    Case("half of torchrun's variables", "WORLD_SIZE set but RANK, LOCAL_WORLD_SIZE, LOCAL_RANK missing: "
         "start with torchrun, or unset them for one process", 2, _train(), early=True,
         environment=(("WORLD_SIZE", "2"),)),
    Case("run directory of another identity", "…/run holds another run: must match "
         "train.optimizer.learning_rate 0.001 -> 0.0005; use a new name and runtime.output_dir, or remove the run", 2,
         lambda bench: ["train", *bench.config(train__optimizer__learning_rate=5e-4)], early=True),
    Case("frozen plan of other settings", "…/frozen-plan.json: holds another plan (validation.noise_seed: found 42, "
         "wanted 7) and is never overwritten; use a new run name or remove the run's validation", 4, _other_plan),
)  # fmt: skip
CHECKPOINTS: tuple[Case, ...] = (
    Case("flipped bit in a checkpoint, resuming (launch records stay)", "…/checkpoint_model_000002: member "
         "'optimizer.safetensors' has the right size and other content (sha256 …, expected …); it is damaged, "
         "restore a copy, or remove …/checkpoint_model_000002 to go on without it", 4, _resume_damaged, records=True),
    Case("the same, validating", "…/checkpoint_model_000002: member 'model.safetensors' has the right size and other "
         "content (sha256 …, expected …); it is damaged, restore a copy", 4, _validate_damaged),
    Case("the same, inferring (launch records stay)", "…/checkpoint_model_000002: member 'model.safetensors' has the "
         "right size and other content (sha256 …, expected …); it is damaged, restore a copy", 4,
         lambda bench: bench.infer(bench.damaged("model.safetensors")), records=True),
    Case("the same, `verify --deep`", "…/checkpoint_model_000002: member 'ema.safetensors' has the right size and other "
         "content (sha256 …, expected …); it is damaged, restore a copy", 4, _verify_damaged),
    Case("checkpoint member is truncated", "…/checkpoint_model_000002: member 'ema.safetensors' has … bytes, expected …; "
         "it is truncated or was changed, restore a copy", 4, _truncated_checkpoint),
    Case("checkpoint without its marker", "…/checkpoint_model_000002: is not complete (no COMPLETE.json); "
         "nothing beside it is complete", 4, _unfinished_checkpoint),
)  # fmt: skip
CASES = (*CONFIGURATION, *DATA, *SAMPLES, *LATENTS, *BUCKETS, *CHECKPOINTS)
# Found by a full disk, which tests make themselves. Earlier checkpoints stay whole, the launch records stay.
LOW_DISK = Case("too little space for a checkpoint, before the first step",
                "…/run: a checkpoint needs … MiB and … MiB are free; free space or change runtime.output_dir", 4,
                lambda bench: [], records=True)  # fmt: skip
FULL_DISK = Case("too little space when a checkpoint is due", "disk full: …/run/checkpoint_model_… needs about … MiB and "
                 "… MiB are free; free space or change the output directory", 4, lambda bench: [], records=True)  # fmt: skip
FILLING_DISK = Case("disk fills up in the middle of a checkpoint", "disk full while writing …/run/checkpoint_model_…: "
                    "… (… MiB free); nothing was published and the unfinished files were removed; free space or change the "
                    "output directory, then run the same command again", 4, lambda bench: [], records=True)  # fmt: skip


GROUPS = {
    "Configuration": CONFIGURATION,
    "Indexes and shards": DATA,
    "Cameras, videos, captions": SAMPLES,
    "Windows, preencoding, stored latents": LATENTS,
    "Buckets, caches, plans": BUCKETS,
    "Checkpoints": (*CHECKPOINTS, LOW_DISK, FULL_DISK, FILLING_DISK),
}


def table() -> str:
    """The tables of docs/reference/errors.md."""
    lines = []
    for title, cases in GROUPS.items():
        rows = [f"| {case.wrong} | `{case.message}` | {case.code} |" for case in cases]
        # A code span that holds a backtick needs a longer fence.
        rows = [re.sub(r"\| `(.*`.*)` \| (\d+) \|$", r"| `` \1 `` | \2 |", row) for row in rows]
        lines += ["", f"### {title}", "", "| what is wrong | message | exit code |", "|---|---|---|", *rows]
    return "\n".join(lines[1:])


if __name__ == "__main__":
    print(table())
