"""Frame laws, image sizes and token counts of the four families, in integers.

Every part of the product that converts between pixel frames and latent frames asks here, so the cache, the trainer and
the sampler cannot disagree. Formulas: wan22.md 1.4, ltx25.md 2, minimax_h3.md 1.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from solarwm_lib.runtime.errors import ConfigError


@dataclass(frozen=True)
class FrameLaw:
    """Pixel frames come in groups: `offset + group * n` pixel frames encode to `latent_offset + latents * n` latents."""

    text: str
    group: int  # pixel frames a further group adds
    offset: int  # pixel frames beside the groups
    latents_per_group: int
    latent_offset: int
    minimum_groups: int

    def pixel(self, n: int) -> int:
        return self.offset + self.group * n

    def latent(self, n: int) -> int:
        return self.latent_offset + self.latents_per_group * n


# H3 needs one whole group: two latents (5 pixel frames) encode, but their decoder then has no chunk to decode.
_WAN = FrameLaw("4k+1", group=4, offset=1, latents_per_group=1, latent_offset=1, minimum_groups=0)
_LTX = FrameLaw("8k+1", group=8, offset=1, latents_per_group=1, latent_offset=1, minimum_groups=0)
_H3 = FrameLaw("17n+5, n >= 1", group=17, offset=5, latents_per_group=5, latent_offset=2, minimum_groups=1)
FRAME_LAWS: dict[str, FrameLaw] = {
    "wan22_ti2v_5b": _WAN,
    "wan22_i2v_a14b": _WAN,
    "ltx25_video": _LTX,
    "minimax_h3": _H3,
}


IMAGE_CONDITIONED = (
    "wan22_i2v_a14b",
)  # families whose first image comes beside the latents, not as latent 0
MASK_CHANNELS = 4  # of the image condition, before the latents of the image (wan22.md 1.5)


def frame_law(family: str) -> FrameLaw:
    """The law of `family`; `ConfigError` names the known families."""
    try:
        return FRAME_LAWS[family]
    except KeyError:
        raise ConfigError(
            f"model.family: found {family!r}, expected one of {', '.join(FRAME_LAWS)}"
        ) from None


def nearest_pixel_frames(family: str, pixel_frames: int, multiple_of: int = 1) -> tuple[int, ...]:
    """The legal pixel-frame counts just below and just above (or equal to) `pixel_frames`, ascending.

    Only counts whose latents are a multiple of `multiple_of` (the chunk of a causal stage) are legal then. One value
    is returned when `pixel_frames` is legal itself or lies below the smallest legal count.
    """
    law = frame_law(family)

    def legal(n: int) -> bool:
        return n >= law.minimum_groups and law.latent(n) % multiple_of == 0

    start = max(law.minimum_groups, (pixel_frames - law.offset) // law.group)
    below = next((n for n in range(start, law.minimum_groups - 1, -1) if legal(n)), None)
    if below is not None and law.pixel(below) == pixel_frames:
        return (pixel_frames,)
    # A multiple of the chunk occurs within `multiple_of` further groups whenever one exists at all.
    ahead = range(max(start, law.minimum_groups), start + multiple_of + 2)
    above = next((n for n in ahead if legal(n) and law.pixel(n) >= pixel_frames), None)
    found = {law.pixel(n) for n in (below, above) if n is not None}
    return tuple(sorted(found))


def latent_frames(family: str, pixel_frames: int) -> int:
    """Latent frames T that `pixel_frames` F encode to; `ConfigError` with both neighbours when F breaks the law."""
    law = frame_law(family)
    groups, rest = divmod(pixel_frames - law.offset, law.group)
    if rest or groups < law.minimum_groups:
        raise ConfigError(frames_message(family, pixel_frames))
    return law.latent(groups)


def pixel_frames(family: str, latent_frames: int) -> int:
    """Pixel frames that `latent_frames` T decode to; the inverse of `latent_frames` where that has one.

    H3 also decodes whole chunks (T divisible by 5) to 17 pixel frames each, as its 45 and 50 latent rollouts do.
    """
    law = frame_law(family)
    groups, rest = divmod(latent_frames - law.latent_offset, law.latents_per_group)
    if rest == 0 and groups >= law.minimum_groups:
        return law.pixel(groups)
    if law is _H3 and latent_frames > 0 and latent_frames % law.latents_per_group == 0:
        return law.group * latent_frames // law.latents_per_group
    raise ConfigError(
        f"latent frames: found {latent_frames}, which no clip of {family} has ({law.text} pixel frames)"
    )


def frames_message(
    family: str, found: int, released: Sequence[int] = (), key: str = "data.pixel_frames"
) -> str:
    """One line: what was found, the law, the two nearest legal counts, the counts the route was released with."""
    nearest = " or ".join(str(n) for n in nearest_pixel_frames(family, found))
    text = f"{key}: found {found}, expected {frame_law(family).text} for {family}; nearest: {nearest}"
    if released:
        text += f"; the released route uses {_listed(released)}"
    return text


def check_chunks(
    family: str, pixel_frames: int, latent_frames: int, chunk: int, released: Sequence[int]
) -> None:
    """Causal stages cut a clip into chunks of `chunk` latent frames; a remainder is refused with both neighbours."""
    if latent_frames % chunk == 0:
        return
    options = nearest_pixel_frames(family, pixel_frames, chunk)
    pairs = " or ".join(
        f"{n} ({frame_law(family).latent((n - frame_law(family).offset) // frame_law(family).group)}"
        f" latent frames)"
        for n in options
    )
    raise ConfigError(
        f"data.pixel_frames: found {pixel_frames} ({latent_frames} latent frames), expected latent frames divisible "
        f"by model.causal.chunk_latent_frames={chunk}; nearest: {pairs}; the released route uses {_listed(released)}"
    )


@dataclass(frozen=True)
class Geometry:
    """Sizes of one clip: pixels `[F,H,W]`, latents `[T,C,h,w]`, S tokens per latent frame."""

    pixel_frames: int
    height: int
    width: int
    latent_frames: int
    latent_channels: int
    latent_height: int
    latent_width: int
    tokens_per_latent_frame: int

    @property
    def tokens(self) -> int:
        """L = T * S."""
        return self.latent_frames * self.tokens_per_latent_frame


def condition_channels(family: str, latent_channels: int) -> int:
    """Channels of the image condition that the network takes beside its latents; 0 where latent 0 is the image."""
    return MASK_CHANNELS + latent_channels if family in IMAGE_CONDITIONED else 0


def size_multiples(architecture: dict[str, Any]) -> tuple[int, int]:
    """What H and W must be multiples of: spatial stride of the codec times the transformer's patch."""
    patch_height, patch_width = _patch(architecture)
    stride = int(architecture["spatial_stride"])
    return stride * patch_height, stride * patch_width


