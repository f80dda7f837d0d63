"""An artifact is trusted only when its marker, its manifest and its members agree; publishing is all or nothing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from solarwm_lib import artifacts
from solarwm_lib.artifacts import MANIFEST, MARKER, Artifact, Transaction, member_path, read, reissue, verify
from solarwm_lib.runtime.errors import ArtifactError

SCHEMA = "solarwm.test.v1"
IDENTITY = {"name": "unit", "seed": 7, "nested": {"rate": 5e-5, "shape": [1, 2]}}
PAYLOAD = {"model.bin": b"weights" * 100, "sub/dir/notes.txt": "été\n".encode(), "empty.bin": b"x"}


def publish(
    target: Path, payload: dict[str, bytes] = PAYLOAD, identity: dict = IDENTITY, **options
) -> Artifact:
    with Transaction(target, SCHEMA, identity, **options) as tx:
        for name, data in payload.items():
            tx.write_bytes(name, data)
    return tx.artifact


def partials(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name.endswith(".partial"))


@pytest.fixture
def published(tmp_path: Path) -> Artifact:
    return publish(tmp_path / "a")


# publishing


def test_marker_lists_every_member_with_size_and_digest(published: Artifact) -> None:
    marker = json.loads((published.path / MARKER).read_bytes())
    assert {m["path"]: (m["bytes"], m["sha256"]) for m in marker["members"]} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in PAYLOAD.items()
    }
    assert published.digest == hashlib.sha256((published.path / MARKER).read_bytes()).hexdigest()
    assert (
        published
        == read(published.path)
        == read(published.path / MARKER)
        == verify(published.path, deep=True)
    )
    assert published.bytes == sum(map(len, PAYLOAD.values()))


def test_marker_is_the_manifest_plus_its_digest(published: Artifact) -> None:
    manifest = (published.path / MANIFEST).read_bytes()
    marker = json.loads((published.path / MARKER).read_bytes())
    assert marker.pop("manifest_sha256") == hashlib.sha256(manifest).hexdigest()
    assert marker == json.loads(manifest)


def test_same_content_gives_the_same_marker_anywhere_and_anytime(tmp_path: Path, published: Artifact) -> None:
    again = publish(
        tmp_path / "elsewhere" / "b", dict(reversed(PAYLOAD.items())), dict(reversed(IDENTITY.items()))
    )
    assert (again.path / MARKER).read_bytes() == (published.path / MARKER).read_bytes()


def test_files_and_folders_written_by_tools_become_members(tmp_path: Path) -> None:
    with Transaction(tmp_path / "a", SCHEMA, {}) as tx:
        with tarfile.open(tx.path("shards/part 0.tar"), "w") as tar:
            info = tarfile.TarInfo("clip.mp4")
            info.size = 5
            tar.addfile(info, io.BytesIO(b"video"))
        folder = tx.path("transformer")
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (tx.staging / "loose.txt").write_text("x")
        with tx.open("streamed.tar") as file, tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(info, io.BytesIO(b"video"))
    names = [m.path for m in verify(tmp_path / "a", deep=True).members]
    assert names == ["loose.txt", "shards/part 0.tar", "streamed.tar", "transformer/config.json"]


def test_nothing_is_visible_before_the_end_of_the_block(tmp_path: Path) -> None:
    with Transaction(tmp_path / "a", SCHEMA, {}) as tx:
        tx.write_bytes("x", b"1")
        assert not (tmp_path / "a").exists()
        assert partials(tmp_path) == [tx.staging.name]
        assert re.fullmatch(r"\.a\.[0-9a-f]{32}\.partial", tx.staging.name)
    assert partials(tmp_path) == []
    assert sorted(os.listdir(tmp_path / "a")) == [MARKER, MANIFEST, "x"]


def test_an_exception_publishes_nothing_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Transaction(tmp_path / "a", SCHEMA, {}) as tx:
        tx.write_bytes("x", b"1")
        tx.open("still-open").write(b"2")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_member_abandoned_by_an_exception_is_not_published(tmp_path: Path) -> None:
    with Transaction(tmp_path / "a", SCHEMA, {}) as tx:
        try:
            with tx.open("half") as file:
                file.write(b"first half")
                raise ValueError
        except ValueError:
            tx.write_bytes("note", b"half failed")
    assert [m.path for m in read(tmp_path / "a").members] == ["note"]


def test_rename_takes_an_empty_directory_and_refuses_any_other(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    publish(tmp_path / "empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(ArtifactError, match=r"already holds files \(mine.txt\)"):
        publish(tmp_path / "full")
    (tmp_path / "file").write_text("keep")
    with pytest.raises(ArtifactError, match="not a directory"):
        publish(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(ArtifactError, match="not a directory"):
        publish(tmp_path / "link")
    assert (tmp_path / "full" / "mine.txt").read_text() == "keep"
    assert partials(tmp_path) == []


@pytest.mark.parametrize("other", ["file", "directory", "artifact"])
def test_a_target_filled_while_writing_is_refused_and_kept(tmp_path: Path, other: str) -> None:
    target = tmp_path / "a"
    with (
        pytest.raises(ArtifactError, match=r"never overwritten|nothing is overwritten"),
        Transaction(target, SCHEMA, {}),
    ):
        if other == "file":
            target.write_text("keep")
        elif other == "directory":
            (target / "keep").mkdir(parents=True)
        else:
            publish(target)
    assert partials(tmp_path) == [] and target.exists()
    if other == "artifact":
        verify(target, deep=True)


def test_published_artifacts_are_never_overwritten(published: Artifact) -> None:
    with pytest.raises(ArtifactError, match="already holds a published artifact"):
        publish(published.path)


@pytest.mark.parametrize(
    "misuse", ["left open", "announced", "removed", "changed", "link", "linked folder", "pipe"]
)
def test_commit_refuses_a_payload_it_cannot_vouch_for(tmp_path: Path, misuse: str) -> None:
    with pytest.raises(ArtifactError, match="'m'"), Transaction(tmp_path / "a", SCHEMA, {}) as tx:
        if misuse == "left open":
            tx.open("m").write(b"1")
        elif misuse == "announced":
            tx.path("m")
        elif misuse == "removed":
            tx.write_bytes("m", b"1")
            (tx.staging / "m").unlink()
        elif misuse == "changed":
            tx.write_bytes("m", b"1")
            with open(tx.staging / "m", "ab") as file:
                file.write(b"2")
        elif misuse == "link":
            tx.path("m").symlink_to("/etc/hostname")
        elif misuse == "linked folder":
            tx.path("m").symlink_to("/etc", target_is_directory=True)
        else:
            os.mkfifo(tx.path("m"))
    assert list(tmp_path.iterdir()) == []


def test_a_member_is_written_once(tmp_path: Path) -> None:
    for second in ("m", "m/below"):
        with pytest.raises(ArtifactError, match=f"'{second}'"), Transaction(tmp_path / "a", SCHEMA, {}) as tx:
            tx.write_bytes("m", b"1")
            tx.write_bytes(second, b"2")
    with pytest.raises(ArtifactError, match="'m'"), Transaction(tmp_path / "a", SCHEMA, {}) as tx:
        tx.write_bytes("m/below", b"1")
        tx.path("m")


def test_identity_must_be_json_and_finite(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        Transaction(tmp_path / "a", SCHEMA, {"loss": float("nan")})
    with pytest.raises(TypeError):
        Transaction(tmp_path / "a", SCHEMA, {"path": tmp_path})
    with pytest.raises(ArtifactError, match=r"solarwm\.checkpoint\.v1"):
        Transaction(tmp_path / "a", "checkpoint", {})


# member paths


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "..",
        "../x",
        "a/../../x",
        "a/./b",
        "a//b",
        "a/",
        "a\\b",
        "a\nb",
        "\0",
        "\ud800",
        "x" * 256,
        MARKER,
        MANIFEST,
        MARKER + "/x",
        ".owner.json",
    ],
)
def test_illegal_member_paths_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArtifactError, match="member path"):
        member_path(name)
    with pytest.raises(ArtifactError, match="member path"), Transaction(tmp_path / "a", SCHEMA, {}) as tx:
        tx.write_bytes(name, b"escaped")
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=40))
def test_an_accepted_member_path_stays_inside(name: str) -> None:
    try:
        accepted = member_path(name)
    except ArtifactError:
        return
    assert accepted == name
    assert os.path.normpath(os.path.join("/base", name)) == "/base/" + name


_component = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\"), min_size=1, max_size=20
)
_names = st.lists(_component.filter(lambda c: c not in (".", "..")), min_size=1, max_size=3).map("/".join)
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)


def _publishable(payload: dict[str, bytes]) -> bool:
    """No name is reserved or a folder of another."""
    return not {name.split("/")[0] for name in payload} & {MARKER, MANIFEST, ".owner.json"} and not any(
        b.startswith(a + "/") for a in payload for b in payload
    )


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    payload=st.dictionaries(_names, st.binary(max_size=64), max_size=4).filter(_publishable),
    identity=st.dictionaries(_text, _json, max_size=3),
)
def test_round_trip(tmp_path: Path, payload: dict[str, bytes], identity: dict) -> None:
    target = tmp_path / "round"
    shutil.rmtree(target, ignore_errors=True)
    published = publish(target, payload, identity)
    assert verify(target, deep=True) == published
    assert published.identity == identity
    assert {m.path: (target / m.path).read_bytes() for m in published.members} == payload
    (target / MARKER).unlink()
    assert reissue(target, SCHEMA, identity) == published


# reading and verifying


def test_a_moved_artifact_still_verifies(tmp_path: Path, published: Artifact) -> None:
    moved = tmp_path / "new root" / "b"
    moved.parent.mkdir()
    shutil.move(published.path, moved)
    assert verify(moved, deep=True).digest == published.digest


def test_an_absent_artifact_names_what_is_complete(tmp_path: Path, published: Artifact) -> None:
    with pytest.raises(ArtifactError, match=r"does not exist \(no COMPLETE.json\); complete beside it: a$"):
        read(tmp_path / "b")
    (tmp_path / "c").mkdir()
    with pytest.raises(ArtifactError, match="is not complete"):
        read(tmp_path / "c" / MARKER)
    with pytest.raises(ArtifactError, match="nothing beside it is complete"):
        read(tmp_path / "x" / "y")


def test_another_schema_is_refused(published: Artifact) -> None:
    with pytest.raises(ArtifactError, match=r"'solarwm.test.v1', expected 'solarwm.other.v1'"):
        read(published.path, "solarwm.other.v1")


def test_a_member_truncated_to_nothing_is_named(published: Artifact) -> None:
    os.truncate(published.path / "model.bin", 0)
    with pytest.raises(ArtifactError, match=r"'model.bin' has 0 bytes, expected 700"):
        read(published.path)


def test_a_missing_member_is_named(published: Artifact) -> None:
    (published.path / "sub/dir/notes.txt").unlink()
    with pytest.raises(ArtifactError, match=r"'sub/dir/notes.txt' is missing"):
        read(published.path)


def test_a_flipped_byte_of_the_same_length_is_found_by_the_deep_check(published: Artifact) -> None:
    flip(published.path / "model.bin", 350)
    read(published.path)
    with pytest.raises(ArtifactError, match=r"'model.bin' has the right size and other content"):
        verify(published.path, deep=True)


@pytest.mark.parametrize("linked", ["model.bin", "sub", MARKER, MANIFEST])
def test_links_are_refused_even_when_they_lead_to_the_same_bytes(
    tmp_path: Path, published: Artifact, linked: str
) -> None:
    shutil.move(published.path / linked, tmp_path / "moved out")
    (published.path / linked).symlink_to(tmp_path / "moved out")
    with pytest.raises(ArtifactError, match="link"):
        read(published.path)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x20
    path.write_bytes(data)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return publish(tmp_path_factory.mktemp("shared") / "a", {"m": b"0123456789", "n/o": b"abc"})


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_of_any_file_is_found(shared: Artifact, data: st.DataObject) -> None:
    path = shared.path / data.draw(st.sampled_from(["m", "n/o", MARKER, MANIFEST]))
    original = path.read_bytes()
    flip(path, data.draw(st.integers(0, len(original) - 1)))
    try:
        with pytest.raises(ArtifactError):
            verify(shared.path, deep=True)
    finally:
        path.write_bytes(original)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_truncation_of_any_file_is_found_by_the_cheap_check(
    shared: Artifact, data: st.DataObject
) -> None:
    path = shared.path / data.draw(st.sampled_from(["m", "n/o", MARKER, MANIFEST]))
    original = path.read_bytes()
    path.write_bytes(original[: data.draw(st.integers(0, len(original) - 1))])
    try:
        with pytest.raises(ArtifactError, match=re.escape(path.relative_to(shared.path).as_posix())):
            read(shared.path)
    finally:
        path.write_bytes(original)


def test_a_marker_whose_paths_escape_is_refused(tmp_path: Path, published: Artifact) -> None:
    """Consistent digests all the way, so only the path rule stands between the marker and a foreign file."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"x")
    for path in ("../outside", str(outside)):
        manifest = json.loads((published.path / MANIFEST).read_bytes())
        manifest["members"] = [{"bytes": 1, "path": path, "sha256": hashlib.sha256(b"x").hexdigest()}]
        data = artifacts.json_bytes(manifest)
        (published.path / MANIFEST).write_bytes(data)
        marker = {**manifest, "manifest_sha256": hashlib.sha256(data).hexdigest()}
        (published.path / MARKER).write_bytes(artifacts.json_bytes(marker))
        with pytest.raises(ArtifactError, match=r"member path .*outside"):
            read(published.path)


