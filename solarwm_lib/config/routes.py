"""The one registry of routes: it answers `solarwm config routes` and it is what configurations are checked against.

A route is (family, stage, causal mode, objective, variant). Facts: operations.md 2.1 to 2.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from solarwm_lib.runtime.errors import ConfigError

FAMILY_ALIASES = {
    "wan22_ti2v_5b": "wan22_ti2v_5b",
    "wan2.2-ti2v-5b": "wan22_ti2v_5b",
    "wan22_i2v_a14b": "wan22_i2v_a14b",
    "wan2.2-i2v-a14b": "wan22_i2v_a14b",
    "ltx25_video": "ltx25_video",
    "ltx-2.5": "ltx25_video",
    "minimax_h3": "minimax_h3",
    "minimax-h3": "minimax_h3",
}
FAMILIES = tuple(dict.fromkeys(FAMILY_ALIASES.values()))


@dataclass(frozen=True)
class Route:
    """One supported combination and the frame counts, data encodings and sizes it was released with."""

    family: str
    stage: str
    causal_mode: str
    objective: str
    variant: str
    actions: tuple[str, ...]
    frames: tuple[tuple[int, int], ...]  # (pixel frames, latent frames) of the released profiles
    encodings: tuple[str, ...]
    resolutions: tuple[tuple[int, int], ...]  # (H, W) in pixels
    solvers: tuple[tuple[str, str], ...] = ()  # legal (mode, solver) of validation and inference passes
    note: str = ""
    runs: bool = False  # this version executes it; otherwise only its configurations are checked

    @property
    def key(self) -> str:
        """`family:stage:causal_mode:objective[:variant]`."""
        text = f"{self.family}:{self.stage}:{self.causal_mode}:{self.objective}"
        return f"{text}:{self.variant}" if self.variant else text

    @property
    def pixel_frames(self) -> tuple[int, ...]:
        return tuple(pixel for pixel, _ in self.frames)


_5B, _A14B, _LTX, _H3 = FAMILIES
_TRAIN_INFER = ("train", "infer")
_FULL = (("bidirectional", "unipc"),)
_480P, _H3_SIZE, _LTX_SIZE = (480, 864), (768, 1344), (512, 768)
_WAN81, _WAN153, _H3_158, _LTX153 = (81, 21), (153, 39), (158, 47), (153, 20)

ROUTES: tuple[Route, ...] = (
    Route(_5B, "stage0p5", "bidirectional", "flow_matching", "", _TRAIN_INFER, (_WAN81, _WAN153),
          ("online", "preencoded"), (_480P, (704, 1280)), _FULL, "704x1280 only preencoded, 153 frames", runs=True),
    Route(_5B, "stage1", "teacher_forcing", "flow_matching", "", _TRAIN_INFER, (_WAN81,), ("online",), (_480P,),
          (("autoregressive", "unipc"),), "rollout up to 60 latent frames (237 pixel frames)", runs=True),
    Route(_5B, "stage1", "teacher_forcing", "anyflow_forward_map", "v1_5", _TRAIN_INFER, (_WAN81,), ("online",),
          (_480P,), (("autoregressive", "flowmap"),), "rollout up to 60 latent frames (237 pixel frames)", runs=True),
    Route(_5B, "stage2", "self_gradient_forcing", "flow_matching", "", _TRAIN_INFER, (_WAN81,), ("online",),
          (_480P,), (("autoregressive", "self_forcing"),), "60 latent frame rollout; infer also camera length", runs=True),
    Route(_A14B, "stage0p5", "bidirectional", "flow_matching", "", _TRAIN_INFER, (_WAN81, _WAN153),
          ("online", "preencoded"), ((480, 832),), _FULL, "preencoded: 153 frames", runs=True),
    Route(_LTX, "stage0p5", "bidirectional", "native_rectified_flow", "", _TRAIN_INFER, (_LTX153,),
          ("online", "preencoded"), (_LTX_SIZE,), (("bidirectional", "stg_euler"),), "LoRA rank 384"),
    Route(_H3, "stage0p5", "bidirectional", "flow_matching", "", _TRAIN_INFER, (_H3_158,), ("preencoded",),
          (_H3_SIZE,), (("bidirectional", "euler"),), "LoRA rank 384"),
    Route(_H3, "stage1", "teacher_forcing", "anyflow_forward_map", "v1_5", _TRAIN_INFER, (_H3_158,),
          ("preencoded",), (_H3_SIZE,), (("autoregressive", "flowmap"),), "first 45 latent frames are targets"),
    Route(_H3, "stage2", "self_gradient_forcing", "flow_matching", "", _TRAIN_INFER, (_H3_158,), ("preencoded",),
          (_H3_SIZE,), (("autoregressive", "self_forcing"),), "50 latent frame rollout, 47 supervised"),
    Route(_5B, "preencode", "none", "none", "", ("preencode",), (_WAN81, _WAN153), ("online",),
          (_480P, (704, 1280)), note="704x1280: 153 frames", runs=True),
    Route(_A14B, "preencode", "none", "none", "", ("preencode",), (_WAN153,), ("online",), ((480, 832),), runs=True),
    Route(_LTX, "preencode", "none", "none", "", ("preencode",), (_LTX153,), ("online",), (_LTX_SIZE,)),
    Route(_H3, "preencode", "none", "none", "", ("preencode",), (_H3_158,), ("online",), (_H3_SIZE,)),
)  # fmt: skip
_BY_KEY = {route.key: route for route in ROUTES}


def allowed_keys(family: str, action: str) -> list[str]:
    """Keys of the routes of `family` that know `action`."""
    return [route.key for route in ROUTES if route.family == family and action in route.actions]


def route_for(config: Any) -> Route:
    """The route of a `RunConfig`; `ConfigError` lists the allowed keys of the family otherwise."""
    family, action = config.model.family, config.action
    if action == "preencode":
        return _BY_KEY[f"{family}:preencode:none:none"]
    train = config.train
    parts = [family, train.stage, train.causal_mode, train.objective, train.objective_variant]
    key = ":".join(part for part in parts if part)
    route = _BY_KEY.get(key)
    if route is not None and action in route.actions:
        return route
    missing = [f"train.{name}" for name in ("stage", "causal_mode", "objective") if not getattr(train, name)]
    what = f"{' and '.join(missing)} not set" if missing else f"unsupported route {key}"
    raise ConfigError(f"{what}; routes of {family}: {', '.join(allowed_keys(family, action))}; "
                      "change train.stage, causal_mode, objective, objective_variant")  # fmt: skip


def table() -> list[dict[str, Any]]:
    """One JSON-able row per route, in registry order."""
    return [
        {
            "key": route.key,
            "family": route.family,
            "stage": route.stage,
            "causal_mode": route.causal_mode,
            "objective": route.objective,
            "variant": route.variant,
            "actions": list(route.actions),
            "frames": [{"pixel": pixel, "latent": latent} for pixel, latent in route.frames],
            "encodings": list(route.encodings),
            "resolutions": [{"height": height, "width": width} for height, width in route.resolutions],
            "runs": route.runs,
            "note": route.note,
        }
        for route in ROUTES
    ]


def format_table() -> str:
    """The table as aligned text, one line per route."""
    header = ("ROUTE", "ACTIONS", "FRAMES pixel>latent", "ENCODING", "HxW", "RUNS", "NOTE")
    rows = [header] + [
        (
            route.key,
            ",".join(route.actions),
            " ".join(f"{pixel}>{latent}" for pixel, latent in route.frames),
            ",".join(route.encodings),
            " ".join(f"{height}x{width}" for height, width in route.resolutions),
            "yes" if route.runs else "checked only",
            route.note,
        )
        for route in ROUTES
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join(lines)
