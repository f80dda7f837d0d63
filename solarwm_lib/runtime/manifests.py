"""What an artifact's manifest and marker say, and whether the payload agrees.

`manifest.json` binds members, schema, identity and parents; `COMPLETE.json` is the same content plus the manifest's SHA-256.
Both are deterministic text, so a marker can be derived again from its manifest and is checked byte for byte.

A checkpoint may be thinned: `THINNED.json` beside the marker lists members that were dropped on purpose (never weights). The
other two files stay as they are, so whatever refers to the checkpoint by their digests still holds.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.runtime.files import json_bytes
from solarwm_lib.runtime.owner import OWNER

MARKER = "COMPLETE.json"
MANIFEST = "manifest.json"
THINNED = "THINNED.json"
FORMAT = "solarwm.artifact.v1"
SCHEMA = re.compile(r"[a-z0-9][a-z0-9._-]*\.v[0-9]+")

# What a THINNED.json may list: state that only going on with a training needs. Anything else missing is damage.
DROPPABLE = {"solarwm.checkpoint.v1": re.compile(r"(critic_)?optimizer(-\d{5}-of-\d{5})?\.safetensors")}

_THINNED_FORMAT = "solarwm.thinned.v1"
_RESERVED = (MARKER, MANIFEST, THINNED, OWNER)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Member:
    """One file of the payload: relative posix path, size, content digest."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Parent:
    """An artifact this one was made from: its directory relative to ours, SHA-256 of its marker, its schema."""

    path: str
    digest: str
    schema: str


@dataclass(frozen=True)
class Artifact:
    """A published artifact whose marker was read and checked. `digest` is the SHA-256 of the marker's bytes.

    `members` are all that were published; `dropped` those of them that a thinning removed, or was about to.
    """

    path: Path
    schema: str
    identity: dict[str, Any]
    members: tuple[Member, ...]
    parents: tuple[Parent, ...]
    digest: str
    dropped: tuple[Member, ...] = ()

    @property
    def bytes(self) -> int:
        """Payload size in bytes, without what was dropped."""
        return sum(member.bytes for member in self.members) - sum(member.bytes for member in self.dropped)

    def file(self, member: str) -> Path:
        """Path of a member; ArtifactError with the nearest names if the artifact does not list it, or if it was dropped."""
        names = [m.path for m in self.members]
        if any(m.path == member for m in self.dropped):
            raise ArtifactError(
                f"{self.path}: member {member!r} was dropped when the artifact was thinned ({THINNED})"
            )
        if member not in names:
            near = difflib.get_close_matches(member, names, n=3, cutoff=0.3) or names[:3]
            raise ArtifactError(f"{self.path}: no member {member!r}; nearest: {', '.join(near) or 'none'}")
        return self.path / member


def member_path(member: str) -> str:
    """Return `member` if it is a legal relative posix path, else raise ArtifactError.

    Refused: absolute, `.` and `..` and empty components, backslashes, control characters, text that is not UTF-8 and
    the names the transaction itself uses.
    """
    problem = ""
    if not isinstance(member, str) or not member:
        problem = "is empty or not text"
    elif member.startswith("/"):
        problem = "is absolute"
    elif "\\" in member or any(ord(c) < 32 or ord(c) == 127 for c in member):
        problem = "holds a backslash or a control character"
    elif any(0xD800 <= ord(c) <= 0xDFFF for c in member):
        problem = "is not valid UTF-8"
    elif any(part in ("", ".", "..") or len(part.encode()) > 255 for part in member.split("/")):
        problem = "has a component that is empty, '.', '..' or longer than 255 bytes"
    elif member.split("/")[0] in _RESERVED:
        problem = "is a name the artifact itself uses"
    if problem:
        raise ArtifactError(
            f"member path {member!r} {problem}; expected a relative posix path such as 'a/b.bin'"
        )
    return member


def artifact_dir(path: Path | str) -> Path:
    """Directory of an artifact named by its directory or by its marker, absolute without resolving links."""
    absolute = Path(os.path.abspath(path))
    return absolute.parent if absolute.name == MARKER else absolute


def parent_records(target: Path, parents: Sequence[Artifact | Path | str]) -> tuple[Parent, ...]:
    """Describe the parents relative to `target`, in the order given, each once; those given by path are read first."""
    records: dict[str, Parent] = {}
    for parent in parents:
        artifact = parent if isinstance(parent, Artifact) else read(parent)
        relative = PurePosixPath(os.path.relpath(artifact.path, target)).as_posix()
        records[relative] = Parent(relative, artifact.digest, artifact.schema)
    return tuple(records.values())


def manifest_of(
    schema: str, identity: dict[str, Any], members: Sequence[Member], parents: Sequence[Parent]
) -> dict[str, Any]:
    """Content of `manifest.json`."""
    return {
        "format": FORMAT,
        "schema": schema,
        "identity": identity,
        "members": [asdict(member) for member in members],
        "parents": [asdict(parent) for parent in parents],
    }


