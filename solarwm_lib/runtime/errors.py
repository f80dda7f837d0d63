"""Errors a person must fix, each with its documented exit code.

The command line prints them as one line (`solarwm: error: MESSAGE`) and exits with `exit_code`; anything that is not a
`SolarError` is a bug and exits with 1. A message says what was found, what was expected, the nearest valid values and
the key to change.
"""

from __future__ import annotations


class SolarError(Exception):
    """Base of every reported failure."""

    exit_code = 1
    kind = "bug"


class ConfigError(SolarError):
    """Configuration, command line or an unsupported combination."""

    exit_code = 2
    kind = "config"


class DataError(SolarError):
    """Index, shard, video, camera or caption."""

    exit_code = 3
    kind = "data"


class ArtifactError(SolarError):
    """Checkpoint or other artifact: missing, half-written, damaged, of another identity, or not writable."""

    exit_code = 4
    kind = "artifact"


class NonFiniteError(SolarError):
    """Loss, gradient, latent or pixel is NaN or infinite."""

    exit_code = 5
    kind = "non_finite"


class MemoryExhausted(SolarError):
    """Host or device memory ran out."""

    exit_code = 6
    kind = "out_of_memory"


class DistributedError(SolarError):
    """Process group, collective or peer failure."""

    exit_code = 7
    kind = "distributed"


class Preempted(SolarError):
    """Stopped on request (SIGTERM) after the state was saved; run the same command again to continue."""

    exit_code = 75
    kind = "preempted"


EXIT_CODES: dict[int, str] = {
    0: "success",
    1: "a bug in this program",
    **{
        error.exit_code: (error.__doc__ or "").splitlines()[0]
        for error in (
            ConfigError,
            DataError,
            ArtifactError,
            NonFiniteError,
            MemoryExhausted,
            DistributedError,
            Preempted,
        )
    },
}


def is_out_of_memory(error: BaseException) -> bool:
    """True if host or device memory ran out; PyTorch reports host memory as a plain RuntimeError of its CPU allocator."""
    host = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    known = isinstance(error, MemoryError | MemoryExhausted)
    return host or known or type(error).__name__ == "OutOfMemoryError"


def of_exit_code(code: int) -> type[SolarError]:
    """Return the class whose exit code is `code`: an error told by another process or a record is raised as itself."""
    return next((kind for kind in SolarError.__subclasses__() if kind.exit_code == code), SolarError)
