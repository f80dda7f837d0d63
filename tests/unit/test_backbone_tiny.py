"""The tiny world's assets: reproducible, complete, and a codec good enough to see the room."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from backbone_cases import model_section

from solarwm_lib import artifacts
from solarwm_lib.backbones import tiny
from solarwm_lib.backbones.codec import load_codec
from solarwm_lib.backbones.text import TextEncoder, clean_prompt
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.data.room import Room
from solarwm_lib.data.synthetic import camera_path

ARCHITECTURE = yaml.safe_load(
    (Path(__file__).parents[2] / "config" / "models" / "wan22-tiny.yaml").read_text()
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    out = tmp_path_factory.mktemp("assets") / "tiny base"
    started = time.process_time()
    tiny.build_tiny_assets(out, ARCHITECTURE, seed=0)
    assert time.process_time() - started < 30
    return out


def room_clip(seed):
    frames = Room(10_000 + seed).render(camera_path(33, "held-out", seed), 64, 96)
    return torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1


def psnr(error):
    return 10 * torch.log10(4 / error.square().mean()).item()


def test_the_folder_is_a_verified_artifact_with_every_part(assets):
    artifact = artifacts.verify(assets, deep=True)
    assert artifact.schema == tiny.SCHEMA
    parts = {member.path.split("/")[0] for member in artifact.members}
    assert {"transformer", "vae", "text_encoder", "tokenizer", "scheduler", "model_index.json"} <= parts


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(assets, tmp_path):
    tiny.build_tiny_assets(tmp_path / "again", ARCHITECTURE, seed=0)
    digests = [
        {m.path: m.sha256 for m in artifacts.read(path).members} for path in (assets, tmp_path / "again")
    ]
    assert digests[0] == digests[1]
    transformers = [tiny.build_transformer(ARCHITECTURE, seed) for seed in (0, 1)]
    assert not torch.equal(*(t.patch_embedding.weight for t in transformers))


def test_a_lost_marker_is_issued_again_without_rebuilding(assets, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(assets, copy)
    marker = (copy / artifacts.MARKER).read_bytes()
    (copy / artifacts.MARKER).unlink()
    tiny.build_tiny_assets(copy, ARCHITECTURE, seed=0)
    assert (copy / artifacts.MARKER).read_bytes() == marker


def test_building_leaves_torch_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    tiny.build_transformer(ARCHITECTURE, 0)
    assert torch.equal(torch.rand(1), expected)


def test_the_codec_shows_unseen_rooms_and_scales_latents_to_one(assets):
    codec = load_codec(assets)
    clips = [room_clip(seed) for seed in range(4)]
    latents = [codec.encode(clip) for clip in clips]
    errors = torch.cat([codec.decode(z) - clip for z, clip in zip(latents, clips, strict=True)])
    still = torch.cat([clip[:, :, :1] - clip for clip in clips])
    assert psnr(errors[:, :, 0]) > 28
    assert psnr(errors) > psnr(still) + 10
    assert 0.8 < torch.cat(latents).std().item() < 1.2
    assert len(set(codec.vae.config.latents_std)) == 1 and set(codec.vae.config.latents_mean) == {0.0}


def test_the_group_basis_is_orthonormal_and_a_still_clip_keeps_its_latent(assets):
    codec = load_codec(assets)
    basis = codec.vae.group_basis
    torch.testing.assert_close(basis.T @ basis, torch.eye(48), rtol=0, atol=1e-4)
    still = room_clip(0)[:, :, :1].expand(-1, -1, 9, -1, -1)
    latents = codec.encode(still)
    assert (latents[:, 1] - latents[:, 0]).square().mean().sqrt() < 0.25 * latents.std()
    torch.testing.assert_close(latents[:, 1], latents[:, 2])


def test_the_head_starts_at_zero_and_every_part_loads(assets):
    model = Wan22.from_pretrained(assets, ARCHITECTURE, model_section())
    assert 3.5e6 < sum(parameter.numel() for _, parameter in model.trainable()) < 4.5e6
    assert not model.transformer.proj_out.weight.any() and not model.transformer.proj_out.bias.any()


def test_prompts_are_padded_with_exact_zeros_and_any_text_encodes(assets):
    text = TextEncoder.from_pretrained(assets, text_length=ARCHITECTURE["text"]["text_length"])
    short, foreign, long = text.encode(["a room", "ein Zimmer – 部屋 🏠", "a red wall and a door " * 20])
    assert short.shape == (16, 64)
    used = short.abs().sum(-1) > 0
    assert used[:2].all() and not used[8:].any()
    assert foreign.isfinite().all() and (long.abs().sum(-1) > 0).all()
    assert torch.equal(text.encode(["a  room\n"])[0], short)


def test_prompt_cleaning():
    assert clean_prompt("  a &amp;amp; b\n\t c  ") == "a & b c"
    assert clean_prompt("cafÃ©") == "café"


def test_a_damaged_text_encoder_is_refused(assets, tmp_path):
    from safetensors.torch import load_file, save_file

    from solarwm_lib.runtime.errors import ArtifactError

    shutil.copytree(assets, tmp_path / "copy")
    file = tmp_path / "copy" / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("encoder.final_layer_norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="final_layer_norm"):
        TextEncoder.from_pretrained(tmp_path / "copy", 16)


def test_calibration_clips_are_frames_of_rooms():
    clip = next(tiny.calibration_clips(0))
    assert clip.shape == (33, 64, 96, 3) and clip.dtype == np.uint8
