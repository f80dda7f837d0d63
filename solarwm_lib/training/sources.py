"""Where encoded clips come from: pixels encoded while training, or latents stored by `solarwm preencode`.

A source reads a planned sample in any thread (`read`) and makes tensors of it in the trainer's thread (`encode`). Clips
and captions are encoded one at a time, because a kernel may round differently for another batch size and a cached
latent must equal a fresh one bit for bit; so do float32 latents that were stored.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from solarwm_lib.data.clip import Clips
from solarwm_lib.data.sampling import PlannedSample
from solarwm_lib.inference.generate import to_video
from solarwm_lib.runtime.errors import DataError

if TYPE_CHECKING:
    from solarwm_lib.artifacts import Artifact
    from solarwm_lib.backbones.codec import Codec
    from solarwm_lib.backbones.text import TextEncoder
    from solarwm_lib.data.dataset import RawClips, Sample
    from solarwm_lib.data.latents import LatentClips, LatentSample, StoredTensor
    from solarwm_lib.preencode.contract import EncoderContract

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
PROMPT_CACHE_BYTES = 2**30
# As `backbones.codec.folder_digest` and `backbones.text.text_identity` take them; those modules load the networks' code.
IDENTITY_SUFFIXES = (".json", ".safetensors", ".bin", ".model", ".txt")
TEXT_PARTS = ("text_encoder", "tokenizer")
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}


class ByteCache(Generic[K, V]):
    """Least-recently-used cache bounded by the bytes of its values; may be shared by threads."""

    def __init__(self, capacity_bytes: int, size_of: Callable[[V], int]) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._size_of = size_of
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """Return the value of `key`, now the most recently used one, or None."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Keep `value`, dropping the longest unused ones; a value larger than the whole cache is not kept."""
        size = self._size_of(value)
        with self._lock:
            if key in self._values or size > self.capacity_bytes:
                return
            self._values[key] = value
            self.used_bytes += size
            while self.used_bytes > self.capacity_bytes:
                self.used_bytes -= self._size_of(self._values.popitem(last=False)[1])


@dataclass(frozen=True)
class EncodedClip:
    """A clip as the objective sees it, on the CPU.

    latents `[T,C,h,w]`, prompt_embeds `[L,D]`, w2c `[T,4,4]`, intrinsics `[3,3]`, image_condition (A14B's y) `[T,4+C,h,w]`.
    """

    sample_id: str
    start_frame: int
    caption: str
    latents: torch.Tensor
    prompt_embeds: torch.Tensor
    w2c: np.ndarray
    intrinsics: np.ndarray
    image_condition: torch.Tensor | None = None

    def bytes(self) -> int:
        """Return what keeping the clip costs, as if no other clip shared its prompt."""
        parts = (self.latents, self.prompt_embeds, self.w2c, self.intrinsics, self.image_condition)
        return sum(part.nbytes for part in parts if part is not None)


class Source(Protocol):
    """What batches are made from."""

    @property
    def clips(self) -> Clips[Any]: ...

    def read(self, planned: PlannedSample) -> Any:
        """Return the sample as it is stored, from any thread; raises CameraGuardError and SampleFailure."""

    def encode(self, sample: Any) -> EncodedClip:
        """Return tensors of what `read` returned."""