def thinned_bytes(marker_digest: str, dropped: Sequence[Member]) -> bytes:
    """Bytes of the `THINNED.json` that belongs to a marker."""
    listed = [asdict(member) for member in sorted(dropped, key=lambda m: m.path)]
    return json_bytes({"format": _THINNED_FORMAT, "marker_sha256": marker_digest, "dropped": listed})


def read_dropped(
    directory: Path, schema: str, members: Sequence[Member], marker_digest: str
) -> tuple[Member, ...]:
    """Return the members that `THINNED.json` says were dropped, () without that file.

    ArtifactError unless it is of this marker, unedited, and lists only members that may be dropped.
    """
    path = directory / THINNED
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        dropped = tuple(Member(**member) for member in json.loads(data)["dropped"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path}: damaged ({type(error).__name__}: {error}); restore it from a copy"
        ) from None
    if data != thinned_bytes(marker_digest, dropped):
        raise ArtifactError(
            f"{path}: was edited or does not belong to {MARKER} beside it; restore it from a copy"
        )
    allowed = DROPPABLE.get(schema)
    for member in dropped:
        if member not in members or allowed is None or not allowed.fullmatch(member.path):
            raise ArtifactError(
                f"{path}: lists {member.path!r}, which a {schema} never drops; the file was edited, restore the member"
            )
    return dropped


def marker_bytes(manifest: dict[str, Any], manifest_data: bytes) -> bytes:
    """Bytes of the `COMPLETE.json` that belongs to a manifest."""
    return json_bytes({**manifest, "manifest_sha256": hashlib.sha256(manifest_data).hexdigest()})


def _parse_manifest(path: Path) -> tuple[dict[str, Any], bytes]:
    """Value and bytes of a manifest or marker; ArtifactError if truncated, edited, a link or of an unknown format.

    FileNotFoundError or NotADirectoryError if there is none.
    """
    remedy = (
        f"the payload may be intact: remove {MARKER} and make this artifact again"
        if path.name == MARKER
        else "restore it from a copy, or remove the whole artifact and make it again"
    )
    try:
        if path.is_symlink():
            raise ArtifactError(f"{path}: is a link, expected a regular file")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ArtifactError(
            f"{path}: damaged ({len(data)} bytes, not complete JSON: {error}); {remedy}"
        ) from None
    found = value.get("format") if isinstance(value, dict) else type(value).__name__
    if found != FORMAT:
        raise ArtifactError(f"{path}: format is {found!r}, expected {FORMAT!r}; {remedy}")
    try:
        contents(value)
        if json_bytes(value) != data:
            raise ValueError("its text was edited")
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path}: damaged ({type(error).__name__}: {error}); {remedy}") from None
    return cast(dict[str, Any], value), data


def contents(value: dict[str, Any]) -> tuple[str, dict[str, Any], tuple[Member, ...], tuple[Parent, ...]]:
    """Typed schema, identity, members and parents; KeyError, TypeError or ValueError if a field is not what it must be."""
    members = tuple(Member(**member) for member in value["members"])
    parents = tuple(Parent(**parent) for parent in value["parents"])
    for member in members:
        try:
            member_path(member.path)
        except ArtifactError as error:
            raise ValueError(str(error)) from None
        if type(member.bytes) is not int or member.bytes < 0 or not _SHA256.fullmatch(member.sha256):
            raise ValueError(f"member {member.path!r} has no valid size and digest")
    if len({member.path for member in members}) != len(members):
        raise ValueError("a member is listed twice")
    if any(not _SHA256.fullmatch(parent.digest) for parent in parents):
        raise ValueError("a parent has no valid digest")
    if not SCHEMA.fullmatch(value["schema"]) or not isinstance(value["identity"], dict):
        raise ValueError("schema or identity is not valid")
    return value["schema"], value["identity"], members, parents


def load_manifest(directory: Path) -> tuple[dict[str, Any], bytes]:
    """Value and bytes of the payload's manifest; ArtifactError if it is missing or damaged."""
    try:
        return _parse_manifest(directory / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"{directory}: {MANIFEST} is missing, so its files cannot be trusted; remove the directory or restore a copy"
        ) from None


def check_members(directory: Path, members: Sequence[Member], deep: bool, elsewhere: str = "") -> None:
    """Every member is a regular file of the recorded size, reached through real directories; deep compares digests.

    Members whose path starts with `elsewhere` (unless empty) may be absent: they are read from another place.
    """
    if elsewhere:
        members = [
            member
            for member in members
            if not member.path.startswith(elsewhere) or os.path.lexists(directory / member.path)
        ]
    real_directories: set[Path] = {directory}
    for member in members:
        path = directory / member.path
        try:
            for parent in path.parents:
                if parent in real_directories:
                    break
                if not stat.S_ISDIR(parent.lstat().st_mode):
                    raise ArtifactError(f"{directory}: member {member.path!r} is reached through a link")
                real_directories.add(parent)
            status = path.lstat()
        except OSError as error:
            raise ArtifactError(
                f"{directory}: member {member.path!r} is missing ({error.strerror})"
            ) from None
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(
                f"{directory}: member {member.path!r} is a link or special file, expected a regular file"
            )
        if status.st_size != member.bytes:
            raise ArtifactError(
                f"{directory}: member {member.path!r} has {status.st_size} bytes, expected {member.bytes}; "
                "it is truncated or was changed, restore a copy"
            )
    if deep:
        check_digests(directory, members)


