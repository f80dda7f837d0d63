"""Architecture files `config/models/<name>.yaml`: network arguments, codec strides, text encoder shape."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from solarwm_lib.config.yaml12 import parse_yaml
from solarwm_lib.runtime.errors import ConfigError

CONFIG_ROOT = Path(__file__).resolve().parents[2] / "config"
REQUIRED = ("family", "transformer", "latent_channels", "temporal_stride", "spatial_stride", "text")


def architecture_names() -> list[str]:
    """Names of all architecture files, sorted."""
    return sorted(path.stem for path in (CONFIG_ROOT / "models").glob("*.yaml"))


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the closest of `known`, or nothing; to be appended to what was found."""
    close = get_close_matches(found, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


@cache
def load_architecture(name: str) -> dict[str, Any]:
    """The mapping of one file; `ConfigError` names the nearest known architecture. Treat it as read-only."""
    if name not in architecture_names():
        known = architecture_names()
        raise ConfigError(
            f"model.architecture: found {name!r}{did_you_mean(name, known)}, expected one of {', '.join(known)}, the files "
            f"of {CONFIG_ROOT / 'models'}"
        )
    path = CONFIG_ROOT / "models" / f"{name}.yaml"
    architecture = parse_yaml(path.read_text("utf-8"), str(path))
    missing = [key for key in REQUIRED if not isinstance(architecture, dict) or key not in architecture]
    if missing:
        raise ConfigError(f"{path}: missing {', '.join(missing)}")
    return dict(architecture)
