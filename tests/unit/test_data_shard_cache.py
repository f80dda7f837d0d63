"""The shard cache: bounded, verified, shared; whatever is found in its folder, a reader gets the right bytes or an error."""

import base64
import contextlib
import fcntl
import hashlib
import io
import json
import os
import threading
import time

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solarwm_lib.data.index import RawRow
from solarwm_lib.data.shard_cache import SIDE_BYTES, ShardCache, Wanted
from solarwm_lib.data.shards import ShardReader, ShardWriter
from solarwm_lib.data.transport import RemoteFiles
from solarwm_lib.runtime.errors import ConfigError, DataError

ROOT = "memory://cached"


@pytest.fixture(autouse=True)
def empty_memory():
    fsspec.filesystem("memory").store.clear()


def put(name, data):
    """Upload a shard and return what an index would promise about it."""
    fsspec.filesystem("memory").pipe_file(f"{ROOT}/{name}", data)
    md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
    return Wanted(name, len(data), hashlib.sha256(data).hexdigest(), md5)


def remove(wanted):
    fsspec.filesystem("memory").rm_file(f"{ROOT}/{wanted.shard}")


def cache_of(folder, shards=4, size=1000, timeout=20.0, block_bytes=300):
    """A cache with room for that many shards of `size` bytes."""
    remote = RemoteFiles(ROOT, attempts=1, timeout_seconds=timeout, block_bytes=block_bytes)
    return ShardCache(remote, folder, shards * (size + SIDE_BYTES))


def content(cache, wanted):
    shard = cache.acquire(wanted)
    try:
        return shard.pread(0, shard.size)
    finally:
        shard.release()
        shard.close()


def staged(folder):
    return {path.name[25:].removesuffix(".data") for path in folder.glob("*.data")}


def only(folder, suffix):
    (path,) = folder.glob(f"*.{suffix}")
    return path


def total(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_released_latent_rows_promise_a_blake2s_digest_and_say_so(tmp_path):
    put("r.tar", data := os.urandom(1000))
    digest = hashlib.blake2s(data).hexdigest()
    assert Wanted.promised("r.tar", None, 1000, None, digest).sha256 == digest
    released = Wanted.promised("r.tar", f"local-digest:{digest}", 1000, None, digest)
    cache = cache_of(tmp_path)
    content(cache, "r.tar")  # staged by name, as a prefetch does
    remove(released)
    assert content(cache, released) == data
    other = hashlib.blake2s(b"other").hexdigest()
    wrong = Wanted.promised("r.tar", f"local-digest:{other}", 1000, None, other)
    put("r.tar", data)
    with pytest.raises(
        DataError, match=rf"r.tar: blake2s is {digest}, the index promises shard_digest {other}"
    ):
        content(cache, wrong)


def test_a_shard_is_fetched_once_and_then_read_without_the_bucket(tmp_path):
    wanted = put("a/p.tar", os.urandom(1000))
    expected = content(cache_of(tmp_path), wanted)
    remove(wanted)
    again = cache_of(tmp_path)
    assert content(again, wanted) == expected and len(expected) == 1000
    assert content(again, "a/p.tar") == expected and again.size(wanted) == 1000
    receipt = json.loads(only(tmp_path, "receipt.json").read_bytes())
    assert receipt["sha256"] == wanted.sha256 and receipt["md5_b64"] == wanted.md5_b64
    assert receipt["url"] == f"{ROOT}/a/p.tar"
    assert not list(tmp_path.glob("*.part"))


def test_shards_of_the_same_name_in_two_folders_are_two_shards(tmp_path):
    first, second = put("a/p.tar", b"1" * 100), put("b/p.tar", b"2" * 100)
    cache = cache_of(tmp_path)
    assert content(cache, first) == b"1" * 100 and content(cache, second) == b"2" * 100


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"sha256": "0" * 64},
            r"^p.tar: sha256 is \w+, the index promises shard_digest 000.*fetched twice from",
        ),
        (
            {"sha256": None, "md5_b64": "A" * 22 + "=="},
            r"^p.tar: md5_b64 is .*the index promises shard_md5_b64 AAA",
        ),
        ({"size": 999}, r"^p.tar: memory://cached/p.tar has 1000 bytes, the index promises shard_size 999"),
    ],
)
def test_bytes_other_than_promised_are_an_error_and_leave_nothing(tmp_path, changes, text):
    wanted = put("p.tar", os.urandom(1000))
    wrong = Wanted(**(vars(wanted) | changes))
    with pytest.raises(DataError, match=text) as caught:
        cache_of(tmp_path).acquire(wrong)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.data")) and not list(tmp_path.glob("*.part"))
    assert content(cache_of(tmp_path), wanted)
    assert not list(tmp_path.glob("*.failed.json"))