class OnlineSource:
    """Raw clips through the frozen codec and text encoder, which are on `device`.

    `anchor_only` encodes a clip's first frame alone; its other latents are zero. Stage2 needs no more. `image_conditioned`
    adds the image condition of I2V-A14B.
    """

    def __init__(
        self,
        clips: RawClips,
        codec: Codec,
        text: TextEncoder,
        device: torch.device,
        prompt_cache_bytes: int = PROMPT_CACHE_BYTES,
        anchor_only: bool = False,
        image_conditioned: bool = False,
    ) -> None:
        self.clips = clips
        self._anchor_only, self._image_conditioned = anchor_only, image_conditioned
        self._codec, self._text, self._device = codec, text, device
        self._prompts: ByteCache[str, torch.Tensor] = ByteCache(prompt_cache_bytes, lambda t: t.nbytes)

    def load(self, planned: PlannedSample) -> EncodedClip:
        """Return one planned sample, read and encoded."""
        return self.encode(self.read(planned))

    def read(self, planned: PlannedSample) -> Sample:
        """Return pixels, cameras and caption."""
        return self.clips.load(planned)

    def encode(self, sample: Sample) -> EncodedClip:
        """Return float32 latents `[T,C,h,w]`, prompt embeddings `[L,D]` and, if asked for, y `[T,4+C,h,w]`."""
        frames = sample.frames[:1] if self._anchor_only else sample.frames
        video = to_video(frames[None]).to(self._device)
        latents = self._codec.encode(video)[0].float().cpu()
        if self._anchor_only:
            latents = torch.cat([latents, latents.new_zeros(len(sample.w2c) - 1, *latents.shape[1:])])
        return EncodedClip(
            sample.sample_id,
            sample.start_frame,
            sample.caption,
            latents,
            self.prompt(sample.caption),
            sample.w2c,
            sample.intrinsics,
            self._condition(video) if self._image_conditioned else None,
        )

    def _condition(self, video: torch.Tensor) -> torch.Tensor:
        from solarwm_lib.backbones.image_condition import image_condition

        return image_condition(self._codec, video[:, :, :1], video.shape[2])[0].float().cpu()

    def prompt(self, caption: str) -> torch.Tensor:
        """Return the float32 embedding `[L,D]` of a text, on the CPU."""
        held = self._prompts.get(caption)
        if held is None:
            held = self._text.encode([caption])[0].float().cpu()
            self._prompts.put(caption, held)
        return held


class LatentSource:
    """Stored latents and prompt embeddings; neither a codec nor a text encoder is loaded."""

    def __init__(self, clips: LatentClips) -> None:
        self.clips = clips

    def load(self, planned: PlannedSample) -> EncodedClip:
        """Return one planned sample."""
        return self.encode(self.read(planned))

    def read(self, planned: PlannedSample) -> LatentSample:
        """Return the stored tensors, cameras and caption, all checked."""
        return self.clips.load(planned)

    def encode(self, sample: LatentSample) -> EncodedClip:
        """Return the stored tensors in their stored precision."""
        tensors = {name: to_tensor(stored) for name, stored in sample.tensors.items()}
        return EncodedClip(
            sample.sample_id,
            sample.start_frame,
            sample.caption,
            tensors["latents"],
            tensors["prompt_embeds"],
            sample.w2c,
            sample.intrinsics,
            tensors.get("i2v_y"),
        )


def to_tensor(stored: StoredTensor) -> torch.Tensor:
    """Return a tensor of its own memory with the bytes of a stored one."""
    data = torch.frombuffer(bytearray(stored.data), dtype=TORCH_DTYPES[stored.dtype])
    return data.reshape(stored.shape)


def check_encoders(contract: EncoderContract, assets: Artifact) -> None:
    """Raise DataError if latents were made by another codec or text encoder than the run's base weights hold.

    Validation decodes and prompts with those, so a model trained on the others' numbers would be judged by them. The
    digests that the assets' marker records are compared; a contract that names no encoders is not.
    """
    parts = [component_digest(assets, part) for part in TEXT_PARTS]
    text = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    for key, found in (("codec", component_digest(assets, "vae")), ("text_encoder", text)):
        if (there := contract.extras.get(key)) not in (None, found):
            raise DataError(
                f"data.latents_root: the latents were made by {key} {there[:16]}, model.base_path {assets.path} holds "
                f"{found[:16]}; encode the clips again or restore the base weights they were made with"
            )


def component_digest(assets: Artifact, folder: str) -> str:
    """Return `backbones.codec.folder_digest` of a component of published base weights, from recorded digests."""
    digest = hashlib.sha256()
    for member in sorted(assets.members, key=lambda member: member.path):
        parent, _, name = member.path.rpartition("/")
        if parent == folder and name.endswith(IDENTITY_SUFFIXES):
            digest.update(name.encode() + b"\0" + bytes.fromhex(member.sha256))
    return digest.hexdigest()
