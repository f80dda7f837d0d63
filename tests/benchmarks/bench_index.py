"""An index of two million rows: seconds and memory of `inspect`, of opening, of a random row and of a plan entry.

    python tests/benchmarks/bench_index.py [ROWS] [--gz]

Rows are as `solarwm data pack` writes them, about 960 bytes each. Every figure comes from a process of its own; CPU
seconds include the processes that share the reading. Prints one JSON object.
"""

import hashlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS, READS = 2_000_000, 500


def line(number: int) -> str:
    key = f"clip_{number:08d}"
    shard = number // 500
    digest = hashlib.sha256(b"%d" % number).hexdigest()
    sidecar = digest[32:] + digest[:32]
    members = "".join(
        f'"{key}.{suffix}":{{"bytes":{size},"offset":{offset},"sha256":"{sha256}"}}{comma}'
        for suffix, size, offset, sha256, comma in (
            ("camera.npz", 11_000, 512, digest, ","),
            ("manifest.json", 600, 12_288, sidecar, ","),
            ("video.mp4", 4_000_000 + number % 1000, 13_824, digest, ""),
        )
    )
    return (
        f'{{"camera_member":"{key}.camera.npz","caption":"{number} slow walks through a bright room with large shapes on '
        f'its walls, the camera turns left","dataset":"set-{number % 7}","epoch_repeats":{1 + number % 3},"fps":16.0,'
        f'"height":480,"key":"{key}","manifest_member":"{key}.manifest.json","members":{{{members}}},"num_frames":'
        f'{161 + number % 200},"sample_id":"source/{key}","shard":"shards/train-{shard:06d}.tar","shard_digest":'
        f'"{hashlib.sha256(b"s%d" % shard).hexdigest()}","shard_size":{2 * 2**30 + 512 * shard},"split":"train",'
        f'"video_member":"{key}.video.mp4","width":832}}\n'
    )


def write(path: Path, rows: int) -> None:
    import gzip

    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as stream:
        for start in range(0, rows, 10_000):
            stream.write("".join(map(line, range(start, min(rows, start + 10_000)))))


def main(rows: int, suffix: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"train-index.jsonl{suffix}"
        write(path, rows)
        report: dict = {"rows": rows, "file": path.name, "bytes": path.stat().st_size}
        for task in ("inspect", "open"):
            done = subprocess.run(
                [sys.executable, __file__, task, str(path)], stdout=subprocess.PIPE, text=True, check=True
            )
            report[task] = json.loads(done.stdout)
        return report


def inspect(path: str) -> dict:
    from solarwm_lib.data.inspect import inspect

    return {"rows": inspect(path)["rows"]}


def open_index(path: str) -> dict:
    from solarwm_lib.data.index import Index
    from solarwm_lib.data.sampling import Plan

    started = time.perf_counter()
    index = Index.open(path)
    opened = time.perf_counter()
    plan = Plan(index, seed=0, pixel_frames=81, fps=16.0, global_batch_size=64)
    planned = time.perf_counter()
    draw = random.Random(0)
    rows = [timed(lambda: index[draw.randrange(len(index))]) for _ in range(READS)]
    entries = [timed(lambda: plan.occurrence_at(draw.randrange(20 * plan.occurrences))) for _ in range(READS)]
    return {
        "open_seconds": round(opened - started, 2),
        "plan_seconds": round(planned - opened, 2),
        "random_row_ms": round(1e3 * statistics.median(rows), 4),
        "plan_entry_ms": round(1e3 * statistics.median(entries), 4),
    }


def timed(action) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measured(task, path: str) -> dict:
    """Add wall and CPU seconds and peak memory of this process and its children to what the task reports."""
    started = time.perf_counter()
    report = task(path)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    workers = min(4, len(os.sched_getaffinity(0)))
    return report | {
        "wall_seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(sum(each.ru_utime + each.ru_stime for each in usage), 2),
        # Every forked reader counts whole, though it shares most of its pages.
        "peak_mib": round((usage[0].ru_maxrss + workers * usage[1].ru_maxrss) / 1024),
    }


if __name__ == "__main__":
    words = sys.argv[1:]
    if words and words[0] in ("inspect", "open"):
        print(json.dumps(measured({"inspect": inspect, "open": open_index}[words[0]], words[1])))
    else:
        numbers = [int(word) for word in words if word.isdigit()]
        print(json.dumps(main(numbers[0] if numbers else ROWS, ".gz" if "--gz" in words else ""), indent=2))
