"""The table of bad input: buckets, caches, `data plan` and `data inspect`; see `bad_input.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_bench import CACHE, SHARD, Bench, Case, Prepare, entries, same, tar

NOWHERE = (
    ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
    ("AWS_ACCESS_KEY_ID", "x"),
    ("AWS_SECRET_ACCESS_KEY", "x"),
    ("AWS_DEFAULT_REGION", "us-east-1"),
    ("AWS_EC2_METADATA_DISABLED", "true"),
)


def _bucket(files: dict[str, bytes]) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    if memory.exists("/bad"):
        memory.rm("/bad", recursive=True)
    for name, content in files.items():
        memory.pipe_file(f"/bad/{name}", content)


def remote(change: Callable[[bytes], bytes], command: str = "warm-cache", **transport: Any) -> Prepare:
    """A data set whose shards lie in a bucket; `change` spoils the training shard there."""

    def prepare(bench: Bench) -> list[str]:
        dataset = bench.dataset()
        _bucket({SHARD: change((dataset / SHARD).read_bytes())})
        if command == "warm-cache":
            return warm(bench, dataset / "train-index.jsonl", "--max-gib", "1")
        settings = {f"data__transport__{key}": value for key, value in transport.items()}
        if "cache_dir" in transport:
            settings["data__transport__cache_dir"] = str(bench.path / "cache")
        return [
            "train",
            *bench.on(dataset, data__transport__root="memory://bad", data__transport__attempts=1, **settings),
        ]

    return prepare


def warm(bench: Bench, index: Path | None, *words: str, root: str = "memory://bad") -> list[str]:
    """`solarwm data warm-cache`."""
    place = str(index or bench.world.dataset / "train-index.jsonl")
    return ["data", "warm-cache", place, "--root", root, "--cache-dir", str(bench.path / "cache"), *words]


def _spoiled(shard: bytes) -> bytes:
    """Every member with another first byte."""
    return tar((info, bytes([data[0] ^ 1]) + data[1:]) for info, data in entries(shard))


def _full_cache(bench: Bench) -> list[str]:
    shards = {
        name: (bench.world.dataset / name).read_bytes() for name in (SHARD, SHARD.replace("000000", "000001"))
    }
    _bucket(shards)
    return warm(bench, None, "--max-gib", "0.00004")


def _warm(*words: str, root: str = "memory://bad") -> Prepare:
    return lambda bench: warm(bench, None, *words, root=root)


def plan(*words: str, frames: str = "5") -> Prepare:
    """`solarwm data plan` of the tiny index."""
    return lambda bench: [
        "data", "plan", str(bench.world.dataset / "train-index.jsonl"), "--pixel-frames", frames, *words]  # fmt: skip


def _transport(**transport: Any) -> Prepare:
    settings = {f"data__transport__{key}": value for key, value in transport.items()}
    return lambda bench: ["train", *bench.config("new", **settings)]


CASES: tuple[Case, ...] = (
    # buckets
    Case("bucket address of an unknown kind", "…/new.json: data.transport.root: found 'ftp://clips/set', expected a "
         "folder or an address that starts with s3://, gs://, memory://", 2, _transport(root="ftp://clips/set"), early=True),
    Case("cache without a bucket", "…/new.json: data.transport.cache_dir: set, but neither data.transport.root nor "
         "data.transport.latents_root is a bucket; folders are read where they are, remove it", 2, _transport(cache_dir="/absent"), early=True),
    Case("bucket package is not installed", "data.transport: s3://clips/set needs a package that is not here (Install "
         "s3fs to access S3); pip install 'solarwm-graph[s3]'", 2, _transport(root="s3://clips/set"), early=True, absent="s3fs"),
    Case("bucket cannot be reached", "s3://clips/set/shards/train-000000.tar: size not read in 1 tries, last: "
         "EndpointConnectionError: Could not connect to the endpoint URL: …; check the network or raise "
         "data.transport.attempts", 3, _transport(root="s3://clips/set", attempts=1), environment=NOWHERE),
    Case("shard is not in the bucket", "memory://bad/absent/shards/train-000000.tar: not found; check "
         "data.transport, or upload what the index names", 3, _transport(root="memory://bad/absent")),
    Case("shard in the bucket is cut", "shards/train-000000.tar: shard has … bytes, the index promises shard_size "
         "…; it is truncated or of another build, copy or rebuild it", 3, remote(lambda data: data[:-512], "train")),
    Case("shard in the bucket is damaged (launch records stay)", "shards/train-000000.tar member "
         "'train-….camera.npz' of sample 'tiny/train-…': sha256 is …, the index promises …; the shard is "
         "damaged, restore a copy", 3, remote(_spoiled, "train"), records=True),
    Case("staged shard is damaged", "shards/train-000000.tar: sha256 is …, the index promises shard_digest … "
         "(fetched twice from memory://bad/shards/train-000000.tar); the bucket holds a damaged shard or "
         "another build, upload it again or use the index that belongs to it", 3, remote(_spoiled), leaves=CACHE),
    Case("cache smaller than a shard", "shards/train-000000.tar: has … bytes, more than the whole cache of … bytes; "
         "set data.transport.cache_max_gib to 4.77e-05 or more", 2, remote(same, "train", cache_dir="cache", cache_max_gib=1e-6), leaves=CACHE),
    Case("cache smaller than the shards", "data.transport.cache_max_gib: 2 shards with … bytes do not fit in a "
         "cache of … bytes; set at least 5.53e-05", 2, _full_cache, leaves=CACHE),
    Case("cache of no size", "--max-gib: found nan, expected a positive number", 2, _warm("--max-gib", "nan"), early=True),
    Case("no transfers at once", "--workers: found 0, expected a positive number", 2, _warm("--max-gib", "1", "--workers", "0"), early=True),
    Case("cache of a folder", "'/data/clips' is not a bucket's address, expected such as s3://BUCKET/FOLDER or "
         "gs://BUCKET/FOLDER; folders of this machine need no cache, name them in data.transport.root", 2, _warm("--max-gib", "1", root="/data/clips"), early=True),
    Case("cache of a web server", "data.transport: found scheme 'http', expected s3, gs or memory", 2, _warm("--max-gib", "1", root="http://example.org/clips"), early=True),
    Case("address without a bucket", "data.transport: 's3://' names no bucket, expected such as s3://BUCKET/FOLDER", 2, _warm("--max-gib", "1", root="s3://"), early=True),
    Case("cache is a file", "data.transport.cache_dir: …/latents/index/stats.json is not usable (File exists); name "
         "a folder on a local disk that this user may write", 2, lambda bench: [*warm(bench, None, "--max-gib", "1")[:-3], str(bench.latents / "index/stats.json"), "--max-gib", "1"]),
    # `data plan` and `data inspect`
    Case("plan without frames", "data.pixel_frames is 0, expected a positive number", 2, plan(frames="0")),
    Case("plan of clips longer than any video", "sample 'tiny/train-000000': video has 9 frames, the clip spans "
         "4000000000 source frames; lower data.pixel_frames or remove the row", 3, plan(frames=str(4 * 10**9))),
    Case("plan at no frame rate", "data.fps is 0.0, expected a positive number", 2, plan("--fps", "0")),
    Case("plan of a seed that no run has", "data.seed is -1, expected 0 to 9223372036854775807", 2, plan("--seed", "-1")),
    Case("plan of a negative step", "step is -1, expected at least 0", 2, plan("--step", "-1")),
    Case("plan of no steps", "steps is 0, expected at least 1", 2, plan("--steps", "0")),
    Case("plan of step and epoch", "step is 3 and epoch is 1, expected one of them; an epoch gives its first step", 2, plan("--step", "3", "--epoch", "1")),
    Case("plan of a rank outside the world", "rank 2 (local 2) is outside the world of 2 (local 2)", 2, plan("--world-size", "2", "--rank", "2")),
    Case("plan of an uneven batch", "train.global_batch_size is 3, expected a multiple of the 2 data-parallel "
         "ranks, such as 2 or 4", 2, plan("--world-size", "2", "--global-batch-size", "3")),
    Case("plan of fewer clips than readers", "…/train-index.jsonl: 6 occurrence(s) per epoch for 8 data-parallel "
         "ranks, expected at least one each; add clips, raise epoch_repeats, or lower distributed.world_size "
         "so that at most 6 rank(s) read", 3, plan("--world-size", "8")),
    Case("plan of an index without frames", "data plan: --pixel-frames is needed with an index", 2, lambda bench: ["data", "plan", str(bench.world.dataset / "train-index.jsonl")]),
    Case("plan of both index and configuration", "data plan: give either an index or --config", 2, lambda bench: [*plan()(bench), *bench.config("new")]),
    Case("plan of neither", "data plan: give either an index or --config", 2, lambda bench: ["data", "plan"]),
    Case("plan of latents with random starts", "sample 'tiny/train-000000/latent-9f-w00': its latents have a fixed "
         "start, found random starts; set data.random_start=false", 3, lambda bench: [
        "data", "plan", str(bench.latents / "index/train-index.jsonl"), "--pixel-frames", "9"]),
    Case("plan of latents of another length", "sample 'tiny/train-000000/latent-9f-w00': its latents show 9 frames, "
         "data.pixel_frames is 5; set it to theirs or encode the clips again", 3, lambda bench: [
        "data", "plan", str(bench.latents / "index/train-index.jsonl"), "--pixel-frames", "5", "--fixed-start"]),
    Case("inspection below what is no folder", "--root: s3:/clips is not a folder of this machine; shards are "
         "looked for below it", 2, lambda bench: [
        "data", "inspect", str(bench.world.dataset / "train-index.jsonl"), "--root", "s3://clips"]),
)  # fmt: skip