def check_digests(directory: Path, members: Sequence[Member]) -> None:
    """Compare the content of `members` with their SHA-256; ArtifactError names the first that differs or cannot be read."""
    from concurrent.futures import ThreadPoolExecutor  # hashlib releases the lock; network reads overlap

    def digest_of(member: Member) -> str:
        try:
            with open(directory / member.path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ArtifactError(
                f"{directory}: member {member.path!r} cannot be read ({error.strerror})"
            ) from None

    ordered = sorted(
        members, key=lambda member: -member.bytes
    )  # the largest first, so that none is left over
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for member, found in zip(ordered, pool.map(digest_of, ordered), strict=True):
            if found != member.sha256:
                raise ArtifactError(
                    f"{directory}: member {member.path!r} has the right size and other content "
                    f"(sha256 {found[:12]}, expected {member.sha256[:12]}); it is damaged, restore a copy"
                )


def read(path: Path | str, schema: str | None = None, *, elsewhere: str = "") -> Artifact:
    """Read an artifact by its directory or marker and verify it cheaply: marker, manifest, every member's size.

    Members below the prefix `elsewhere` may be absent (shards that stay in a bucket); those present are checked.
    ArtifactError if it is absent (with the complete ones beside it), damaged, or not of `schema`.
    """
    return verify(path, schema=schema, elsewhere=elsewhere)


def verify(
    path: Path | str,
    deep: bool = False,
    *,
    schema: str | None = None,
    elsewhere: str = "",
    only: Collection[str] | None = None,
) -> Artifact:
    """As `read`; `deep` also compares every member's SHA-256, or that of the members in `only`.

    Members that `THINNED.json` lists as dropped may be absent; the artifact says which they are.
    """
    directory = artifact_dir(path)
    marker = directory / MARKER
    try:
        value, data = _parse_manifest(marker)
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(_absent_message(directory)) from None
    recorded = value.pop("manifest_sha256", None)
    manifest_data = load_manifest(directory)[1]
    if hashlib.sha256(manifest_data).hexdigest() != recorded or json_bytes(value) != manifest_data:
        raise ArtifactError(f"{marker}: does not belong to {MANIFEST} beside it; one of the two was changed")
    found_schema, identity, members, parents = contents(value)
    if schema is not None and found_schema != schema:
        raise ArtifactError(f"{directory}: schema is {found_schema!r}, expected {schema!r}")
    digest = hashlib.sha256(data).hexdigest()
    dropped = check_payload(directory, found_schema, members, digest, elsewhere)
    if deep:
        kept = [m for m in members if m not in dropped and (only is None or m.path in only)]
        check_digests(directory, [m for m in kept if not elsewhere or (directory / m.path).exists()])
    return Artifact(directory, found_schema, identity, members, parents, digest, dropped)


def check_payload(
    directory: Path, schema: str, members: Sequence[Member], marker_digest: str, elsewhere: str = ""
) -> tuple[Member, ...]:
    """Check the sizes of all members that were not dropped; return those that were."""
    dropped = read_dropped(directory, schema, members, marker_digest)
    try:
        check_members(directory, [m for m in members if m not in dropped], False, elsewhere)
    except ArtifactError:
        # A trainer may thin the checkpoint at this moment; it writes the list before it removes anything.
        now = read_dropped(directory, schema, members, marker_digest)
        if now == dropped:
            raise
        dropped = now
        check_members(directory, [m for m in members if m not in dropped], False, elsewhere)
    return dropped


def _absent_message(directory: Path) -> str:
    state = "is not complete" if directory.is_dir() else "does not exist"
    complete: list[str] = []
    if directory.parent.is_dir():
        complete = sorted(p.name for p in directory.parent.iterdir() if (p / MARKER).is_file())
    beside = (
        f"complete beside it: {', '.join(complete[-5:])}" if complete else "nothing beside it is complete"
    )
    return f"{directory}: {state} (no {MARKER}); {beside}"


def scan(directory: Path | str, schema: str | None = None) -> tuple[list[Artifact], list[tuple[Path, str]]]:
    """All artifacts directly in `directory`: those that verify cheaply, by name, and those that do not with the reason.

    Partial and hidden directories are not looked at; a directory without a marker is listed as unfinished.
    """
    good: list[Artifact] = []
    rejected: list[tuple[Path, str]] = []
    root = Path(directory)
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.is_dir() and not path.name.startswith("."):
            try:
                good.append(read(path, schema))
            except ArtifactError as error:
                rejected.append((path, str(error)))
    return good, rejected
