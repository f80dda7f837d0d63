"""The table of bad input: what is wrong, which command meets it, the line it prints and the code it exits with.

`test_bad_input.py` runs every case; docs/reference/errors.md holds the same table, printed by
`python tests/e2e/bad_input.py`. In a message `…` stands for a path, digest or number of the case at hand.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from solarwm_lib import artifacts
from solarwm_lib.data.camera import npz_bytes
from solarwm_lib.data.index import Member, read_index
from solarwm_lib.data.shards import ShardReader, ShardWriter
from solarwm_lib.data.writer import SCHEMA, SPLITS

Rows = list[dict[str, Any]]
RECIPE = Path(__file__).parents[2] / "config/recipes/wan22_ti2v_5b/train_stage0p5_fm_81f.yaml"
CHECKPOINT = "checkpoint_model_000002"


@dataclass(frozen=True)
class Bench:
    """A private folder with everything a case needs: the tiny world, a run trained for two steps, its frozen plan."""

    path: Path
    world: Any  # tinyworld.TinyWorld

    @property
    def run(self) -> Path:
        return self.path / "run"

    def config(self, name: str = "run", /, **changes: Any) -> list[str]:
        """`--config FILE` of a run that writes to `name`."""
        file = self.path / f"{name}.json"
        file.write_text(json.dumps(self.world.values(self.path / name, **changes)))
        return ["--config", str(file)]

    def text(self, content: str) -> list[str]:
        file = self.path / "run.yaml"
        file.write_text(content)
        return ["--config", str(file)]

    def infer(self, checkpoint: Path) -> list[str]:
        values = self.world.values(self.path / "out", action="infer", checkpoint={"path": str(checkpoint)})
        for key in ("micro_batch_size", "max_steps", "optimizer", "ema"):
            del values["train"][key]
        file = self.path / "infer.json"
        file.write_text(json.dumps(values))
        return ["infer", "--config", str(file)]

    def damaged(self, member: str) -> Path:
        """The checkpoint with one flipped bit in the middle of `member`."""
        path = self.run / CHECKPOINT / member
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
        return self.run / CHECKPOINT

    def dataset(
        self,
        edit: Callable[[Rows], Any] = lambda rows: None,
        camera: Callable[[np.ndarray], np.ndarray] = lambda c2w: c2w,
    ) -> Path:
        """The tiny data set published again with other cameras, then with edited index rows; one shard per split."""
        source, target = self.world.dataset, self.path / "data"
        reader = ShardReader(source)
        with artifacts.Transaction(target, SCHEMA, {"name": "edited"}) as transaction:
            for split in SPLITS:
                rows: Rows = []
                with transaction.open(f"shards/{split}-000000.tar") as stream:
                    writer = ShardWriter(stream)
                    for row in read_index(source / f"{split}-index.jsonl"):
                        members: dict[str, Member] = {}
                        for name in row.members or {}:
                            data = reader.read(row, name)
                            if name == row.camera_member:
                                data = npz_bytes(c2w=camera(_c2w(data)))
                            members[name] = writer.add(name, data)
                        fields = {name: member.model_dump() for name, member in members.items()}
                        rows.append(row.model_dump(exclude_none=True) | {"members": fields})
                    size, digest = writer.finish()
                for fields in rows:
                    fields |= {
                        "shard": f"shards/{split}-000000.tar",
                        "shard_size": size,
                        "shard_digest": digest,
                    }
                edit(rows)
                transaction.write_text(
                    f"{split}-index.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows)
                )
        reader.close()
        return target

    def on(self, dataset: Path, **changes: Any) -> list[str]:
        """`--config FILE` of a new run over `dataset`."""
        return self.config("new", data__root=str(dataset), **changes)


def _c2w(data: bytes) -> np.ndarray:
    with np.load(io.BytesIO(data)) as archive:
        return archive["c2w"].copy()


@dataclass(frozen=True)
class Case:
    """One kind of bad input. `prepare` spoils the bench and returns the words after `solarwm`."""

    wrong: str
    message: str
    code: int
    prepare: Callable[[Bench], Sequence[str]] = field(repr=False)
    early: bool = False  # refused by numbers and names alone: no torch, under a second
    records: bool = False  # found while running: the launch records stay, no result does
    environment: tuple[tuple[str, str], ...] = ()
    secret: str = ""  # must not be printed

    @property
    def pattern(self) -> str:
        """Regular expression of the whole line on standard error."""
        return "solarwm: error: " + ".+".join(re.escape(part) for part in self.message.split("…"))


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


def _rows(edit: Callable[[Rows], Any], command: str = "train") -> Callable[[Bench], list[str]]:
    def prepare(bench: Bench) -> list[str]:
        words = [command, *bench.on(bench.dataset(edit))]
        return words if command == "train" else [*words, "--out", str(bench.path / "out")]

    return prepare


def _camera(change: Callable[[np.ndarray], np.ndarray], command: str) -> Callable[[Bench], list[str]]:
    def prepare(bench: Bench) -> list[str]:
        dataset = bench.dataset(camera=change)
        if command == "inspect":
            return ["data", "inspect", str(dataset / "train-index.jsonl")]
        words = [command, *bench.on(dataset)]
        return words if command == "train" else [*words, "--out", str(bench.path / "plan.json")]

    return prepare


def _nan(c2w: np.ndarray) -> np.ndarray:
    c2w[3, 0, 3] = np.nan
    return c2w


def _scaled(c2w: np.ndarray) -> np.ndarray:
    c2w[:, :3, :3] *= 1.5
    return c2w


def _mirrored(c2w: np.ndarray) -> np.ndarray:
    c2w[:, :3, 1] *= -1
    return c2w


def _missing_shard(bench: Bench) -> list[str]:
    dataset = bench.dataset()
    (dataset / "shards/train-000000.tar").unlink()
    return ["train", *bench.on(dataset)]


def _truncated_shard(bench: Bench) -> list[str]:
    dataset = bench.dataset()
    shard = dataset / "shards/train-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-2048])
    return ["train", *bench.on(dataset)]


def _damaged_shard(bench: Bench) -> list[str]:
    dataset = bench.dataset()
    shard = dataset / "shards/test-000000.tar"
    data = bytearray(shard.read_bytes())
    data[600] ^= 1  # inside the first member, a camera
    shard.write_bytes(data)
    return ["freeze-plan", *bench.on(dataset), "--out", str(bench.path / "plan.json")]


def _wrong_size(rows: Rows) -> None:
    for row in rows:
        row["members"][row["camera_member"]]["bytes"] += 8


def _beyond_the_end(rows: Rows) -> None:
    rows[0]["members"][rows[0]["video_member"]]["offset"] += 2**20


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


def _nothing_to_pack(bench: Bench) -> list[str]:
    videos = bench.path / "videos"
    videos.mkdir()
    (videos / "broken.mp4").write_bytes(b"not a video")
    return [
        "data",
        "pack",
        str(videos),
        "--static-camera",
        "--caption",
        "a room",
        "--out",
        str(bench.path / "out"),
    ]


def _other_plan(bench: Bench) -> list[str]:
    plan = bench.run / "validation/frozen-plan.json"
    return ["freeze-plan", *bench.config("new", validation__noise_seed=7), "--out", str(plan)]


def _route(family: str, architecture: str, stage: str, mode: str) -> Callable[[Bench], list[str]]:
    def prepare(bench: Bench) -> list[str]:
        model = {"family": family, "architecture": architecture, "base_path": str(bench.world.assets)}
        return ["train", *bench.config("new", model=model, train__stage=stage, train__causal_mode=mode)]

    return prepare


CASES: tuple[Case, ...] = (
    # the configuration alone
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
    # data
    Case("shard is missing", "data.root: …/data: member 'shards/train-000000.tar' is missing "
         "(No such file or directory); rebuild the data set or change data.root", 3, _missing_shard, early=True),
    Case("shard is truncated", "data.root: …/data: member 'shards/train-000000.tar' has … bytes, expected …; "
         "it is truncated or was changed, restore a copy; rebuild the data set or change data.root", 3,
         _truncated_shard, early=True),
    Case("shard that the data set does not have",
         "shards/other.tar: shard is missing under data.root …/data (sample 'tiny/train-…')", 3,
         _rows(lambda rows: [row.update(shard="shards/other.tar") for row in rows])),
    Case("shard ends before a member", "shards/train-000000.tar: shard ends at byte …, the index promises bytes up to … "
         "(sample 'tiny/train-000000'); the shard is truncated, copy or rebuild it", 3, _rows(_beyond_the_end)),
    Case("member size differs from the index", "shards/test-000000.tar member 'test-….camera.npz' of sample 'tiny/test-…': "
         "the shard holds 'test-….camera.npz' with … bytes at byte …, the index promises … bytes; "
         "index and shard do not belong together", 3, _rows(_wrong_size, "freeze-plan")),
    Case("the same, met while training (launch records stay)", "shards/train-000000.tar member 'train-….camera.npz' of "
         "sample 'tiny/train-…': the shard holds 'train-….camera.npz' with … bytes at byte …, the index promises … bytes; "
         "index and shard do not belong together", 3, _rows(_wrong_size), records=True),
    Case("damaged byte in a shard", "shards/test-000000.tar member 'test-….camera.npz' of sample 'tiny/test-…': "
         "sha256 is …, the index promises …; the shard is damaged, restore a copy", 3, _damaged_shard),
    Case("sample id twice", "…/train-index.jsonl row 1: field 'sample_id' repeats 'tiny/train-000000' of row 0; "
         "sample ids are unique, use epoch_repeats to weight a clip", 3,
         _rows(lambda rows: rows[1].update(sample_id=rows[0]["sample_id"]))),
    Case("shard path leaves the root", "…/train-index.jsonl line 1: field 'shard': found '../x', "
         "expected a relative path without '', '.' or '..' segments", 3,
         _rows(lambda rows: rows[0].update(shard="../x"))),
    Case("index is empty", "…/train-index.jsonl: index is empty, expected at least one row; set data.train_index or data.test_index, or "
         "rebuild the data set", 3,
         _rows(lambda rows: rows.clear())),
    Case("index is missing", "…/other.jsonl: index is missing; set data.root, data.train_index or data.test_index", 3,
         _train(data__train_index="other.jsonl")),
    Case("video shorter than the clip", "sample 'tiny/train-000000': video has 9 frames, the clip spans 13 source frames; "
         "lower data.pixel_frames or remove the row", 3, _train(data__pixel_frames=13)),
    Case("camera with NaN", "sample 'tiny/test-…': test-….camera.npz: array 'c2w': frame 3 holds NaN or infinite "
         "values, expected finite ones", 3, _camera(_nan, "freeze-plan")),
    Case("the same, met by `data inspect`", "sample 'tiny/train-000000': array 'c2w': frame 3 holds NaN or infinite "
         "values, expected finite ones", 3, _camera(_nan, "inspect")),
    Case("the same, met while training (launch records stay)", "sample 'tiny/train-…': train-….camera.npz: array 'c2w': "
         "frame 3 holds NaN or infinite values, expected finite ones", 3, _camera(_nan, "train"), records=True),
    Case("camera array of another shape", "sample 'tiny/test-…': test-….camera.npz: array 'c2w' has shape [9, 3, 4], "
         "expected [T, 4, 4] with T >= 1", 3, _camera(lambda c2w: c2w[:, :3], "freeze-plan")),
    Case("camera that is not a rotation", "sample 'tiny/test-…': test-….camera.npz: array 'c2w': frame … is not a "
         "rotation (R Rᵀ differs from identity by 1.25, allowed 0.001); scale or shear must not be stored in the matrix",
         3, _camera(_scaled, "freeze-plan")),
    Case("mirrored camera", "sample 'tiny/test-…': test-….camera.npz: array 'c2w': frame … is mirrored (determinant -1, "
         "expected +1); flip two axes together, never one (OpenGL to OpenCV negates y and z)", 3,
         _camera(_mirrored, "freeze-plan")),
    Case("no file can be packed", "nothing packed, refused 1 files: broken.mp4: not a readable video, or truncated "
         "(Invalid data found when processing input); read are mp4, mov, mkv, webm, avi, ts, flv and ogg", 3,
         _nothing_to_pack),
    # checkpoints
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
# Found by a full disk, which tests make themselves. Earlier checkpoints stay whole, the launch records stay.
LOW_DISK = Case("too little space for a checkpoint, before the first step",
                "…/run: a checkpoint needs … MiB and … MiB are free; free space or change runtime.output_dir", 4,
                lambda bench: [], records=True)  # fmt: skip
FULL_DISK = Case("too little space when a checkpoint is due", "disk full: …/run/checkpoint_model_… needs about … MiB and "
                 "… MiB are free; free space or change the output directory", 4, lambda bench: [], records=True)  # fmt: skip
FILLING_DISK = Case("disk fills up in the middle of a checkpoint", "disk full while writing …/run/checkpoint_model_…: "
                    "… (… MiB free); nothing was published and the unfinished files were removed; free space or change the "
                    "output directory, then run the same command again", 4, lambda bench: [], records=True)  # fmt: skip


def table() -> str:
    """The table of docs/reference/errors.md."""
    rows = [
        f"| {case.wrong} | `{case.message}` | {case.code} |"
        for case in (*CASES, LOW_DISK, FULL_DISK, FILLING_DISK)
    ]
    # A code span that holds a backtick needs a longer fence.
    rows = [re.sub(r"\| `(.*`.*)` \| (\d+) \|$", r"| `` \1 `` | \2 |", row) for row in rows]
    return "\n".join(["| what is wrong | message | exit code |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