def test_a_marker_of_another_artifact_is_refused(tmp_path: Path, published: Artifact) -> None:
    other = publish(tmp_path / "b", {"model.bin": b"other"})
    shutil.copy(other.path / MARKER, published.path / MARKER)
    with pytest.raises(ArtifactError, match=r"does not belong to manifest.json"):
        read(published.path)
    with pytest.raises(ArtifactError, match=r"does not belong to manifest.json"):
        reissue(published.path, SCHEMA, IDENTITY)


def test_an_unknown_format_is_refused(published: Artifact) -> None:
    (published.path / MARKER).write_text('{"format": "solarwm.artifact.v9"}\n')
    with pytest.raises(
        ArtifactError, match=r"format is 'solarwm.artifact.v9', expected 'solarwm.artifact.v1'"
    ):
        read(published.path)
    (published.path / MARKER).write_text("[]\n")
    with pytest.raises(ArtifactError, match="format is 'list'"):
        read(published.path)


def test_asking_for_a_member_gives_its_path_or_the_nearest_names(published: Artifact) -> None:
    assert published.file("model.bin").read_bytes() == PAYLOAD["model.bin"]
    with pytest.raises(ArtifactError, match=r"no member 'modle.bin'; nearest: model.bin"):
        published.file("modle.bin")


