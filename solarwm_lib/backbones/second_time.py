"""The second time r of a flow-map model (AnyFlow v1.5), spec wan22 4.3: e(t, r) = (1 - g) time(t) + g delta(r), g = 0.25.

`delta` starts as a copy of the time MLP, so that r = t is the flow-matching model to the bit. It embeds r itself, not t - r.
Its four tensors are `condition_embedder.delta_embedder.linear_{1,2}.{weight,bias}`.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding
from safetensors import safe_open
from torch import Tensor, nn

from . import attention

GATE = 0.25
PREFIX = "condition_embedder.delta_embedder."
TENSORS = frozenset(
    f"{PREFIX}{layer}.{kind}" for layer in ("linear_1", "linear_2") for kind in ("weight", "bias")
)


class TwoTimeEmbedding(WanTimeTextImageEmbedding):
    """diffusers' condition embedder with a second time MLP, `delta_embedder`; r comes with the placement of the call."""

    def forward(
        self,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        timestep_seq_len: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return diffusers' (time `[B,l,dim]`, its projection, text, image) for t `[B*l]` of this rank's tokens and the call's r, else r = t."""
        placement = attention.current_placement()
        r = None if placement is None else placement.second_times
        time = self.time_embedder(self._sinusoid(timestep, timestep_seq_len))
        delta = self.delta_embedder(self._sinusoid(timestep if r is None else r.flatten(), timestep_seq_len))
        # lerp is time + g (delta - time): exactly `time` where both are equal.
        mixed = torch.lerp(time, delta, GATE).type_as(encoder_hidden_states)
        text = self.text_embedder(encoder_hidden_states)
        if encoder_hidden_states_image is not None:
            encoder_hidden_states_image = self.image_embedder(encoder_hidden_states_image)
        return mixed, self.time_proj(self.act_fn(mixed)), text, encoder_hidden_states_image

    def _sinusoid(self, times: Tensor, tokens: int | None) -> Tensor:
        waves = self.timesteps_proj(times)
        if tokens is not None:
            waves = waves.unflatten(0, (-1, tokens))
        return waves.to(self.time_embedder.linear_1.weight.dtype)


def install(transformer: nn.Module) -> None:
    """Give a diffusers WanTransformer3DModel the second time, as a copy of the first unless it has one already."""
    embedder = transformer.condition_embedder
    if isinstance(embedder, TwoTimeEmbedding):
        return
    embedder.__class__ = (
        TwoTimeEmbedding  # the same module with one more child: names and weights stay diffusers'
    )
    embedder.delta_embedder = deepcopy(embedder.time_embedder)


def copy_time(transformer: nn.Module) -> None:
    """Set the second time MLP to the first again, after loading weights that have no second one."""
    embedder = transformer.condition_embedder
    embedder.delta_embedder.load_state_dict(embedder.time_embedder.state_dict())


def load(transformer: nn.Module, folder: Path) -> None:
    """Fill the second time MLP from the safetensors files of `folder`, which hold its four tensors."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in TENSORS & set(tensors.keys())}
    state = {name.removeprefix(PREFIX): value for name, value in found.items()}
    transformer.condition_embedder.delta_embedder.load_state_dict(state)
