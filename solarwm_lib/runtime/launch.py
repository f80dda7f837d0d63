"""One start of an action: refuse what cannot work, bind the run directory, record how it began and how it ended.

    RUN/resolved-config.json      the run's configuration, written once; another identity is refused
    RUN/launches/attempt-001/     launch-manifest.json, resolved-config.json, run-result.json: one folder per start, kept
    RUN/launch-manifest.json      copies of the newest attempt's records
    RUN/run-result.json           `running` until the attempt ends; a killed attempt stays `running` with its pid

An inference's output directory is the artifact itself, so its records lie beside it in `OUTPUT.launch/`. Rank 0 writes;
what each rank last did stands in its heartbeat file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib import __version__, artifacts
from solarwm_lib.artifacts import json_bytes, write_atomic
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, Preempted, SolarError
from solarwm_lib.runtime.lifeline import StopNow
from solarwm_lib.runtime.lock import RUN_LOCK, exclusive
from solarwm_lib.runtime.watchdog import last_words

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved
    from solarwm_lib.training.topology import Topology

MANIFEST_SCHEMA = "solarwm.launch.v3"
RESULT_SCHEMA = "solarwm.run-result.v2"
_PINNED_IMAGE = re.compile(r".+@[a-z0-9]+:[0-9a-f]{32,}")


def launch(action: str, resolved: Resolved, *, until_step: int | None = None) -> int:
    """Run `action` ("train" or "infer") and return 0; failures raise a SolarError that carries the exit code.

    Everything that can be refused is refused before the first file is written.
    """
    from solarwm_lib.training.topology import from_environment

    config = resolved.config
    if action != config.action:
        raise ConfigError(f"the configuration's action is {config.action!r}, not {action!r}")
    refuse_before_start(resolved)
    topology = from_environment(
        os.environ, config.distributed.world_size, config.distributed.sequence_parallel_size
    )
    output = Path(config.runtime.output_dir)
    operation: Callable[[], Any]
    if action == "train":
        from solarwm_lib.training import setup, train

        setup.open_run(resolved, output)
        setup.check_clips(resolved, topology)
        records = output
        operation = lambda: train.run(resolved, run_dir=output, until_step=until_step)  # noqa: E731
    elif action == "infer":
        artifacts.read(Path(config.checkpoint.path))
        records = output.with_name(f"{output.name}.launch")
        from solarwm_lib.inference.infer import infer, open_infer

        opened = open_infer(resolved)
        operation = lambda: infer(resolved, output, opened)  # noqa: E731
    else:
        raise ConfigError(f"action {action!r} cannot be launched; expected train or infer")

    # On every rank: a refusal by rank 0 alone would leave the others waiting for it. Only rank 0 has looked at the data,
    # so only rank 0 may write.
    bind_run_directory(records, resolved, write=topology.is_main)
    if not topology.is_main:
        operation()
        return 0
    with exclusive(records / RUN_LOCK, "working"):
        attempt = Attempt.begin(action, resolved, records, topology, until_step)
        last_words.append(attempt.end)
        try:
            operation()
        except BaseException as error:
            attempt.end(error)
            raise
        finally:
            last_words.remove(attempt.end)
        attempt.end(None)
    return 0


def refuse_before_start(resolved: Resolved) -> None:
    """Raise ConfigError for inline secrets, placeholder paths and unmet gates (image, clean source)."""
    from solarwm_lib.config.identity import secrets_check
    from solarwm_lib.config.load import refuse_placeholders
    from solarwm_lib.runtime.source import source_identity

    secrets_check(resolved.values)
    refuse_placeholders(resolved.values)
    runtime = resolved.config.runtime
    if runtime.require_clean_source:
        source = source_identity()
        if not source["available"] or not source["clean"]:
            state = "has local changes" if source["available"] else "is not a git checkout"
            raise ConfigError(
                f"runtime.require_clean_source is set but the source {state}; commit the changes or unset it"
            )


class Attempt:
    """The records of one start of an action in its run directory."""

    def __init__(self, records: Path, folder: Path, facts: dict[str, Any]) -> None:
        self.records, self.folder, self._facts = records, folder, facts
        self._started = time.monotonic()

    @classmethod
    def begin(
        cls, action: str, resolved: Resolved, records: Path, topology: Topology, until_step: int | None
    ) -> Attempt:
        """Bind the run directory to this configuration and write the launch records of a new attempt."""
        from solarwm_lib.config.identity import canonical_json

        bind_run_directory(records, resolved)
        folder = _new_attempt(records)
        started = _now()
        manifest = _manifest(action, resolved, topology, until_step, folder.name, started)
        for directory in (folder, records):
            write_atomic(directory / "launch-manifest.json", json_bytes(manifest))
        write_atomic(folder / "resolved-config.json", canonical_json(resolved.values))
        attempt = cls(
            records,
            folder,
            {
                "schema": RESULT_SCHEMA,
                "action": action,
                "attempt": folder.name,
                "started": started,
                "pid": os.getpid(),
                "host": os.uname().nodename,
            },
        )
        attempt._write({"status": "running"})
        return attempt

    def end(self, error: BaseException | None) -> None:
        """Record success, or the error with its exit code."""
        if error is None:
            outcome: dict[str, Any] = {"status": "complete", "exit_code": 0}
        else:
            outcome = {
                "status": "preempted" if isinstance(error, Preempted | StopNow) else "failed",
                "exit_code": _exit_code(error),
                "error_type": type(error).__name__,
                "error_kind": error.kind if isinstance(error, SolarError | StopNow) else "bug",
                "message": str(error),
            }
        ended = {"ended": _now(), "seconds": round(time.monotonic() - self._started, 3)}
        try:
            self._write({**outcome, **ended})
        except (OSError, ArtifactError) as failure:
            # A full disk must not replace the error that the person needs to see.
            print(f"solarwm: warning: run-result.json not written: {failure}", file=sys.stderr)

    def _write(self, outcome: dict[str, Any]) -> None:
        for directory in (self.folder, self.records):
            write_atomic(directory / "run-result.json", json_bytes({**self._facts, **outcome}))


def bind_run_directory(records: Path, resolved: Resolved, *, write: bool = True) -> None:
    """Write `resolved-config.json` if it is absent (unless `write` is false); refuse a directory of another run.

    Same semantic identity with other paths, cadence or topology is the same run: the file keeps its first content and
    the attempt's folder holds what is in force now.
    """
    from solarwm_lib.config.identity import canonical_json, diff, digest, format_diff, semantic_view

    path = records / "resolved-config.json"
    if not path.exists() and (not write or artifacts.write_once(path, canonical_json(resolved.values))):
        return
    try:
        before = json.loads(path.read_bytes())
    except ValueError as error:
        raise ArtifactError(
            f"{path}: damaged ({error}); restore it or use a new runtime.output_dir"
        ) from None
    if digest(semantic_view(before)) != resolved.semantic_digest:
        differences = diff(semantic_view(before), semantic_view(resolved.values))
        raise ConfigError(
            f"{records} holds another run: {'; '.join(format_diff(differences).splitlines())}; "
            f"use a new name and runtime.output_dir, or remove the run"
        )


def _new_attempt(records: Path) -> Path:
    """Create and return the next `launches/attempt-NNN`; numbers are never reused, also between racing starts."""
    parent = records / "launches"
    parent.mkdir(parents=True, exist_ok=True)
    number = len(list(parent.glob("attempt-*"))) + 1
    while True:
        folder = parent / f"attempt-{number:03d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def _manifest(
    action: str,
    resolved: Resolved,
    topology: Topology,
    until_step: int | None,
    attempt: str,
    started: str,
) -> dict[str, Any]:
    from solarwm_lib.config.identity import digest
    from solarwm_lib.runtime.environment import probe
    from solarwm_lib.runtime.source import source_identity

    config = resolved.config
    root = Path(config.data.root)
    content = {
        "schema": MANIFEST_SCHEMA,
        "version": __version__,
        "action": action,
        "name": config.name,
        "route": resolved.route.key,
        "attempt": attempt,
        "started": started,
        "until_step": until_step,
        "command": sys.argv,
        "source_config": {"path": str(resolved.source), "digest": resolved.source_digest},
        "semantic_digest": resolved.semantic_digest,
        "full_digest": resolved.full_digest,
        "deviations": resolved.deviations,
        "source": source_identity(),
        "runtime": {
            "declared_image": config.runtime.image,
            "image_pinned": bool(_PINNED_IMAGE.fullmatch(config.runtime.image)),
        },
        "world": {
            "world_size": topology.world_size,
            "sequence_parallel_size": topology.sequence_parallel_size,
            "local_world_size": topology.local_world_size,
            "nodes": topology.world_size // topology.local_world_size,
        },
        "seeds": {
            "data": config.data.seed,
            "selection": config.validation.selection_seed,
            "validation_noise": config.validation.noise_seed,
        },
        "inputs": {
            "dataset": _artifact_facts(root, shards_elsewhere=bool(config.data.transport.root)),
            "train_index": _file_facts(root / config.data.train_index),
            "test_index": _file_facts(root / config.data.test_index),
            "latents": _artifact_facts(Path(config.data.latents_root) / "index")
            if config.data.encoding == "preencoded"
            else None,
            "assets": _artifact_facts(Path(config.model.base_path)),
            "checkpoint": _artifact_facts(Path(config.checkpoint.path)) if config.checkpoint.path else None,
        },
        "checkpoint": resolved.values.get("checkpoint"),
        "metadata": resolved.values.get("metadata", {}),
        "environment": probe(config.runtime.output_dir),
    }
    content = json.loads(json.dumps(content, default=str))
    return {**content, "launch_identity_digest": digest(content)}


def _artifact_facts(path: Path, *, shards_elsewhere: bool = False) -> dict[str, Any]:
    artifact = artifacts.read(path, elsewhere="shards/" if shards_elsewhere else "")
    return {"path": str(artifact.path), "schema": artifact.schema, "digest": artifact.digest}


def _file_facts(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {"path": str(path), "sha256": None}
    with open(path, "rb") as file:
        return {"path": str(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SolarError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, StopNow):
        return Preempted.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
