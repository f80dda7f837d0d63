"""Stored latents: what is read, and that every point at which a sample may contradict its run is checked."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_world import (
    FRAMES,
    SCHEMA,
    SIZES,
    encoder_contract,
    open_generation,
    safetensors,
    tensors_of,
    write_generation,
)

from solarwm_lib.data import camera, windows
from solarwm_lib.data.camera import CameraGuardError
from solarwm_lib.data.failures import SampleFailure
from solarwm_lib.data.latents import read_generation
from solarwm_lib.data.sampling import PlannedSample
from solarwm_lib.data.synthetic import camera_path
from solarwm_lib.data.tensors import StoredTensor, parse_safetensors
from solarwm_lib.runtime.errors import DataError


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_generation(tmp_path_factory.mktemp("g") / "latents")


def first(clips):
    return clips.load(PlannedSample(0, 0, 0, 0, 3, "x"))


def test_a_sample_holds_its_tensors_its_cameras_and_its_caption(root):
    clips = open_generation(root)
    clips.check()
    assert len(clips) == 3
    seen = set()
    for index in range(3):
        planned, rejected = clips.locate(index)
        sample = clips.load(planned)
        number = int(sample.sample_id.split("/")[0].split()[1])
        seen.add(number)
        assert rejected == () and sample.occurrence_id == planned.occurrence_id
        assert (sample.start_frame, sample.caption, sample.fps) == (3, f"room {number}", 16.0)
        latents = sample.tensors["latents"]
        assert (latents.dtype, latents.shape) == ("F32", (2, 48, 2, 2))
        np.testing.assert_array_equal(np.frombuffer(latents.data, "<f4"), float(number))
        expected = camera.relative_w2c(camera_path(20, number), [3, 4])
        np.testing.assert_array_equal(sample.w2c, expected)
        np.testing.assert_array_equal(sample.intrinsics, camera.fixed_intrinsics())
    assert seen == {0, 1, 2}


def test_released_rows_without_offsets_and_the_underscore_spelling_are_read(tmp_path):
    """The release lists members by suffix, spells its layout with underscores and writes bfloat16."""
    contract = encoder_contract(dtype="bfloat16")
    root = write_generation(
        tmp_path / "g",
        contract=contract,
        recorded=False,
        edit_block=lambda block: block.update(
            version=SCHEMA.replace(".", "_"), tensors_digest="of another kind"
        ),
    )
    sample = first(open_generation(root))
    assert sample.tensors["latents"].dtype == "BF16"
    np.testing.assert_array_equal(np.frombuffer(sample.tensors["latents"].data, "<u2"), 0x3F80)


def test_a14b_samples_carry_their_image_condition(tmp_path):
    contract = encoder_contract("wan22_i2v_a14b")
    root = write_generation(tmp_path / "a", 1, contract=contract)
    sample = first(open_generation(root, "wan22_i2v_a14b"))
    assert sample.tensors["i2v_y"].shape == (2, 4 + 48, 2, 2)
    with pytest.raises(
        DataError, match=r"model\.family: .*encoded for wan22_i2v_a14b, this run needs wan22_ti2v_5b"
    ):
        open_generation(root)
    spoil = {"i2v_y_shape": [2, 20, 2, 2]}
    root = write_generation(
        tmp_path / "b", 1, contract=contract, edit_block=lambda block: block.update(spoil)
    )
    with pytest.raises(SampleFailure, match=r"preencoding\.i2v_y_shape is \[2, 20, 2, 2\]"):
        first(open_generation(root, "wan22_i2v_a14b"))


def test_a_hashed_window_is_recognised_by_its_hash(tmp_path):
    """Ids without a window suffix are those of one hashed window per clip."""
    start = windows.hashed_start("clip 0", 20, FRAMES, FRAMES)

    def hashed(row):
        frames = list(range(start, start + FRAMES))
        row.update(sample_id="clip 0", start_frame=start, source_frame_indices=frames)

    assert first(open_generation(write_generation(tmp_path / "a", 1, edit_row=hashed))).sample_id == "clip 0"

    def elsewhere(row):
        frames = list(range(start + 1, start + 1 + FRAMES))
        row.update(sample_id="clip 0", start_frame=start + 1, source_frame_indices=frames)

    with pytest.raises(
        DataError, match=rf"at frame {start + 1} is neither named .* nor the hashed .*frame {start}\)"
    ):
        first(open_generation(write_generation(tmp_path / "b", 1, edit_row=elsewhere)))


def test_a_resampled_source_keeps_its_own_frames(tmp_path):
    def faster(row):
        row.update(fps=32.0, source_frame_indices=[3, 5, 7, 9, 11])

    def block(block):
        block.update(source_frame_last=11)

    root = write_generation(
        tmp_path / "g", 1, edit_row=faster, edit_manifest=lambda m: m["video"].update(fps=32.0)
    )
    sample = first(open_generation(root))
    np.testing.assert_array_equal(sample.w2c, camera.relative_w2c(camera_path(20, 0), [3, 5]))


BLOCK = [
    ("version", "solarwm.wan22_ti2v_5b.480p.5f.v1"),
    ("source_sample_id", "clip 9"),
    ("source_dataset", "other"),
    ("window_hash_namespace", "solarwm-latent-81f-v1"),
    ("start_frame", 4),
    ("source_frame_first", 4),
    ("source_frame_last", 8),
    ("pixel_frames", 9),
    ("latent_frames", 3),
    ("target_h", 64),
    ("target_w", True),
    ("dtype", "bfloat16"),
    ("latent_shape", [2, 16, 2, 2]),
    ("prompt_shape", None),
    ("encoder_contract_digest", "0" * 64),
    ("tensors_digest", "0" * 64),
    ("caption_source", "rewritten"),
    ("camera_source", "rebuilt"),
]


@pytest.mark.parametrize(("field", "value"), BLOCK)
def test_every_field_of_the_manifest_block_is_compared(tmp_path, field, value):
    root = write_generation(tmp_path / "g", 1, edit_block=lambda block: block.update({field: value}))
    with pytest.raises(SampleFailure, match=rf"'clip 0/latent-5f-w00'.*preencoding\.{field} is ") as caught:
        first(open_generation(root))
    assert caught.value.reason == "tensors" and caught.value.exit_code == 3
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("index", "count"), [(1, 1), (-1, 1), (0, 0), (True, 2), (0.0, 1), (None, 1)], ids=str
)
def test_a_window_that_is_none_is_refused(tmp_path, index, count):
    root = write_generation(
        tmp_path / "g", 1, edit_block=lambda block: block.update(window_index=index, window_count=count)
    )
    with pytest.raises(SampleFailure, match="window_index is"):
        first(open_generation(root))


def test_an_id_that_names_another_window_is_refused(tmp_path):
    root = write_generation(
        tmp_path / "g", 1, edit_block=lambda block: block.update(window_index=1, window_count=2)
    )
    with pytest.raises(SampleFailure, match="window 1 of 2 at frame 3 is neither named by the id"):
        first(open_generation(root))


def test_a_manifest_without_block_or_with_another_rate_is_refused(tmp_path):
    root = write_generation(tmp_path / "a", 1, edit_manifest=lambda m: m.pop("preencoding"))
    with pytest.raises(SampleFailure, match="no 'preencoding' block"):
        first(open_generation(root))
    root = write_generation(tmp_path / "b", 1, edit_manifest=lambda m: m["video"].update(fps=24.0))
    with pytest.raises(SampleFailure, match=r"video\.fps is 24\.0, the index says 16\.0"):
        first(open_generation(root))


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([3, 4, 5, 6], r"source_frame_indices are 4 frames 3, 4 \.\.\. 6, expected 5 frames 3, 4 \.\.\. 7"),
        ([3, 4, 5, 7, 8], r"expected 5 frames 3, 4 \.\.\. 7"),
        ([3, 5, 7, 9, 11], r"expected 5 frames 3, 4 \.\.\. 7 for data\.pixel_frames 5 at 16 to data\.fps 16"),
        ([17, 18, 19, 20, 21], "end at 21, the video has 20 frames"),
    ],
)
def test_frames_that_are_not_the_clip_s_are_refused(tmp_path, frames, message):
    root = write_generation(
        tmp_path / "g", 1, edit_row=lambda row: row.update(source_frame_indices=frames, start_frame=frames[0])
    )
    with pytest.raises(DataError, match=message):
        open_generation(root).check()


def spoiled(name, value):
    def tensors(number, contract):
        content = tensors_of(number, contract)
        content[name][1].flat[-1] = value
        return content

    return tensors


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", np.nan), ("float32", -np.inf), ("bfloat16", 0x7F80), ("bfloat16", 0xFFC1)],
)
@pytest.mark.parametrize("name", ["latents", "prompt_embeds"])
def test_a_value_that_is_not_finite_is_refused(tmp_path, dtype, value, name):
    root = write_generation(
        tmp_path / "g", 1, contract=encoder_contract(dtype=dtype), tensors=spoiled(name, value)
    )
    with pytest.raises(SampleFailure, match=rf"preencoded\.safetensors: {name} holds NaN or infinite"):
        first(open_generation(root))


def without_prompt(number, contract):
    return {"latents": tensors_of(number, contract)["latents"]}


def half(number, contract):
    return {name: ("F16", array.astype("<f2")) for name, (_, array) in tensors_of(number, contract).items()}


def transposed(number, contract):
    return {name: (dtype, array.T) for name, (dtype, array) in tensors_of(number, contract).items()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without_prompt, "holds tensors latents, expected latents, prompt_embeds"),
        (half, r"latents is float16 \[2, 48, 2, 2\], expected float32 \[2, 48, 2, 2\]"),
        (transposed, r"latents is float32 \[2, 2, 48, 2\], expected float32 \[2, 48, 2, 2\]"),
        (lambda *_: b"junk", "not a readable safetensors file"),
    ],
)
def test_tensors_of_another_kind_are_refused(tmp_path, tensors, message):
    with pytest.raises(SampleFailure, match=message):
        first(open_generation(write_generation(tmp_path / "g", 1, tensors=tensors)))


CONTRACTS = [
    ("data.height: .* encoded for 64, this run needs 32", {"height": 64}),
    ("data.pixel_frames: .* encoded for 9, this run needs 5", {"pixel_frames": 9}),
    (r"shape of prompt_embeds .* encoded for \[8, 64\], this run needs \[16, 64\]", {"text_length": 8}),
    ("data.latent_schema: .* encoded for other", {"extras": {"latent_schema": "other"}}),
]


@pytest.mark.parametrize(("message", "changes"), CONTRACTS, ids=[str(c[1]) for c in CONTRACTS])
def test_a_generation_of_another_geometry_is_refused_on_opening(tmp_path, message, changes):
    root = write_generation(tmp_path / "g", 1)
    values = encoder_contract(**changes).values()
    (root / "index" / "encoder-contract.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match=message):
        open_generation(root)


def test_rows_of_another_encoder_are_refused_on_opening(tmp_path):
    root = write_generation(tmp_path / "g", 1)
    other = replace(encoder_contract(), extras={"latent_schema": SCHEMA, "codec": "another"})
    (root / "index" / "encoder-contract.json").write_text(json.dumps(other.values()))
    with pytest.raises(
        DataError, match=r"encoder_contract_digest is .* encoder-contract\.json of the generation"
    ):
        open_generation(root)


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"schema": "other"}'])
def test_a_missing_or_damaged_contract_is_refused(tmp_path, content):
    root = write_generation(tmp_path / "g", 1)
    path = root / "index" / "encoder-contract.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=r"encoder-contract\.json: .*data\.latents_root"):
        open_generation(root)


def test_a_folder_that_is_no_generation_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError, match=r"data\.latents_root: .*solarwm merge-latents"):
        read_generation(tmp_path)


def test_random_starts_are_refused(root):
    with pytest.raises(DataError, match=r"data\.random_start=false"):
        open_generation(root, random_start=True)


def test_clips_outside_the_guards_are_replaced_the_same_way_everywhere(tmp_path):
    def far(number):
        c2w = camera_path(20, number).copy()
        c2w[4:, 0, 3] += 50 * (number == 1)
        return c2w

    root = write_generation(tmp_path / "g", c2w=far)
    places = [open_generation(root).locate(index) for index in range(9)]
    assert places == [open_generation(root).locate(index) for index in range(9)]
    assert {planned.row_ordinal for planned, _ in places} == {0, 2}
    assert sum(bool(rejected) for _, rejected in places) == 3
    with pytest.raises(CameraGuardError, match="'clip 1/latent-5f-w00'"):
        open_generation(root).load(PlannedSample(0, 1, 0, 0, 3, "x"))


def test_a_shard_that_is_gone_or_cut_is_a_shard_failure(tmp_path):
    root = write_generation(tmp_path / "g")
    path = root / "shards/part-000000/samples-00000.tar"
    content = path.read_bytes()
    path.write_bytes(content[:-512])
    with pytest.raises(SampleFailure, match="shard_size") as caught:
        first(open_generation(root))
    assert caught.value.reason == "shard"
    path.unlink()
    with pytest.raises(DataError, match=r"missing under data\.latents_root"):
        open_generation(root).check()


def test_an_index_without_shards_beside_it_reads_them_where_the_transport_says(tmp_path):
    root = write_generation(tmp_path / "g")
    (root / "shards").rename(tmp_path / "shards")
    clips = open_generation(root, transport={"latents_root": str(tmp_path)})
    clips.check()
    assert first(clips).caption == "room 0"


# --- the safetensors parser


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.tuples(st.sampled_from(["<f4", "<f8", "<i8"]), st.lists(st.integers(0, 4), max_size=3)),
        max_size=4,
    ).filter(lambda d: "__metadata__" not in d)
)
def test_what_was_written_is_parsed(kinds):
    names = {"<f4": "F32", "<f8": "F64", "<i8": "I64"}
    rng = np.random.default_rng(0)
    tensors = {k: (names[d], rng.integers(0, 99, shape).astype(d)) for k, (d, shape) in kinds.items()}
    found = parse_safetensors(safetensors(tensors), "x")
    assert found.keys() == tensors.keys()
    for name, (dtype, array) in tensors.items():
        assert (found[name].dtype, found[name].shape) == (dtype, array.shape)
        assert bytes(found[name].data) == array.tobytes() and found[name].finite()


GOOD = safetensors({"a": ("F32", np.zeros(2, "<f4")), "b": ("BF16", np.zeros((2, 2), "<u2"))})


@settings(max_examples=100)
@given(st.integers(0, len(GOOD) - 1))
def test_a_cut_file_is_refused(end):
    with pytest.raises(DataError, match="x: not a readable safetensors file"):
        parse_safetensors(GOOD[:end], "x")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2]},
        7,
    ],
)
def test_a_header_that_lies_is_refused(entry):
    header = json.dumps({"a": entry}).encode()
    with pytest.raises(DataError, match="not a readable safetensors file"):
        parse_safetensors(struct.pack("<Q", len(header)) + header + bytes(8), "x")


def test_a_header_nested_without_end_is_refused():
    header = b"[" * 100_000
    with pytest.raises(DataError, match=r"x: not a readable safetensors file .maximum recursion depth"):
        parse_safetensors(struct.pack("<Q", len(header)) + header, "x")


@given(st.integers(0, 2**16 - 1))
def test_finiteness_of_a_bfloat16_is_that_of_the_float32_it_abbreviates(bits):
    value = np.array([bits << 16], "<u4").view("<f4")
    tensor = StoredTensor("BF16", (1,), memoryview(np.array([bits], "<u2").tobytes()))
    assert tensor.finite() == bool(np.isfinite(value[0]))


def test_sizes_of_the_test_world():
    assert (SIZES.latent_frames, SIZES.latent_channels, SIZES.latent_height) == (2, 48, 2)
