"""A connection between processes that breaks is an error of the run, told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import DistributedError, is_out_of_memory


@contextmanager
def connection(what: str) -> Iterator[None]:
    """Turn a broken or timed-out connection into a DistributedError that names the collective, `what`.

    Memory that runs out is a RuntimeError in torch, too, and stays what it is.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DistributedError(
            f"{what} failed: {reason}; a peer has ended or cannot be reached: the first failing rank's message says why"
        ) from error
