"""What failures leave behind: one JSON file per failing rank and a line that names rank, phase, step and what to change.

A non-finite value leaves enough to reproduce the step, a lack of memory what was used, planned and allowed, a lost connection the
name of the peer that is gone. A hang is the `runtime.watchdog`'s.
"""

from __future__ import annotations

import contextlib
import math
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from solarwm_lib.artifacts import json_bytes, write_atomic
from solarwm_lib.runtime import environment, watchdog
from solarwm_lib.runtime.errors import DistributedError, MemoryExhausted, is_out_of_memory
from solarwm_lib.runtime.process import STEP_PHASES, Heartbeat, memory_bytes, place

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved
    from solarwm_lib.training.batches import Batch

FOLDER = watchdog.FOLDER
# What lowers the memory of a process, the most harmless first: (key, how).
LEVERS = (
    ("train.activation_checkpointing", "true"),
    ("train.micro_batch_size", "lower, with more train.gradient_accumulation_steps"),
    ("distributed.sequence_parallel_size", "higher"),
    ("train.strategy", "full_shard"),
)


def statistics(tensor: torch.Tensor) -> dict[str, Any]:
    """Return shape, counts of NaN and inf, and minimum, maximum, mean and deviation of the finite entries."""
    values = tensor.detach().double()
    finite = values[torch.isfinite(values)]
    summary: dict[str, Any] = {
        "shape": list(tensor.shape),
        "nan": int(torch.isnan(values).sum()),
        "inf": int(torch.isinf(values).sum()),
    }
    if finite.numel():
        summary |= {
            "min": finite.min().item(),
            "max": finite.max().item(),
            "mean": finite.mean().item(),
            "std": finite.std(correction=0).item(),
        }
    return summary


def describe_batch(batch: Batch, timesteps: Sequence[Any], losses: Sequence[float]) -> list[dict[str, Any]]:
    """Return one entry per sample: identity, timestep (or a list of them), loss, camera translation norms per latent frame, statistics."""
    return [
        {
            "sample_id": sample_id,
            "occurrence_id": batch.occurrence_ids[i],
            "global_sample_index": batch.indices[i],
            "start_frame": batch.start_frames[i],
            "caption": batch.captions[i],
            "timestep": timesteps[i],
            "loss": _plain(losses[i]),
            "camera_translation_norms": [_plain(x) for x in batch.w2c[i, :, :3, 3].norm(dim=-1).tolist()],
            "latents": statistics(batch.latents[i]),
            "prompt_embeds": statistics(batch.prompt_embeds[i]),
        }
        for i, sample_id in enumerate(batch.sample_ids)
    ]


def bad_tensors(tensors: Mapping[str, torch.Tensor], limit: int = 20) -> list[dict[str, Any]]:
    """Return the first `limit` tensors with a NaN or inf, with their statistics."""
    found: list[dict[str, Any]] = []
    for name, tensor in tensors.items():
        if len(found) < limit and not torch.isfinite(tensor).all():
            found.append({"name": name, **statistics(tensor)})
    return found


def write_dump(run_dir: Path, step: int, rank: int, content: Mapping[str, Any]) -> Path:
    """Write `diagnostics/nonfinite-step-000123-rank-00000.json` and return its path."""
    path = run_dir / FOLDER / f"nonfinite-step-{step:06d}-rank-{rank:05d}.json"
    write_atomic(path, json_bytes({"schema": "solarwm.nonfinite.v1", "step": step, "rank": rank, **content}))
    return path


def _plain(value: float) -> float | str:
    """JSON has no NaN: spell it."""
    return value if math.isfinite(value) else str(value)


@dataclass(frozen=True)
class Reporter:
    """Turns what breaks in one rank of a run into errors that name the rank, where it was, and what to change."""

    resolved: Resolved
    run_dir: Path
    rank: int
    world_size: int
    heartbeat: Heartbeat

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Add to a lost connection who is gone, and turn a lack of memory into MemoryExhausted."""
        try:
            yield
        except Exception as error:
            if is_lost_connection(error):
                lost = watchdog.describe_lost(self.run_dir, self.world_size, self.rank)
                raise DistributedError(f"rank {self.rank}: {_first_line(error)}; {lost}") from error
            known = error if isinstance(error, MemoryExhausted) else self.exhausted(error)
            if known is None or str(known).startswith("rank "):  # told by the rank that it happened to
                raise
            raise MemoryExhausted(f"rank {self.rank}: {known}") from error

    def exhausted(self, error: BaseException, batch: Batch | None = None) -> MemoryExhausted | None:
        """Return the error of a lack of memory, its facts written to `diagnostics/`; None for any other error."""
        if not is_out_of_memory(error) or isinstance(error, MemoryExhausted):
            return None
        peak, beat = memory_bytes(), self.heartbeat
        step = beat.step + (beat.phase in STEP_PHASES)
        shape = None if batch is None else list(batch.latents.shape)
        planned = planned_memory(self.resolved)
        values = {key: _at(self.resolved.values, key) for key, _ in LEVERS}
        content = {
            "schema": "solarwm.out-of-memory.v1",
            "step": step,
            "rank": self.rank,
            "phase": beat.phase,
            "error": str(error),
            "latents_shape": shape,
            "sample_ids": None if batch is None else list(batch.sample_ids),
            "settings": values,
            "measured": memory_facts(peak),
            "planned": planned,
        }
        path = self.run_dir / FOLDER / f"oom-step-{step:06d}-rank-{self.rank:05d}.json"
        where = f"; details in {path}"
        try:
            write_atomic(path, json_bytes(content))
        except (OSError, MemoryError) as failure:
            where = f"; {path} not written: {failure}"
        levers = ", ".join(f"{key} (now {values[key]}): {how}" for key, how in LEVERS)
        plan = (
            ""
            if isinstance(planned, str)
            else f", {sum(planned.values()) / 2**20:.0f} MiB of tensors predicted"
        )
        return MemoryExhausted(
            f"out of memory in {place({'phase': beat.phase, 'step': beat.step})}: {_first_line(error)}; peak {peak / 2**20:.0f} MiB{plan}"
            f"{f', latents {shape}' if shape else ''}; what lowers it: {levers}{where}"
        )


def is_lost_connection(error: BaseException) -> bool:
    """True if a collective broke: ours say so, those inside a sharded network raise what the transport says.

    Ranks that merely disagree raise a DistributedError, too, but have lost nobody.
    """
    if isinstance(error, DistributedError):
        return isinstance(error.__cause__, RuntimeError)
    transport = re.search(r"\bgloo\b|NCCL|[Cc]onnection (closed|reset)", str(error))
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or transport is not None)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def memory_facts(peak_bytes: int) -> dict[str, Any]:
    """Return what this process used and could have had, in bytes; with CUDA also the allocator's own summary."""
    import psutil

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    facts: dict[str, Any] = {
        "peak_bytes": peak_bytes,
        "resident_bytes": psutil.Process().memory_info().rss,
        "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "address_space_limit_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "host": environment.memory(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        facts["cuda"] = {"free_bytes": free, "total_bytes": total, "summary": torch.cuda.memory_summary()}
    return facts


def planned_memory(resolved: Resolved) -> dict[str, int] | str:
    """Return the bytes of one process by part as predicted for this configuration, or why there is no prediction."""
    from solarwm_lib.estimate import memory_plan

    try:
        return memory_plan(resolved)
    except Exception as error:  # a report about something else must not fail over it
        return f"{type(error).__name__}: {error}"


def _at(values: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values.get(part, {}) if isinstance(values, Mapping) else {}
    return values
