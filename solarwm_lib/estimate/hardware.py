"""What the named GPUs have: data-sheet numbers, not measurements."""

from __future__ import annotations

from dataclasses import dataclass

from solarwm_lib.config.architectures import did_you_mean
from solarwm_lib.runtime.errors import ConfigError

GIB = 2**30
# Left to the CUDA context, NCCL's buffers and the allocator's fragmentation. An assumption.
RESERVED_SHARE, RESERVED_BYTES = 0.06, 3 * GIB // 2


@dataclass(frozen=True)
class Gpu:
    """`memory` in bytes, `bfloat16` and `float32` dense peak in FLOP/s, `bandwidth` of the memory in bytes/s."""

    name: str
    memory: int
    bfloat16: float
    float32: float
    bandwidth: float

    @property
    def usable(self) -> int:
        """Bytes that tensors may take."""
        return int(self.memory * (1 - RESERVED_SHARE)) - RESERVED_BYTES

    def peak(self, lower: bool) -> float:
        return self.bfloat16 if lower else self.float32


def _gpu(name: str, gib: float, bfloat16: float, float32: float, bandwidth: float) -> Gpu:
    return Gpu(name, int(gib * GIB), bfloat16 * 1e12, float32 * 1e12, bandwidth * 1e12)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-80", 80.0, 312, 19.5, 2.04),
        _gpu("h100-80", 79.6, 989, 67, 3.35),
        _gpu("h200-141", 140.4, 989, 67, 4.8),
        _gpu("b200-180", 179.0, 2250, 80, 8.0),
        _gpu("l40s-48", 45.0, 362, 91.6, 0.864),
        _gpu("rtx4090-24", 24.0, 165, 82.6, 1.01),
        _gpu("rtx5090-32", 31.8, 209, 104.8, 1.79),
    )
}
DEFAULT = "h100-80"


def gpu(name: str) -> Gpu:
    """The GPU of that name; ConfigError lists the known ones."""
    if name not in GPUS:
        raise ConfigError(f"--gpu: found {name}{did_you_mean(name, GPUS)}, expected one of {', '.join(GPUS)}")
    return GPUS[name]
