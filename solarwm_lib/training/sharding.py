"""Parameters in parts: FSDP2 over a device mesh, block by block (design 7, spec wan22 8).

Masters, gradients, optimizer slots and average exist once per copy of the network, each process with its rows of every tensor
(DTensor, `Shard(0)`); a block's whole weights exist while it computes. A forward or backward pass is then a sequence of collectives:
every rank of the mesh must make the same ones. Gradients come out as means over all processes, in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from solarwm_lib.training.topology import Topology, mesh_shape


@dataclass(frozen=True)
class Layout:
    """Over which processes a network's parameters lie in parts (`mesh` None: whole on each), and in which precision they compute."""

    mesh: DeviceMesh | None = None
    compute: torch.dtype | None = None

    @property
    def is_sharded(self) -> bool:
        """True if forward and backward are collectives of all ranks."""
        return self.mesh is not None

    def apply(self, transformer: nn.Module) -> None:
        """Cut the parameters of `transformer` into parts, each block a unit; those on the meta device stay without memory.

        Inputs are not cast: timesteps and cameras stay float32, and autocast decides where lower precision is used.
        """
        if self.mesh is None:
            return
        # Velocities are views of the network's output, which nothing changes in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        policy = MixedPrecisionPolicy(
            param_dtype=self.compute, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in transformer.blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        fully_shard(transformer, mesh=self.mesh, mp_policy=policy)


WHOLE = Layout()


def layout(strategy: str, topology: Topology, device: torch.device, precision: str) -> Layout:
    """Return the layout of `train.strategy`; every rank calls it at the same point. ConfigError as `mesh_shape`."""
    shape = mesh_shape(
        strategy, topology.world_size, topology.local_world_size, topology.sequence_parallel_size
    )
    if not shape.shards:
        return WHOLE
    compute = torch.bfloat16 if precision == "bfloat16" else None
    if shape.replicate == 1:
        return Layout(init_device_mesh(device.type, (shape.parts,), mesh_dim_names=("shard",)), compute)
    sizes, names = (shape.replicate, shape.parts), ("replicate", "shard")
    return Layout(init_device_mesh(device.type, sizes, mesh_dim_names=names), compute)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, sharing its memory; the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locals_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this process's parts by name."""
    return {name: local(tensor) for name, tensor in tensors.items()}


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all tensors together as a 0-d float32 tensor, the same on every rank that holds parts of them.

    The squares of the parts are added in float64. NaN or inf in any part shows in it, on every rank.
    """
    first = tensors[0]
    parts = [local(tensor) for tensor in tensors]
    norms = torch.stack(torch._foreach_norm([part.float() for part in parts]))
    if not isinstance(first, DTensor):
        return torch.linalg.vector_norm(norms)
    total = norms.double().square().sum()
    mesh = first.device_mesh
    dist.all_reduce(total, group=mesh.get_group("shard"))
    return total.sqrt().float()


def held(tensor: Tensor) -> slice:
    """Return the rows of the whole tensor that this process holds; all of a whole tensor."""
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0] if tensor.dim() else 1)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return slice(offset[0], offset[0] + shape[0])