def test_a_missing_shard_is_named(tmp_path):
    cache = cache_of(tmp_path)
    with pytest.raises(DataError, match=r"^memory://cached/none.tar: not found"):
        cache.acquire("none.tar")
    with pytest.raises(DataError, match=r"none.tar: not found"):
        cache.size("none.tar")
    wanted = put("none.tar", b"there now")
    assert content(cache_of(tmp_path), wanted) == b"there now"


def test_a_shard_larger_than_the_cache_is_refused_at_once(tmp_path):
    wanted = put("p.tar", b"x" * 9000)
    cache = cache_of(tmp_path, shards=1)
    for action in (cache.acquire, cache.size):
        with pytest.raises(
            ConfigError, match=r"more than the whole cache of .*set data.transport.cache_max_gib"
        ):
            action(wanted)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"data.transport.cache_dir: .*is not usable"):
        cache_of(tmp_path / "file")


def damage(how, folder):
    data, receipt = only(folder, "data"), only(folder, "receipt.json")
    facts = data.stat()
    if how == "cut":
        os.truncate(data, 10)
    elif how == "changed":
        with data.open("r+b") as file:
            file.write(b"!")
        os.utime(data, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # same name, size and time
    elif how == "replaced":
        data.unlink()
        data.write_bytes(b"?" * 1000)
    elif how == "gone":
        data.unlink()
    elif how == "no receipt":
        receipt.unlink()
    else:
        receipt.write_text(how)


@pytest.mark.parametrize(
    "how", ["cut", "changed", "replaced", "gone", "no receipt", "", "{", "[]", '{"schema": "x"}']
)
def test_a_staged_shard_that_is_not_what_was_verified_is_fetched_again(tmp_path, how):
    wanted = put("p.tar", bytes(1000))
    cache = cache_of(tmp_path)
    open_before = cache.acquire(wanted)
    open_before.release()
    damage(how, tmp_path)
    assert content(cache, wanted) == bytes(1000)
    assert content(cache_of(tmp_path), wanted) == bytes(1000)
    assert not open_before.lease()


def test_another_build_in_the_index_replaces_the_staged_one(tmp_path):
    cache = cache_of(tmp_path)
    assert content(cache, put("p.tar", b"old" * 100)) == b"old" * 100
    assert content(cache, put("p.tar", b"new" * 100)) == b"new" * 100
    assert content(cache, "p.tar") == b"new" * 100


def test_the_least_recently_used_shard_makes_room(tmp_path):
    names = [f"{number}.tar" for number in range(6)]
    wanted = [put(name, os.urandom(1000)) for name in names]
    cache = cache_of(tmp_path, shards=3)
    for shard in wanted[:3]:
        content(cache, shard)
    content(cache, wanted[0])
    content(cache, wanted[3])
    assert staged(tmp_path) == {"0.tar", "2.tar", "3.tar"}
    for path in tmp_path.glob("*.data"):
        os.utime(path)  # access and modification times of the data do not count
    assert staged(tmp_path) == {"0.tar", "2.tar", "3.tar"}
    content(cache, wanted[4])
    assert total(tmp_path) <= 3 * (1000 + SIDE_BYTES)


def test_a_shard_in_use_stays_and_the_wait_for_room_ends(tmp_path):
    wanted = [put(f"{number}.tar", os.urandom(1000)) for number in range(3)]
    cache = cache_of(tmp_path, shards=2, timeout=0.4)
    used = [cache.acquire(shard) for shard in wanted[:2]]
    with pytest.raises(
        DataError, match=r"^2.tar: no room for 1000 bytes .* within 0.4 s, \d+ of \d+ bytes are being"
    ):
        cache.acquire(wanted[2])
    threading.Timer(0.1, used[0].release).start()
    assert content(cache, wanted[2])
    assert staged(tmp_path) == {"1.tar", "2.tar"}
    assert not used[0].lease() and used[1].lease()


def test_an_idle_reader_takes_no_room_and_stages_again_when_it_reads(tmp_path):
    rows = []
    for number in range(3):
        stream = io.BytesIO()
        writer = ShardWriter(stream)
        member = writer.add("a.bin", bytes([number]) * 700)
        size, digest = writer.finish()
        put(f"{number}.tar", stream.getvalue())
        row = {
            "sample_id": "a",
            "key": "a",
            "shard": f"{number}.tar",
            "shard_size": size,
            "shard_digest": digest,
        }
        names = {"video_member": "a.bin", "camera_member": "a.bin", "manifest_member": "a.bin"}
        rows.append(RawRow.model_validate(row | names | {"members": {"a.bin": member.model_dump()}}))
    reader = ShardReader(None, cache=cache_of(tmp_path, shards=1, size=rows[0].shard_size))
    for number in [0, 1, 2, 0, 0, 1, 2]:
        assert reader.read(rows[number], "a.bin") == bytes([number]) * 700
        assert staged(tmp_path) == {f"{number}.tar"}
        evicted = [shard for name, shard in reader._open.items() if name != f"{number}.tar"]
        assert all(os.fstat(shard._descriptor).st_size == 0 for shard in evicted)
    reader.close()


def test_a_dead_process_s_part_is_swept_and_a_living_one_s_counts(tmp_path):
    dead, living = put("dead.tar", bytes(1000)), put("living.tar", bytes(1000))
    cache = cache_of(tmp_path, shards=2, timeout=0.3)
    for shard in (dead, living):
        stem = cache._stem(shard)
        (tmp_path / f"{stem}.lock").touch()
        (tmp_path / f"{stem}.part").write_bytes(bytes(1000))
    with open(tmp_path / f"{cache._stem(living)}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = cache.acquire(put("1.tar", bytes(1000)))
        assert {path.name[25:] for path in tmp_path.glob("*.part")} == {"living.tar.part"}
        with pytest.raises(DataError, match=r"^2.tar: no room"):
            cache.acquire(put("2.tar", bytes(1000)))
        with pytest.raises(DataError, match=r"^living.tar: another process did not finish staging it"):
            cache.acquire(living)
    first.release()
    assert content(cache, living) == bytes(1000)


def test_a_dead_process_s_part_of_the_wanted_shard_is_no_hindrance(tmp_path):
    wanted = put("p.tar", os.urandom(1000))
    cache = cache_of(tmp_path, shards=1, timeout=5)
    (tmp_path / f"{cache._stem(wanted)}.part").write_bytes(bytes(1000))
    assert hashlib.sha256(content(cache, wanted)).hexdigest() == wanted.sha256


def test_files_of_others_in_the_folder_are_left_alone(tmp_path):
    for name in ("notes.txt", "x.data", "y.part", "big.tar"):
        (tmp_path / name).write_bytes(b"mine" * 1000)
    cache = cache_of(tmp_path, shards=1)
    for number in range(3):
        content(cache, put(f"{number}.tar", bytes(1000)))
    assert (
        staged(tmp_path) == {"2.tar", ""}
        and (tmp_path / "y.part").exists()
        and (tmp_path / "big.tar").exists()
    )


def test_those_who_waited_for_a_transfer_share_its_failure(tmp_path):
    wanted = put("p.tar", bytes(1000))
    cache = cache_of(tmp_path)
    lock = open(tmp_path / f"{cache._stem(wanted)}.lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    failures = []

    def wait():
        try:
            content(cache, wanted)
        except DataError as error:
            failures.append(str(error))

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.15)
    cache._record_failure(cache._stem(wanted), DataError("the bucket burns"))
    lock.close()
    for waiter in waiters:
        waiter.join()
    assert failures == ["the bucket burns"] * 3
    assert content(cache, wanted) == bytes(1000)  # who comes later tries anew
    assert not list(tmp_path.glob("*.failed.json"))


def test_a_transfer_takes_its_time_limit_seriously(tmp_path):
    wanted = put("p.tar", bytes(1000))
    with pytest.raises(DataError, match=r"not reached within 1e-09 s"):
        cache_of(tmp_path, timeout=1e-9).acquire(wanted)
    assert not list(tmp_path.glob("*.part"))


def test_a_full_disk_is_said(tmp_path):
    import resource

    wanted = put("p.tar", bytes(200_000))
    cache = cache_of(tmp_path, size=200_000, block_bytes=50_000)
    child = os.fork()
    if child == 0:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        message = ""
        with contextlib.suppress(DataError):
            try:
                cache.acquire(wanted)
            except DataError as error:
                message = str(error)
        os._exit(0 if "cannot write a staged shard" in message and "cache_max_gib" in message else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not list(tmp_path.glob("*.part"))
    assert content(cache, wanted)


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prefetching_stages_in_the_background_and_keeps_its_failures_to_itself(tmp_path):
    wanted = [put(f"{number}.tar", os.urandom(1000)) for number in range(2)]
    cache = cache_of(tmp_path, shards=8)
    cache.prefetch([wanted[0], "missing.tar", wanted[1].shard])
    cache.prefetch(wanted)
    wait_until(lambda: "0.tar" in staged(tmp_path))
    # A job that waits behind the missing shard still counts as pending, so asking once may be too early.
    wait_until(lambda: cache.prefetch(wanted) or staged(tmp_path) == {"0.tar", "1.tar"})
    for shard in wanted:
        remove(shard)
    assert content(cache, wanted[1])
    cache.close()
    with pytest.raises(DataError, match=r"missing.tar: not found"):
        cache.acquire("missing.tar")


def test_prefetching_leaves_half_of_the_cache_to_what_is_read_now(tmp_path):
    wanted = [put(f"{number}.tar", os.urandom(1000)) for number in range(4)]
    cache = cache_of(tmp_path, shards=4)
    cache.prefetch(wanted)
    wait_until(lambda: not cache._prefetcher._pending)
    assert staged(tmp_path) == {"0.tar", "1.tar"}
    cache.close()


def test_a_forked_child_neither_ends_nor_extends_its_parent_s_leases(tmp_path):
    first, second = put("1.tar", bytes(1000)), put("2.tar", bytes(1000))
    cache = cache_of(tmp_path, shards=1, timeout=0.3)
    used = cache.acquire(first)
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)  # lives on while the parent works
        os._exit(0)
    os.close(ready)
    with pytest.raises(DataError, match="no room"):
        cache.acquire(second)
    used.release()
    assert content(cache, second) == bytes(1000)
    os.close(go)
    os.waitpid(child, 0)


def test_processes_take_turns_on_one_shard(tmp_path):
    wanted = put("p.tar", os.urandom(100_000))
    cache = cache_of(tmp_path, size=100_000, block_bytes=1000)
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            digest = hashlib.sha256(content(cache, wanted)).hexdigest()
            os._exit(0 if digest == wanted.sha256 else 1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert staged(tmp_path) == {"p.tar"} and not list(tmp_path.glob("*.part"))


@settings(deadline=None, max_examples=50)  # files and locks: the time of one example means nothing
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    st.integers(0, 3000),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=25),
)
def test_any_order_of_use_stays_below_the_limit_with_the_right_bytes(tmp_path_factory, sizes, extra, steps):
    folder = tmp_path_factory.mktemp("cache")
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    wanted = [put(f"{number}.tar", body) for number, body in enumerate(bodies)]
    limit = max(sizes) + SIDE_BYTES + extra * 4
    cache = ShardCache(RemoteFiles(ROOT, timeout_seconds=20), folder, limit)
    held = {}
    for number, hold in steps:
        number %= len(sizes)
        while sum(sizes[other] + SIDE_BYTES for other in {number, *held}) > limit:
            held.pop(next(iter(held))).release()  # leases would fill the cache
        shard = cache.acquire(wanted[number])
        assert shard.pread(0, shard.size) == bodies[number]
        assert total(folder) <= limit
        if hold and number not in held:
            held[number] = shard
        else:
            shard.release()
            shard.close()
    for shard in held.values():
        shard.release()