def test_scan_separates_complete_artifacts_from_the_rest(tmp_path: Path, published: Artifact) -> None:
    publish(tmp_path / "b")
    (tmp_path / "b" / MARKER).unlink()
    publish(tmp_path / "c")
    os.truncate(tmp_path / "c" / "model.bin", 3)
    (tmp_path / ".d.partial").mkdir()
    (tmp_path / "notes.txt").write_text("")
    good, rejected = artifacts.scan(tmp_path)
    assert good == [published]
    assert [path.name for path, _ in rejected] == ["b", "c"]
    assert "no COMPLETE.json" in rejected[0][1] and "'model.bin'" in rejected[1][1]
    assert artifacts.scan(tmp_path / "nowhere") == ([], [])


# issuing the marker again


def test_a_deleted_marker_is_issued_again_byte_for_byte(published: Artifact) -> None:
    before = (published.path / MARKER).read_bytes()
    (published.path / MARKER).unlink()
    assert reissue(published.path / MARKER, SCHEMA, IDENTITY) == published
    assert (published.path / MARKER).read_bytes() == before
    assert sorted(p.name for p in published.path.iterdir()) == sorted(
        [MARKER, MANIFEST, "model.bin", "sub", "empty.bin"]
    )


def test_reissue_changes_nothing_when_the_marker_is_there(published: Artifact) -> None:
    before = (published.path / MARKER).stat()
    assert reissue(published.path, SCHEMA, IDENTITY) == published
    assert (published.path / MARKER).stat() == before


