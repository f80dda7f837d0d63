"""What guidance leads away from: the released negative prompts (spec wan22 4.3, 5.4) and their embedding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from solarwm_lib.runtime.errors import ArtifactError

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved
    from solarwm_lib.training.sources import Source

# Wan's default, 28 terms. Stage2 leaves out those that describe hands, faces, bodies and crowds.
_ALWAYS = (
    "色调艳丽", "过曝", "静态", "细节模糊不清", "字幕", "风格", "作品", "画作", "画面", "静止", "整体发灰", "最差质量",
    "低质量", "JPEG压缩残留", "丑陋的", "残缺的",
)  # fmt: skip
STAGE1 = "，".join(
    (
        *_ALWAYS, "多余的手指", "画得不好的手部", "画得不好的脸部", "畸形的", "毁容的", "形态畸形的肢体", "手指融合",
        "静止不动的画面", "杂乱的背景", "三条腿", "背景人很多", "倒着走",
    )
)  # fmt: skip
STAGE2 = "，".join((*_ALWAYS, "形态畸形的肢体", "静止不动的画面", "杂乱的背景"))
EMBEDDING_KEY = "negative_prompt_embeds"


def negative_prompt(resolved: Resolved) -> str | None:
    """Return the text that the run's objective leads away from, None if it has no guidance."""
    train = resolved.config.train
    if train.anyflow is not None and train.anyflow.guidance_scale != 1:
        return train.anyflow.negative_prompt or STAGE1
    forcing = train.self_gradient_forcing
    if forcing is not None and (forcing.real_guidance_scale or forcing.fake_guidance_scale):
        return forcing.negative_prompt or STAGE2
    return None


def embedding_file(resolved: Resolved) -> Path | None:
    """Return the file of a precomputed embedding, None if the text encoder makes it. ArtifactError if it is missing."""
    anyflow = resolved.config.train.anyflow
    if anyflow is None or not anyflow.negative_embedding or negative_prompt(resolved) is None:
        return None
    path = Path(resolved.config.model.base_path) / anyflow.negative_embedding
    if not path.is_file():
        raise ArtifactError(
            f"{path}: no such file; train.anyflow.negative_embedding is relative to model.base_path, or empty to use the text "
            "encoder"
        )
    return path


def negative_embeds(resolved: Resolved, source: Source, device: torch.device) -> torch.Tensor | None:
    """Return the float32 embedding `[1,L,D]` of the run's negative prompt on `device`, None if it has no guidance."""
    text = negative_prompt(resolved)
    if text is None:
        return None
    path = embedding_file(resolved)
    if path is not None:
        embedding = read_embedding(path, resolved.config.model.text_length, _text_dim(resolved))
    else:
        embedding = source.prompt(text)  # type: ignore[attr-defined]  # Stage1 and Stage2 train from raw clips
    return embedding[None].to(device)


def read_embedding(path: Path, length: int, dim: int) -> torch.Tensor:
    """Return the float32 embedding `[length, dim]` of a released file: a mapping with `[L,dim]` or `[1,L,dim]`, L <= length.

    Rows beyond L are zero, as the text encoder leaves them. ArtifactError for anything else; nothing but tensors is unpickled.
    """
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ArtifactError(f"{path}: cannot be read as tensors ({type(error).__name__})") from error
    found = held.get(EMBEDDING_KEY) if isinstance(held, dict) else None
    if not isinstance(found, torch.Tensor):
        keys = sorted(map(str, held)) if isinstance(held, dict) else type(held).__name__
        raise ArtifactError(f"{path}: holds {keys}, expected a tensor {EMBEDDING_KEY}")
    rows = found[0] if found.ndim == 3 and len(found) == 1 else found
    if rows.ndim != 2 or rows.shape[1] != dim or not 1 <= rows.shape[0] <= length:
        raise ArtifactError(
            f"{path}: {EMBEDDING_KEY} is {list(found.shape)}, the model takes [up to {length}, {dim}]; check "
            "train.anyflow.negative_embedding and model.base_path"
        )
    return torch.cat([rows.float(), rows.new_zeros(length - len(rows), dim, dtype=torch.float32)])


def _text_dim(resolved: Resolved) -> int:
    from solarwm_lib.config.architectures import load_architecture

    return int(load_architecture(resolved.config.model.architecture)["transformer"]["text_dim"])
