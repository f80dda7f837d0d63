"""Samples per second of the planned reader against webdataset on the same shards of small members, in one run.

    python tests/benchmarks/bench_loader.py [ROUNDS]

Both deliver every member of every sample of one shuffled epoch as bytes. Ours reads in the planned order, row by row with
its index entry, and compares every member's SHA-256 (in the first epoch, and where an index has more rows than are kept in
memory, it also parses the row); webdataset reads each shard from front to back into a shuffle buffer.
`to_last_sample` is what a resume costs: the first sample of ours at a saved position near the end of the epoch, and what
webdataset must read again to get there. Prints one JSON object; only the ratios are worth keeping.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import webdataset

from solarwm_lib.artifacts import Transaction
from solarwm_lib.data.index import Index
from solarwm_lib.data.sampling import Plan
from solarwm_lib.data.shards import ShardReader
from solarwm_lib.data.writer import SCHEMA, Clip, RawDatasetWriter
from solarwm_lib.runtime import keyed

SAMPLES, PER_SHARD, FRAMES, VIDEO_BYTES, WARM_UPS = 8192, 512, 5, 2048, 1


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="solarwm-bench-") as folder:
        root = Path(folder) / "data"
        write(root)
        shards = sorted(str(path) for path in (root / "shards").glob("train-*.tar"))
        opened = time.perf_counter()
        ours = Ours(root)
        opened = time.perf_counter() - opened
        epochs = {
            "ours": ours.epoch,
            "first_epoch": lambda: ours.forget().epoch(),
            "webdataset": lambda: sum(map(size, theirs(shards))),
        }
        total = epochs["ours"]()
        assert total == epochs["webdataset"](), "both must deliver the same bytes"
        seconds = interleaved(epochs, rounds)
        resume = interleaved(
            {
                "ours": lambda: ours.sample(SAMPLES - 1),
                "webdataset": lambda: skip(theirs(shards), SAMPLES - 1),
            },
            rounds,
        )
    report = {
        "samples": SAMPLES,
        "members_per_sample": 3,
        "bytes_per_epoch": total,
        "ours_samples_per_second": round(SAMPLES / seconds["ours"]),
        "webdataset_samples_per_second": round(SAMPLES / seconds["webdataset"]),
        "ours_over_webdataset": round(seconds["webdataset"] / seconds["ours"], 2),
        "first_epoch_over_webdataset": round(seconds["webdataset"] / seconds["first_epoch"], 2),
        "open_index_ms": round(1e3 * opened, 1),
        "ours_to_last_sample_ms": round(1e3 * resume["ours"], 3),
        "webdataset_to_last_sample_ms": round(1e3 * resume["webdataset"], 1),
    }
    print(json.dumps(report, indent=2))


class Ours:
    """One epoch in planned order through index, plan and shard reader."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.forget()

    def forget(self) -> "Ours":
        """Open everything anew, as a process that starts does."""
        self.index = Index.open(self.root / "train-index.jsonl")
        self.plan = Plan(self.index, seed=1, pixel_frames=FRAMES, fps=16.0, global_batch_size=16)
        self.reader = ShardReader(self.root)
        return self

    def sample(self, position: int) -> dict[str, bytes]:
        row = self.index[self.plan.occurrence_at(position).row_ordinal]
        return self.reader.read_many(row, list(row.members))

    def epoch(self) -> int:
        return sum(sum(map(len, self.sample(position).values())) for position in range(SAMPLES))


def theirs(shards: list[str]):
    return webdataset.WebDataset(shards, shardshuffle=len(shards), seed=1).shuffle(PER_SHARD)


def size(sample: dict) -> int:
    return sum(len(data) for name, data in sample.items() if not name.startswith("__"))


def skip(samples, count: int) -> dict:
    return next(sample for position, sample in enumerate(samples) if position == count)


def write(root: Path) -> None:
    """A raw data set of small clips: the video member is noise, which neither side decodes."""
    c2w = np.tile(np.eye(4, dtype=np.float32), (FRAMES, 1, 1))
    with Transaction(root, SCHEMA, {"name": "bench"}) as transaction:
        writer = RawDatasetWriter(transaction, PER_SHARD)
        for number in range(SAMPLES):
            video = keyed.generator("bench", number).bytes(VIDEO_BYTES)
            name = f"clip-{number:06d}"
            writer.add("train", Clip(name, name, video, c2w, 16.0, 32, 32, "a clip", "bench", "bench"))
        writer.finish()


def interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, measured in alternation so that a busy moment hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(WARM_UPS + rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if number >= WARM_UPS:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
