"""Reading from a real S3 server, also while it refuses, drops connections and cuts answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from s3_server import FaultyProxy, environment, faulty_proxy, s3_server
from tinyworld import TinyWorld

from solarwm_lib.config.sections import Transport
from solarwm_lib.data.index import read_index
from solarwm_lib.data.shards import ShardReader
from solarwm_lib.data.transport import RemoteFiles, open_shards, warm_cache
from solarwm_lib.runtime.errors import DataError
from solarwm_lib.training import checkpoint, train

ADDRESS = "s3://lab-clips/tiny world"
MODES = ("ranges", "cache")


@dataclass
class DataSection:
    root: str
    transport: Transport


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def proxy(server, monkeypatch):
    with faulty_proxy(server) as running:
        for name, value in environment(running.endpoint).items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture(scope="module")
def data_set(server, tiny_world):
    """The tiny world's data set, uploaded."""
    server.put_folder("lab-clips", ADDRESS.rpartition("/")[2], tiny_world.dataset)
    return tiny_world.dataset


def reader(mode: str, tmp_path, attempts: int = 4) -> ShardReader:
    cache = {"cache_dir": str(tmp_path / "cache"), "cache_max_gib": 0.1} if mode == "cache" else {}
    transport = Transport(root=ADDRESS, attempts=attempts, timeout_seconds=60.0, **cache)
    return open_shards(DataSection("/nowhere", transport))


def contents(shards: ShardReader, rows) -> list[dict[str, bytes]]:
    return [shards.read_many(row, row.members) for row in rows]


@pytest.mark.parametrize("mode", MODES)
def test_a_bucket_reads_like_the_folder(tmp_path, proxy, data_set, mode):
    rows = read_index(data_set / "train-index.jsonl")
    shards = reader(mode, tmp_path)
    shards.check(rows)
    assert contents(shards, rows) == contents(ShardReader(data_set), rows)
    fetched = len([1 for method, _, _ in proxy.requests if method == "GET"])
    assert fetched == (len(rows) if mode == "ranges" else len({row.shard for row in rows}))
    shards.close()


@pytest.mark.parametrize("mode", MODES)
def test_passing_failures_change_nothing_that_is_read(tmp_path, proxy: FaultyProxy, data_set, mode):
    rows = read_index(data_set / "train-index.jsonl")
    proxy.inject("503", method="HEAD")
    proxy.inject("503", "drop", "truncate", "short", "flip" if mode == "cache" else "503")
    shards = reader(mode, tmp_path, attempts=8)
    assert contents(shards, rows) == contents(ShardReader(data_set), rows)
    assert proxy.pending == 0
    shards.close()


def test_one_flipped_byte_in_transit_is_fetched_again(tmp_path, proxy: FaultyProxy, data_set):
    rows = read_index(data_set / "train-index.jsonl")[:1]
    proxy.inject("corrupt")
    shards = reader("cache", tmp_path)
    assert contents(shards, rows) == contents(ShardReader(data_set), rows)
    assert proxy.pending == 0
    shards.close()


def test_a_shard_that_is_not_the_indexed_one_stops_with_its_name(tmp_path, proxy: FaultyProxy, data_set):
    row = read_index(data_set / "train-index.jsonl")[0]
    assert row.shard_digest is not None
    wrong = row.model_copy(update={"shard_digest": "0" * 64})
    with pytest.raises(DataError, match=rf"^{row.shard}: sha256 is .*fetched twice from {ADDRESS}") as caught:
        reader("cache", tmp_path).read_many(wrong, row.members)
    assert caught.value.exit_code == 3
    proxy.inject("corrupt", "corrupt")
    with pytest.raises(DataError, match=rf"^{row.shard}: sha256 is"):
        reader("cache", tmp_path).read_many(row, row.members)


@pytest.mark.parametrize("mode", MODES)
def test_refused_access_and_missing_shards_are_said_at_once(tmp_path, proxy: FaultyProxy, data_set, mode):
    row = read_index(data_set / "train-index.jsonl")[0]
    proxy.inject("403")
    with pytest.raises(DataError, match=rf"{ADDRESS}/{row.shard}: access is refused .*HTTP 403.*credentials"):
        reader(mode, tmp_path).read_many(row, row.members)
    absent = row.model_copy(update={"shard": "shards/none.tar"})
    with pytest.raises(DataError, match=rf"{ADDRESS}/shards/none.tar: not found; check data.transport"):
        reader(mode, tmp_path).read_many(absent, row.members)
    with pytest.raises(DataError, match=r"none.tar: not found"):
        reader(mode, tmp_path).check([row, absent])


