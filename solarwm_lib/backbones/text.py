"""UMT5 prompt embeddings, spec wan22 1.3: fixed length, pad and truncate, rows beyond the prompt exactly zero."""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ftfy
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, UMT5EncoderModel
from transformers.utils import logging

from ..runtime.errors import ArtifactError
from .codec import folder_digest

PARTS = ("text_encoder", "tokenizer")


def clean_prompt(prompt: str) -> str:
    """Repair Unicode, unescape HTML twice, strip and collapse white space, as the released pipelines do."""
    text = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", text.strip()).strip()


def text_identity(base_path: str | Path) -> str:
    """Return the digest of a pipeline folder's text encoder and tokenizer: equal ones give equal embeddings."""
    parts = [folder_digest(Path(base_path) / name) for name in PARTS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Keep transformers' own progress bar out of ours while weights load."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class TextEncoder:
    """A frozen text encoder with its tokenizer and the fixed prompt length of the model."""

    def __init__(self, encoder: nn.Module, tokenizer: object, text_length: int) -> None:
        self.encoder = encoder.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.text_length = text_length

    @classmethod
    def from_pretrained(
        cls, base_path: str | Path, text_length: int = 512, dtype: torch.dtype = torch.float32
    ) -> TextEncoder:
        """Load `text_encoder/` and `tokenizer/` of a diffusers pipeline folder."""
        base = Path(base_path)
        for part in PARTS:
            if not (base / part).is_dir():
                raise ArtifactError(
                    f"no {part} at {base / part}; set model.base_path to a diffusers pipeline folder"
                )
        with quiet_progress():
            encoder, info = UMT5EncoderModel.from_pretrained(
                base / "text_encoder", dtype=dtype, output_loading_info=True
            )
        # The input embedding is stored once and shared with the encoder stack.
        missing = sorted(set(info["missing_keys"]) - {"encoder.embed_tokens.weight"})
        if missing or info["unexpected_keys"]:
            raise ArtifactError(
                f"{base / 'text_encoder'}: missing {missing[:3]}, unexpected {sorted(info['unexpected_keys'])[:3]} tensors"
            )
        return cls(encoder, AutoTokenizer.from_pretrained(base / "tokenizer"), text_length)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Return embeddings `[B, text_length, dim]` of the cleaned prompts."""
        tokens = self.tokenizer(
            [clean_prompt(prompt) for prompt in prompts],
            padding="max_length",
            max_length=self.text_length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        device = next(self.encoder.parameters()).device
        mask = tokens.attention_mask.to(device)
        states = self.encoder(tokens.input_ids.to(device), mask).last_hidden_state
        return torch.where(mask[..., None].bool(), states, 0.0)