def test_a_truncated_marker_is_refused_by_readers_and_repaired_by_its_own_job(published: Artifact) -> None:
    before = (published.path / MARKER).read_bytes()
    for size in (0, 1, len(before) // 2, len(before) - 2):
        (published.path / MARKER).write_bytes(before[:size])
        with pytest.raises(
            ArtifactError, match=r"COMPLETE.json: damaged .* remove COMPLETE.json and make this"
        ):
            read(published.path)
        assert reissue(published.path, SCHEMA, IDENTITY) == published
        assert (published.path / MARKER).read_bytes() == before


def test_nothing_to_issue_for_an_absent_or_empty_target(tmp_path: Path) -> None:
    assert reissue(tmp_path / "a", SCHEMA, IDENTITY) is None
    (tmp_path / "a").mkdir()
    assert reissue(tmp_path / "a", SCHEMA, IDENTITY) is None


def test_a_foreign_identity_is_refused_field_by_field(published: Artifact) -> None:
    foreign = {"name": "unit", "seed": 8, "nested": {"rate": 5e-5, "shape": [1, 2], "extra": None}}
    for remove_marker in (False, True):
        if remove_marker:
            (published.path / MARKER).unlink()
        with pytest.raises(ArtifactError) as failure:
            reissue(published.path, SCHEMA, foreign)
        assert "nested.extra: found nothing, wanted null; seed: found 7, wanted 8" in str(failure.value)
        assert "\n" not in str(failure.value)
    assert not (published.path / MARKER).exists()
    with pytest.raises(ArtifactError, match=r"holds 'solarwm.test.v1', wanted 'solarwm.other.v1'"):
        reissue(published.path, "solarwm.other.v1", IDENTITY)


def test_identity_compares_as_json_so_one_and_one_point_zero_differ(published: Artifact) -> None:
    same = {"name": "unit", "seed": 7, "nested": {"rate": 0.00005, "shape": (1, 2)}}
    assert reissue(published.path, SCHEMA, same) == published
    with pytest.raises(ArtifactError, match=r"seed: found 7, wanted 7\.0"):
        reissue(published.path, SCHEMA, {**IDENTITY, "seed": 7.0})
    with pytest.raises(ArtifactError, match=r"found \{\}, wanted nothing|wanted nothing"):
        reissue(published.path, SCHEMA, {"name": "unit", "seed": 7})


def test_a_damaged_payload_gets_no_marker(published: Artifact) -> None:
    (published.path / MARKER).unlink()
    flip(published.path / "model.bin", 0)
    with pytest.raises(ArtifactError, match=r"'model.bin'"):
        reissue(published.path, SCHEMA, IDENTITY)
    assert not (published.path / MARKER).exists()


def test_files_without_a_manifest_are_neither_trusted_nor_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.bin").write_bytes(b"who knows")
    with pytest.raises(ArtifactError, match=r"manifest.json is missing, so its files cannot be trusted"):
        reissue(tmp_path / "a", SCHEMA, IDENTITY)


def test_other_parents_are_refused(tmp_path: Path) -> None:
    first, second = publish(tmp_path / "p1"), publish(tmp_path / "p2", identity={"name": "other"})
    child = publish(tmp_path / "child", parents=[first.path])
    assert reissue(child.path, SCHEMA, IDENTITY, parents=[first.path / MARKER]) == child
    with pytest.raises(ArtifactError, match=r"made from other inputs \(../p1, ../p2 differ\)"):
        reissue(child.path, SCHEMA, IDENTITY, parents=[second.path])


# members that stay elsewhere


def test_members_that_stay_elsewhere_may_be_absent_but_not_wrong(tmp_path: Path) -> None:
    with Transaction(tmp_path / "data", SCHEMA, IDENTITY) as transaction:
        transaction.write_bytes("shards/a.tar", b"first")
        transaction.write_bytes("shards/b.tar", b"second")
        transaction.write_bytes("index.jsonl", b"{}")
    (tmp_path / "data" / "shards" / "a.tar").unlink()
    assert read(tmp_path / "data", elsewhere="shards/") == transaction.artifact
    with pytest.raises(ArtifactError, match=r"'shards/a.tar' is missing"):
        read(tmp_path / "data")
    (tmp_path / "data" / "shards" / "b.tar").write_bytes(b"cut")
    with pytest.raises(ArtifactError, match=r"'shards/b.tar' has 3 bytes, expected 6"):
        read(tmp_path / "data", elsewhere="shards/")
    (tmp_path / "data" / "index.jsonl").unlink()
    with pytest.raises(ArtifactError, match=r"'index.jsonl' is missing"):
        read(tmp_path / "data", elsewhere="shards/")


# start-up


def test_importing_artifacts_loads_no_array_or_schema_library() -> None:
    code = "import sys, solarwm_lib.artifacts; print(*sorted({'torch', 'numpy', 'pydantic', 'yaml', 'psutil'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "\n"
    )