def test_a_forked_child_reads_from_the_bucket_too(tmp_path, proxy, data_set):
    rows = read_index(data_set / "train-index.jsonl")
    shards = reader("ranges", tmp_path)
    expected = contents(shards, rows[:1])
    child = os.fork()
    if child == 0:
        os._exit(0 if contents(shards, rows[:1]) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert contents(shards, rows[:1]) == expected


def test_a_warmed_cache_needs_no_bucket(tmp_path, proxy: FaultyProxy, data_set):
    rows = read_index(data_set / "train-index.jsonl")
    done = warm_cache(data_set / "train-index.jsonl", ADDRESS, tmp_path / "cache", 0.1, workers=2)
    assert done["shards"] == len({row.shard for row in rows})
    proxy.reset()
    shards = reader("cache", tmp_path)
    shards.check(rows)
    assert contents(shards, rows) == contents(ShardReader(data_set), rows)
    assert proxy.requests == []


def test_only_wanted_bytes_travel_in_range_mode(tmp_path, proxy: FaultyProxy, data_set):
    row = read_index(data_set / "train-index.jsonl")[0]
    reader("ranges", tmp_path).read(row, row.camera_member)
    member = row.members[row.camera_member]
    spans = [span for method, _, span in proxy.requests if method == "GET"]
    assert spans == [f"bytes={member.offset}-{member.offset + member.bytes - 1}"]
    assert RemoteFiles(ADDRESS).size(row.shard) == row.shard_size


# training

STEPS = 4


@pytest.fixture(scope="module")
def trained_locally(tiny_world, tmp_path_factory):
    """Weights of a run over the local folder."""
    return weights(tiny_world, tmp_path_factory.mktemp("local") / "run")


def weights(world: TinyWorld, out: Path, **changes: Any) -> dict[str, str]:
    """Train a few steps; return the digests of weights, average and optimizer state."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out.mkdir(parents=True)
    artifact = train.run(world.resolve(out, **changes), run_dir=out, until_step=STEPS)
    torch.set_num_threads(threads)
    names = (checkpoint.MODEL, checkpoint.EMA, checkpoint.OPTIMIZER)
    return {member.path: member.sha256 for member in artifact.members if member.path in names}


@pytest.fixture
def from_bucket(tmp_path, data_set):
    """Settings of a run that has the index here and the shards in the bucket."""
    index_only = shutil.copytree(data_set, tmp_path / "data", ignore=shutil.ignore_patterns("*.tar"))
    return {
        "data__root": str(index_only),
        "data__transport": {
            "root": ADDRESS,
            "cache_dir": str(tmp_path / "cache"),
            "cache_max_gib": 0.1,
            "timeout_seconds": 60.0,
        },
    }


def test_training_from_a_bucket_gives_the_weights_of_training_from_the_folder(
    tmp_path, proxy: FaultyProxy, tiny_world, from_bucket, trained_locally
):
    assert weights(tiny_world, tmp_path / "cached", **from_bucket) == trained_locally
    read = [path for method, path, _ in proxy.requests if method == "GET"]
    assert len(read) == len(set(read)) == 2  # each training shard travelled once
    from_bucket["data__transport"]["cache_dir"] = ""
    assert weights(tiny_world, tmp_path / "ranges", **from_bucket) == trained_locally


def test_training_survives_a_bucket_that_fails_for_a_while(
    tmp_path, proxy: FaultyProxy, tiny_world, from_bucket, trained_locally
):
    proxy.inject("503", "503", method="HEAD")
    proxy.inject("503", "503", "503", "drop", "truncate", "short", "corrupt")
    assert weights(tiny_world, tmp_path / "run", **from_bucket) == trained_locally
    assert proxy.pending == 0


def test_training_stops_at_a_shard_of_another_digest(
    tmp_path, proxy: FaultyProxy, server, tiny_world, from_bucket
):
    shard = "shards/train-000001.tar"
    data = bytearray((tiny_world.dataset / shard).read_bytes())
    data[len(data) // 2] ^= 1
    server.put_folder("lab-clips", "damaged", tiny_world.dataset)
    server.put("lab-clips", f"damaged/{shard}", bytes(data))
    from_bucket["data__transport"]["root"] = "s3://lab-clips/damaged"
    config = tmp_path / "run.json"
    config.write_text(json.dumps(tiny_world.values(tmp_path / "run", **from_bucket)))
    done = subprocess.run(
        [sys.executable, "-m", "solarwm_lib", "train", "--config", str(config)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"solarwm: error: {shard}: sha256 is") and "shard_digest" in last
    assert not list((tmp_path / "run").glob("checkpoint_model_*"))
