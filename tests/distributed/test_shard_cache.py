"""Processes that share one shard cache, smaller than the data set, before a real S3 server."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from s3_server import FaultyProxy, S3Server, environment, faulty_proxy, s3_server

from solarwm_lib.data.index import RawRow, write_index
from solarwm_lib.data.shard_cache import SIDE_BYTES
from solarwm_lib.data.shards import ShardWriter

ROOT = Path(__file__).parents[2]
SHARDS, CLIPS, CLIP_BYTES = 6, 4, 50_000
READER = """
import random, sys
from solarwm_lib.data.index import read_index
from solarwm_lib.data.shard_cache import ShardCache
from solarwm_lib.data.shards import ShardReader
from solarwm_lib.data.transport import RemoteFiles

index, cache, limit, seed, reads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
rows = read_index(index)
remote = RemoteFiles("s3://clips/set", attempts=4, timeout_seconds=90, block_bytes=60_000)
reader = ShardReader(None, cache=ShardCache(remote, cache, limit))
draw = random.Random(seed)
print("reading", flush=True)
for _ in range(reads):
    row = rows[draw.randrange(len(rows))]
    for name, data in reader.read_many(row, row.members).items():
        assert data == name.encode() * (len(data) // len(name)), name  # and its SHA-256 was compared
reader.close()
print("done")
"""


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def proxy(server):
    with faulty_proxy(server) as running:
        yield running


@pytest.fixture(scope="module")
def data_set(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """(index, bytes of a shard) of an uploaded data set."""
    folder = tmp_path_factory.mktemp("set")
    (folder / "set").mkdir()
    rows = []
    for shard in range(SHARDS):
        with (folder / f"set/{shard}.tar").open("wb") as file:
            writer = ShardWriter(file)
            names = [f"s{shard}c{clip}.bin" for clip in range(CLIPS)]
            members = {name: writer.add(name, name.encode() * (CLIP_BYTES // len(name))) for name in names}
            size, digest = writer.finish()
        for name, member in members.items():
            fields = {"sample_id": name, "key": name[:-4], "shard": f"{shard}.tar", "shard_size": size}
            fields |= {"shard_digest": digest, "members": {name: member.model_dump()}}
            fields |= {"video_member": name, "camera_member": name, "manifest_member": name}
            rows.append(RawRow.model_validate(fields))
    server.put_folder("clips", "", folder)
    index = folder / "index.jsonl"
    write_index(index, rows)
    return index, size


def start(index: Path, cache: Path, limit: int, seed: int, reads: int, endpoint: str) -> subprocess.Popen:
    words = [str(index), str(cache), str(limit), str(seed), str(reads)]
    return subprocess.Popen(
        [sys.executable, "-c", READER, *words],
        cwd=ROOT,
        env=os.environ | environment(endpoint),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def bytes_in(folder: Path) -> int:
    total = 0
    for entry in os.scandir(folder) if folder.exists() else ():
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total


def finish(process: subprocess.Popen) -> str:
    text, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and text.endswith("done\n"), errors
    return errors


def test_two_readers_share_a_cache_that_holds_a_third_of_the_data(tmp_path, server, data_set):
    index, size = data_set
    limit = 2 * (size + SIDE_BYTES) + 100
    readers = [start(index, tmp_path / "cache", limit, seed, 60, server.endpoint) for seed in range(2)]
    largest = 0
    while any(reader.poll() is None for reader in readers):
        largest = max(largest, bytes_in(tmp_path / "cache"))
        time.sleep(0.002)
    for reader in readers:
        finish(reader)
    assert size < largest <= limit
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_reader_killed_during_a_transfer_leaves_nothing_that_another_trips_over(
    tmp_path, proxy: FaultyProxy, data_set
):
    index, size = data_set
    cache, limit = tmp_path / "cache", size + SIDE_BYTES + 100
    first = random.Random(3).randrange(SHARDS * CLIPS) // CLIPS
    proxy.inject("stall", path=f"{first}.tar")
    killed = start(index, cache, limit, 3, 40, proxy.endpoint)
    assert proxy.stalled.wait(60)
    (part,) = cache.glob("*.part")
    assert part.stat().st_size == size  # its room is reserved in full
    waiting = start(index, cache, limit, 3, 1, proxy.endpoint)
    assert waiting.stdout.readline() == "reading\n"
    time.sleep(0.3)
    assert waiting.poll() is None  # one transfer of a shard at a time
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    finish(waiting)
    finish(start(index, cache, limit, 4, 20, proxy.endpoint))
    assert not list(cache.glob("*.part")) and bytes_in(cache) <= limit


def test_a_failed_transfer_is_told_to_the_process_that_waited(tmp_path, proxy: FaultyProxy, data_set):
    index, size = data_set
    first = random.Random(5).randrange(SHARDS * CLIPS) // CLIPS
    proxy.inject("stall", *["503"] * 3, path=f"{first}.tar")
    arguments = (index, tmp_path / "cache", 10 * size, 5, 1, proxy.endpoint)
    readers = [start(*arguments)]
    assert proxy.stalled.wait(60)
    readers.append(start(*arguments))
    assert readers[1].stdout.readline() == "reading\n"
    time.sleep(0.5)
    proxy.release()
    errors = [reader.communicate(timeout=120)[1].splitlines()[-1] for reader in readers]
    assert errors[0] == errors[1] and f"s3://clips/set/{first}.tar" in errors[0]
    assert "not read in 4 tries, last: HTTP 503" in errors[0]
    gets = [path for method, path, _ in proxy.requests if method == "GET"]
    assert len(gets) == 4 and proxy.pending == 0
    finish(start(*arguments))