def latent_schema(family: str, height: int, pixel_frames: int) -> str | None:
    """Name of the layout of stored Wan latents, such as `solarwm.wan22_ti2v_5b.480p.153f.v1`; None for other families.

    The released 704-line size is called 720p. (spec operations 6.1, wan22 9.4)
    """
    if not family.startswith("wan22_"):
        return None
    return f"solarwm.{family}.{720 if height == 704 else height}p.{pixel_frames}f.v1"


def _patch(architecture: dict[str, Any]) -> tuple[int, int]:
    """Latents per token along H and W; diffusers gives (t, h, w) or, for LTX, one number for both."""
    patch = architecture["transformer"]["patch_size"]
    return (int(patch[1]), int(patch[2])) if isinstance(patch, list | tuple) else (int(patch), int(patch))


def check_size(
    architecture: dict[str, Any], height: int, width: int, released: Sequence[tuple[int, int]] = ()
) -> None:
    """Refuse H and W that the codec stride and the patch do not divide, each with the two nearest legal values."""
    problems = []
    for key, found, step in zip(
        ("height", "width"), (height, width), size_multiples(architecture), strict=True
    ):
        if found % step == 0:
            continue
        below, above = found // step * step, found // step * step + step
        nearest = f"{below} or {above}" if below else f"{above}"
        problems.append(f"data.{key}: found {found}, expected a multiple of {step}; nearest: {nearest}")
    if problems:
        if released:
            problems.append("the released route uses " + _listed([f"{h}x{w}" for h, w in released]))
        raise ConfigError("; ".join(problems))


def geometry(
    family: str, architecture: dict[str, Any], pixel_frames: int, height: int, width: int
) -> Geometry:
    """All sizes of one clip for an architecture mapping of `config/models/*.yaml`; refuses what does not divide."""
    check_size(architecture, height, width)
    patch_height, patch_width = _patch(architecture)
    stride = int(architecture["spatial_stride"])
    latent_height, latent_width = height // stride, width // stride
    return Geometry(
        pixel_frames=pixel_frames,
        height=height,
        width=width,
        latent_frames=latent_frames(family, pixel_frames),
        latent_channels=int(architecture["latent_channels"]),
        latent_height=latent_height,
        latent_width=latent_width,
        tokens_per_latent_frame=(latent_height // patch_height) * (latent_width // patch_width),
    )


def _listed(values: Sequence[object]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
