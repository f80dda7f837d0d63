"""Any part of a gzip file's content, as gzip itself reads it."""

import gzip
import os
import threading
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.data.random_gzip import RandomGzip


def opened(path, **options):
    descriptor = os.open(path, os.O_RDONLY)
    return descriptor, RandomGzip(descriptor, **options)


# Text with repetitions, so that the inflater's window matters.
pieces = st.lists(
    st.tuples(st.binary(max_size=200), st.integers(1, 400)).map(lambda pair: pair[0] * pair[1]), max_size=5
)


@given(pieces, st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 5_000)), max_size=8), st.data())
def test_every_part_equals_that_of_gzip(tmp_path_factory, members, reads, data):
    path = tmp_path_factory.mktemp("gz") / "x.gz"
    padding = [b"\0" * data.draw(st.integers(0, 600)) for _ in members]
    path.write_bytes(
        b"".join(gzip.compress(part) + zeros for part, zeros in zip(members, padding, strict=True))
    )
    content = b"".join(members)
    spacing, most = data.draw(st.integers(1, 40_000)), data.draw(st.integers(2, 8))
    descriptor, reader = opened(path, spacing=spacing, most_points=most)
    try:
        compressed = []
        assert b"".join(reader.chunks(compressed.append)) == content
        assert b"".join(compressed) == path.read_bytes()
        assert len(reader._points) <= most
        for offset, size in reads:
            assert reader.pread(size, offset) == content[offset : offset + size]
    finally:
        os.close(descriptor)


def lines(count):
    return b"".join(
        b'{"sample_id": "%d", "digest": "%s"}\n' % (n, zlib.crc32(b"%d" % n).__repr__().encode())
        for n in range(count)
    )


def test_a_read_starts_at_the_nearest_point_and_memory_stays_bounded(tmp_path):
    content = lines(60_000)
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    descriptor, reader = opened(tmp_path / "x.gz", spacing=1 << 14, most_points=10)
    list(reader.chunks())
    starts = [point.output for point in reader._points]
    assert 3 <= len(starts) <= 10
    for offset in range(0, len(content), len(content) // 37):
        assert reader.pread(100, offset) == content[offset : offset + 100]
    assert reader.pread(10, len(content)) == b"" and reader.pread(10, len(content) - 4) == content[-4:]
    os.close(descriptor)


def test_threads_share_a_reader(tmp_path):
    content = lines(40_000)
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    descriptor, reader = opened(tmp_path / "x.gz", spacing=1 << 15)
    list(reader.chunks())
    wrong = []

    def work(seed):
        for step in range(60):
            offset = (seed * 7919 + step * 104_729) % len(content)
            if reader.pread(500, offset) != content[offset : offset + 500]:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    assert wrong == []


@pytest.mark.parametrize("cut", [1, 5, 9, 200])
def test_a_cut_file_ends_in_an_error(tmp_path, cut):
    (tmp_path / "x.gz").write_bytes(gzip.compress(lines(1_000))[:-cut])
    descriptor, reader = opened(tmp_path / "x.gz")
    with pytest.raises(EOFError, match="ends before its end-of-stream marker"):
        list(reader.chunks())
    os.close(descriptor)


@pytest.mark.parametrize(
    "change", [lambda data: b"plain text", lambda data: data + b"more", lambda data: data[:-8] + b"\1" * 8]
)
def test_bytes_that_are_not_gzip_or_fail_the_checksum_are_errors(tmp_path, change):
    (tmp_path / "x.gz").write_bytes(change(gzip.compress(lines(100))))
    descriptor, reader = opened(tmp_path / "x.gz")
    with pytest.raises(zlib.error):
        list(reader.chunks())
    os.close(descriptor)


def test_an_empty_file_has_no_content(tmp_path):
    (tmp_path / "x.gz").write_bytes(b"")
    descriptor, reader = opened(tmp_path / "x.gz")
    assert list(reader.chunks()) == [] and reader.pread(5, 0) == b""
    os.close(descriptor)
