"""Artifacts: directories that count as results only when their completion marker says so.

An artifact is a directory with members, a `manifest.json` and a `COMPLETE.json` written last. The manifest binds every
member (path, size, SHA-256), the schema, the semantic identity of what produced it and the artifacts it was made from
(relative path, marker digest). The marker is the manifest plus the manifest's own SHA-256, so it can be issued again,
byte for byte, from the payload alone; neither holds a time, a host or an absolute path, so a moved results root still
verifies.

    with Transaction(target, "solarwm.assets.v1", identity, parents=[dataset]) as tx:
        with tx.open("vae/weights.bin") as file:     # hashed while written, fsynced at close
            file.write(payload)
        run_ffmpeg(tx.path("preview.mp4"))           # a tool writes it; hashed and fsynced at commit
    artifact = tx.artifact

Everything is written into a private sibling `.<name>.<uuid>.partial/` and renamed onto an absent or empty directory.
Readers look only at `COMPLETE.json`, so a crash at any moment leaves something nothing reads.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from solarwm_lib.runtime.errors import ArtifactError, SolarError
from solarwm_lib.runtime.files import (
    HashingWriter,
    disk_full,
    disk_full_message,
    fsync_dir,
    json_bytes,
    write_atomic,
    write_once,
    write_synced,
)
from solarwm_lib.runtime.lineage import LineageNode, format_lineage, lineage, lineage_json
from solarwm_lib.runtime.manifests import (
    MANIFEST,
    MARKER,
    SCHEMA,
    THINNED,
    Artifact,
    Member,
    Parent,
    artifact_dir,
    check_digests,
    check_payload,
    contents,
    load_manifest,
    manifest_of,
    marker_bytes,
    member_path,
    parent_records,
    read,
    scan,
    verify,
)
from solarwm_lib.runtime.owner import OWNER, is_abandoned, write_owner

__all__ = [
    "MANIFEST",
    "MARKER",
    "THINNED",
    "Artifact",
    "LineageNode",
    "Member",
    "Parent",
    "Transaction",
    "artifact_dir",
    "check_digests",
    "format_lineage",
    "identity_diff",
    "json_bytes",
    "lineage",
    "lineage_json",
    "member_path",
    "read",
    "reissue",
    "remove_stale",
    "scan",
    "stale_partials",
    "verify",
    "write_atomic",
    "write_once",
]

_DAY_SECONDS = 24 * 3600.0

log = logging.getLogger(__name__)


class Transaction:
    """Context manager that publishes one artifact, or nothing.

    `identity` is the semantic identity (JSON values); `parents` are the artifacts this one is made from: read ones, or
    directories or markers, which are verified when the transaction starts. `expected_bytes` refuses to start when that much is not free.
    Leaving the block normally commits and sets `artifact`; an exception removes the staging directory and goes on
    (as ArtifactError if the disk is full). Every regular file found in the staging directory becomes a member.
    """

    artifact: Artifact

    def __init__(
        self,
        target: Path | str,
        schema: str,
        identity: dict[str, Any],
        parents: Sequence[Artifact | Path | str] = (),
        *,
        expected_bytes: int = 0,
    ) -> None:
        if not SCHEMA.fullmatch(schema):
            raise ArtifactError(
                f"schema {schema!r} is not a name with a version such as 'solarwm.checkpoint.v1'"
            )
        self.target = artifact_dir(target)
        self.schema = schema
        self.identity: dict[str, Any] = json.loads(json_bytes(identity))
        self._parent_paths = tuple(parents)
        self._expected_bytes = expected_bytes
        self._staging: Path | None = None
        self._written: dict[str, Member] = {}
        self._declared: set[str] = set()
        self._open: dict[str, HashingWriter] = {}

    @property
    def staging(self) -> Path:
        """The private directory being filled."""
        if self._staging is None:
            raise RuntimeError("the transaction is not open: use it in a `with` block")
        return self._staging

    def __enter__(self) -> Transaction:
        self._parents = parent_records(self.target, self._parent_paths)
        _refuse_occupied(self.target)
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self.target)
            free = shutil.disk_usage(self.target.parent).free
            if free < self._expected_bytes:
                raise ArtifactError(
                    f"disk full: {self.target} needs about {self._expected_bytes / 2**20:.1f} MiB and "
                    f"{free / 2**20:.1f} MiB are free; free space or change the output directory"
                )
            staging = self.target.with_name(f".{self.target.name}.{uuid.uuid4().hex}.partial")
            staging.mkdir()
            self._staging = staging
            write_owner(staging)
        except OSError as error:
            self._abort()
            if disk_full(error):
                raise ArtifactError(disk_full_message(self.target, error)) from error
            raise ArtifactError(f"cannot write beside {self.target}: {error.strerror or error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._commit()
                return
            except BaseException as failure:
                self._fail(failure)
                if isinstance(failure, OSError):  # permission lost, device gone
                    raise ArtifactError(
                        f"cannot publish {self.target}: {failure.strerror or failure}; nothing was published"
                    ) from failure
                raise
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Remove the staging directory; raise ArtifactError if `error` means a full disk, else return."""
        full = isinstance(error, Exception) and not isinstance(error, SolarError) and disk_full(error)
        message = disk_full_message(self.target, error) if full else ""
        self._abort()
        if full:
            raise ArtifactError(message) from error

    def _abort(self) -> None:
        for writer in list(self._open.values()):
            writer.discard()
        self._open.clear()
        if self._staging is not None:
            shutil.rmtree(self._staging, onerror=_report_leftover)
            self._staging = None

    def _claim(self, member: str) -> Path:
        member_path(member)
        path = self.staging / member
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ArtifactError(
                f"{self.target}: member {member!r} needs a directory where a member is a file"
            ) from None
        if member in self._open or member in self._written or path.exists():
            raise ArtifactError(f"{self.target}: member {member!r} was written before; each is written once")
        return path

    def open(self, member: str) -> BinaryIO:
        """Open a new member for sequential writing (no seeking); members may be written by several threads, one each."""
        path = self._claim(member)

        def done(size: int, sha256: str) -> None:
            self._written[member] = Member(member, size, sha256)
            self._open.pop(member, None)

        writer = HashingWriter(path, done)
        self._open[member] = writer
        return cast(BinaryIO, writer)

    def write_bytes(self, member: str, data: bytes) -> None:
        """Write a whole member."""
        with self.open(member) as file:
            file.write(data)

    def write_text(self, member: str, data: str) -> None:
        """Write a whole member as UTF-8."""
        self.write_bytes(member, data.encode())

    def write_json(self, member: str, data: Any) -> None:
        """Write a whole member as indented, sorted JSON; NaN and infinity are refused."""
        self.write_bytes(member, json_bytes(data))

    def path(self, member: str) -> Path:
        """Path for a tool that writes the member (a file or a directory of files) itself; it must exist at commit."""
        path = self._claim(member)
        self._declared.add(member)
        return path

    def adopt(self, member: Member) -> None:
        """Take in a member that another process wrote into `staging`, hashed and made durable itself.

        ArtifactError unless it is a regular file of the size that process told.
        """
        member_path(member.path)
        try:
            status = (self.staging / member.path).lstat()
        except OSError as error:
            raise ArtifactError(
                f"{self.target}: member {member.path!r} of another process cannot be seen here ({error.strerror}); all "
                "processes must write to the same file system"
            ) from None
        if not stat.S_ISREG(status.st_mode) or status.st_size != member.bytes:
            raise ArtifactError(
                f"{self.target}: member {member.path!r} has {status.st_size} bytes, its writer told {member.bytes}"
            )
        if member.path in self._written or member.path in self._open:
            raise ArtifactError(
                f"{self.target}: member {member.path!r} was written before; each is written once"
            )
        self._written[member.path] = member

    def _commit(self) -> None:
        if pending := sorted(name for name, writer in self._open.items() if not writer.closed):
            raise ArtifactError(
                f"{self.target}: member {pending[0]!r} is still open at commit; close it first"
            )
        for name in sorted(self._declared):
            if not (self.staging / name).exists():
                raise ArtifactError(f"{self.target}: member {name!r} was announced and never written")
        members, directories = self._collect()
        manifest = manifest_of(self.schema, self.identity, members, self._parents)
        manifest_data = json_bytes(manifest)
        write_synced(self.staging / MANIFEST, manifest_data)
        write_synced(self.staging / MARKER, marker_bytes(manifest, manifest_data))
        for directory in reversed(directories):
            fsync_dir(directory)
        self._publish()
        self._staging = None
        # Not before the rename: a writer killed in between would leave a full-size directory that waits a day.
        (self.target / OWNER).unlink(missing_ok=True)
        fsync_dir(self.target.parent)
        self.artifact = read(self.target, self.schema)

    def _collect(self) -> tuple[list[Member], list[Path]]:
        """Members (sorted; those written by tools hashed and fsynced here) and all directories, parents first."""
        members: list[Member] = []
        directories: list[Path] = []
        for root, names, files in os.walk(self.staging):
            names.sort()
            directories.append(Path(root))
            for name in [*files, *(n for n in names if os.path.islink(os.path.join(root, n)))]:
                path = Path(root, name)
                relative = path.relative_to(self.staging).as_posix()
                if relative == OWNER:
                    continue
                member_path(relative)
                members.append(self._seal(path, relative))
        if missing := sorted(self._written.keys() - {m.path for m in members}):
            raise ArtifactError(f"{self.target}: member {missing[0]!r} was removed before the commit")
        return sorted(members, key=lambda m: m.path), directories

    def _seal(self, path: Path, relative: str) -> Member:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(
                f"{self.target}: member {relative!r} is a link or special file; copy the content instead"
            )
        if known := self._written.get(relative):
            if known.bytes != status.st_size:
                raise ArtifactError(f"{self.target}: member {relative!r} was changed after it was written")
            return known
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        return Member(relative, status.st_size, sha256)

    def _publish(self) -> None:
        """Rename onto an absent or empty directory; the kernel refuses anything else, also in a race."""
        try:
            os.rename(self.staging, self.target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                _refuse_occupied(self.target)
            raise ArtifactError(f"cannot publish {self.target}: {error.strerror}") from error


def _report_leftover(function: Any, path: str, info: Any) -> None:
    log.warning("could not remove %s: %s", path, info[1])


def _refuse_occupied(target: Path) -> None:
    """ArtifactError unless `target` is absent or an empty directory."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ArtifactError(f"{target}: exists and is not a directory; nothing is overwritten")
    if target.is_dir() and (found := sorted(os.listdir(target))):
        state = "a published artifact" if MARKER in found else f"files ({', '.join(found[:3])})"
        raise ArtifactError(
            f"{target}: already holds {state} and is never overwritten; use another name or remove it"
        )


def identity_diff(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """`key: found A, wanted B` for every leaf that differs, keys dotted and sorted."""
    a, b = dict(_leaves(found)), dict(_leaves(wanted))
    return [
        f"{key}: found {a.get(key, 'nothing')}, wanted {b.get(key, 'nothing')}"
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(value, sort_keys=True, ensure_ascii=False)


def reissue(
    target: Path | str,
    schema: str,
    identity: dict[str, Any],
    *,
    parents: Sequence[Artifact | Path | str] | None = None,
) -> Artifact | None:
    """What a job does first: if its target's payload is already there, verify it deeply and issue the marker again.

    Returns None if the target is absent or an empty directory. A missing or unreadable marker is rewritten byte for
    byte from the manifest. ArtifactError if the payload has another identity (with the differing fields), was made
    from other parents (checked when `parents` is given), or is damaged (with the member).
    """
    directory = artifact_dir(target)
    if not directory.exists() or (directory.is_dir() and not os.listdir(directory)):
        return None
    manifest, manifest_data = load_manifest(directory)
    found_schema, found_identity, members, found_parents = contents(manifest)
    advice = "it is never overwritten: use another name or remove it"
    if found_schema != schema:
        raise ArtifactError(f"{directory}: holds {found_schema!r}, wanted {schema!r}; {advice}")
    if differences := identity_diff(found_identity, json.loads(json_bytes(identity))):
        raise ArtifactError(f"{directory}: holds another identity ({'; '.join(differences)}); {advice}")
    if parents is not None and (wanted := parent_records(directory, parents)) != found_parents:
        changed = sorted({p.path for p in set(wanted) ^ set(found_parents)}) or ["order"]
        raise ArtifactError(
            f"{directory}: was made from other inputs ({', '.join(changed)} differ); {advice}"
        )
    marker, expected = directory / MARKER, marker_bytes(manifest, manifest_data)
    dropped = check_payload(directory, schema, members, hashlib.sha256(expected).hexdigest())
    check_digests(directory, [member for member in members if member not in dropped])
    present = marker.read_bytes() if marker.is_file() else b""
    if present != expected:
        if _is_json(present):
            raise ArtifactError(
                f"{marker}: does not belong to {MANIFEST} beside it; one of the two was changed"
            )
        write_atomic(marker, expected)
    (directory / OWNER).unlink(missing_ok=True)  # left by a writer killed right after its rename
    return read(directory, schema)


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def stale_partials(target: Path | str) -> list[Path]:
    """Abandoned staging directories of `target`: writer dead on this machine, or nothing written for a day."""
    directory = artifact_dir(target)
    pattern = re.compile(re.escape(f".{directory.name}.") + r"[0-9a-f]{32}\.partial")
    if not directory.parent.is_dir():
        return []
    return sorted(
        path
        for path in directory.parent.iterdir()
        if pattern.fullmatch(path.name) and path.is_dir() and is_abandoned(path, max_age_s=_DAY_SECONDS)
    )


def remove_stale(target: Path | str) -> list[Path]:
    """Remove the abandoned staging directories of `target`, naming each in the log."""
    stale = stale_partials(target)
    for path in stale:
        log.warning("removing %s, left by a writer that did not finish", path)
        shutil.rmtree(path, onerror=_report_leftover)
    return stale
