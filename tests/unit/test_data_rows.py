"""One line, one row: which class it becomes, which fields are refused and in which words."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from solarwm_lib.data.rows import (
    LatentRow,
    Member,
    RawRow,
    RelativePath,
    check_relative_path,
    count_keys,
    latent_fields,
    may_hold_constants,
    most_keys,
    nested_keys,
    ordinary_fields,
    parse_row,
    raw_fields,
    strict_object,
    validate_row,
)

DIGEST = "0123456789abcdef" * 4


def raw(**changes):
    """A raw row; a change to None removes the field."""
    names = {name: f"a.{name}" for name in ("video.mp4", "camera.npz", "manifest.json")}
    row = {
        "sample_id": "a",
        "key": "a",
        "shard": "shards/part-000000.tar",
        "video_member": names["video.mp4"],
        "camera_member": names["camera.npz"],
        "manifest_member": names["manifest.json"],
        "members": {name: {"offset": 512, "bytes": 9, "sha256": DIGEST} for name in names.values()},
    }
    return {key: value for key, value in (row | changes).items() if value is not None}


def latent(**changes):
    folder = "samples/0123456789abcdef01234567"
    row = {
        "sample_id": "a/latent-81f-w00",
        "key": "a__latent81f_w00",
        "shard": "shards/part-000000/samples-00000.tar",
        "source_sample_id": "a",
        "source_frame_indices": [4, 5, 6],
        "start_frame": 4,
        "encoder_contract_digest": DIGEST,
        "preencoded_member": f"{folder}/preencoded.safetensors",
        "camera_member": f"{folder}/camera.npz",
        "manifest_member": f"{folder}/manifest.json",
        "provenance_member": f"{folder}/provenance.json",
    }
    return {key: value for key, value in (row | changes).items() if value is not None}


def refusal(fields):
    with pytest.raises(ValueError) as caught:
        parse_row(json.dumps(fields))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_row_is_latent_exactly_if_it_names_an_encoder_contract():
    row = parse_row(json.dumps(latent(latents_key=DIGEST, prompt_key=DIGEST)))
    assert isinstance(row, LatentRow) and row.source_frame_indices == [4, 5, 6] and row.latents_key == DIGEST
    assert isinstance(parse_row(json.dumps(raw())), RawRow)


@pytest.mark.parametrize(
    "fields", [raw(), raw(kept_tier="xhigh", metadata={"a": [1, {"b": 2}]}), latent(extra=None)]
)
def test_every_field_comes_back_as_it_was_stored(fields):
    row = parse_row(json.dumps(fields).encode())
    assert json.loads(row.model_dump_json(exclude_unset=True)) == fields
    assert row == validate_row(fields)


def test_members_of_released_latent_rows_are_names_without_offsets():
    names = {
        "preencoded.safetensors": "samples/x/preencoded.safetensors",
        "camera.npz": "samples/x/camera.npz",
    }
    assert parse_row(json.dumps(latent(members=names))).members is None
    assert "field 'members'" in refusal(latent(members={"camera.npz": "../camera.npz"}))
    recorded = {name: {"offset": 512, "bytes": 1, "sha256": DIGEST} for name in ("samples/x/camera.npz",)}
    assert "no entry for" in refusal(latent(members=recorded))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (raw(sample_id=""), "field 'sample_id': String should have at least 1 character, found ''"),
        (raw(key=7), "field 'key': Input should be a valid string, found 7"),
        (raw(shard="a/../b.tar"), "field 'shard': found 'a/../b.tar', expected a relative path without '', '.' or '..' segments"),
        (raw(shard="s3://b/x.tar"), "field 'shard': found 's3://b/x.tar', expected a path without a scheme or drive"),
        (raw(video_member="a\\b"), "field 'video_member': found 'a\\\\b', expected a POSIX path without backslash"),
        (raw(epoch_repeats=2**31), "field 'epoch_repeats': Input should be less than or equal to 2147483647, found 2147483648"),
        (raw(shard_size="12x"), "field 'shard_size': found '12x', expected a positive integer"),
        (raw(shard_size=2**70), f"field 'shard_size': found {2**70}, expected a positive integer"),
        (raw(shard_size=9, shard_md5_b64="AAAA"), "field 'shard_md5_b64': found 'AAAA', expected base64 of 16 bytes"),
        (raw(shard_digest=DIGEST), "field 'shard_size': absent, required beside any other shard_* identity field"),
        (raw(manifest_member=None), "field 'manifest': absent, expected an inline manifest or manifest_member"),
        (raw(video_member="b.mp4"), "field 'members': no entry for 'b.mp4', found a.video.mp4, a.camera.npz, a.manifest.json"),
        (raw(members={"a.mp4": {"offset": 4, "bytes": 1, "sha256": DIGEST}}), "field 'members.a.mp4.offset': Input should be greater than or equal to 512, found 4"),
        (raw(fps=float("nan")), "not a JSON object (NaN is not JSON)"),
        (latent(encoder_contract_digest="x"), "field 'encoder_contract_digest': found 'x', expected 64 lower-case hexadecimal digits"),
        (latent(source_sample_id=None), "field 'source_sample_id': Field required"),
        (latent(source_frame_indices=[]), "field 'source_frame_indices': List should have at least 1 item after validation, not 0, found []"),
        (latent(source_frame_indices=[4, -1]), "field 'source_frame_indices.1': Input should be greater than or equal to 0, found -1"),
        (latent(start_frame=3), "field 'start_frame': found 3, source_frame_indices start at 4"),
        (latent(latents_key="abc"), "field 'latents_key': found 'abc', expected 64 lower-case hexadecimal digits"),
    ],
)  # fmt: skip
def test_a_bad_field_is_told_in_one_line(fields, message):
    assert refusal(fields) == message


paths = st.lists(
    st.sampled_from(["", ".", "..", "...", "a", ".a", "..a", "a.b", "c:", "\\", "\0", "ü", "\n"])
).map("/".join)


@given(st.one_of(paths, st.text(max_size=6), st.text("./:a\\", max_size=7)))
def test_the_compiled_pattern_accepts_what_the_rule_accepts(path):
    try:
        check_relative_path(path)
        accepted = True
    except ValueError:
        accepted = False
    try:
        TypeAdapter(RelativePath).validate_json(json.dumps(path))
        compiled = True
    except ValidationError:
        compiled = False
    assert accepted == compiled


@given(st.binary(max_size=20))
def test_the_digest_pattern_accepts_base64_of_16_bytes(data):
    text = base64.b64encode(data).decode()
    accepted = True
    try:
        raw_fields(json.dumps(raw(shard_size=1, shard_md5_b64=text)))
    except ValidationError:
        accepted = False
    assert accepted == (len(data) == 16)


@pytest.mark.parametrize("size", ["2048", "0002048", 2048])
def test_sizes_may_be_digits(size):
    assert parse_row(json.dumps(raw(shard_size=size))).shard_size == 2048


@pytest.mark.parametrize("size", ["", "0", "-1", "1_0", " 1", "1.0", 0, True, 1.0])
def test_other_spellings_of_sizes_are_refused(size):
    assert "field 'shard_size'" in refusal(raw(shard_size=size))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"key": "a", "key": "b"}', "not a JSON object (key 'key' appears twice)"),
        (b'{"a": {"x": 1, "\\u0078": 2}}', "not a JSON object (key 'x' appears twice)"),
        (b'{"x": [NaN]}', "not a JSON object (NaN is not JSON)"),
        (b'{"x": -Infinity}', "not a JSON object (-Infinity is not JSON)"),
        (b"[1]", "found list, expected a JSON object"),
        (
            b"{",
            "not a JSON object (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        ),
    ],
)
def test_loose_json_is_refused(line, message):
    with pytest.raises(ValueError) as caught:
        strict_object(line)
    assert str(caught.value) == message


json_text = st.text(max_size=6) | st.sampled_from(['"', '":', ": ", " :", "\\", "NaN"])
json_value = st.recursive(
    json_text | st.none() | st.booleans() | st.integers(),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(json_text, v, max_size=3),
)


@given(
    st.dictionaries(json_text, json_value, max_size=4),
    st.sampled_from([(", ", ": "), (",", ":"), (" , ", "\t : ")]),
)
def test_the_bound_on_keys_is_one(manifest, separators):
    fields = raw(manifest=manifest)
    line = json.dumps(fields, separators=separators, ensure_ascii=False).encode()
    assert count_keys(raw_fields(line)) == nested_keys(raw_fields(line)) <= most_keys(line)
    doubled = line[:-1] + b',"split":"x","split":"y"}'
    assert count_keys(raw_fields(doubled)) < most_keys(doubled)


def test_an_ordinary_line_needs_no_second_look():
    for fields in (raw(caption="a slow walk"), raw(manifest={"video": {"fps": 16}, "list": [{"a": 1}]})):
        for separators in ((", ", ": "), (",", ":")):
            line = json.dumps(fields, separators=separators).encode()
            assert count_keys(raw_fields(line)) == most_keys(line)


@given(
    st.binary(max_size=30),
    st.sampled_from([b"", b"NaN", b"Infinity", b"-Infinity", b"NbN", b"Iff"]),
    st.binary(max_size=30),
)
def test_words_that_are_no_numbers_are_found(before, word, after):
    text = before + word + after
    assert may_hold_constants(text) == (b"NaN" in text or b"Infinity" in text)


def test_dictionaries_of_a_pass_are_checked_as_rows_are():
    for fields, check in ((raw(), raw_fields), (raw(), ordinary_fields), (latent(), latent_fields)):
        assert check(json.dumps(fields)) == fields
    line = json.dumps(raw(tier="high"))
    assert raw_fields(line)["tier"] == "high" and "tier" not in ordinary_fields(line)
    for change in (
        {"epoch_repeats": 0},
        {"members": {"a": {"offset": 512, "bytes": 1, "sha256": DIGEST, "x": 1}}},
    ):
        with pytest.raises(ValidationError):
            raw_fields(json.dumps(raw(**change)))


def test_members_are_immutable_and_complete():
    assert Member(offset=512, bytes=0, sha256=DIGEST).model_dump() == {
        "offset": 512,
        "bytes": 0,
        "sha256": DIGEST,
    }
    with pytest.raises(ValidationError):
        Member(offset=512, bytes=0, sha256=DIGEST).offset = 1


def test_a_line_nested_without_end_or_with_half_a_character_is_refused():
    with pytest.raises(ValueError, match=r"not a JSON object .maximum recursion depth"):
        strict_object('{"a":' + "[" * 100_000)
    line = json.dumps(raw(note="a\ud800"))
    for read in (strict_object, parse_row):
        with pytest.raises(ValueError, match="holds half a surrogate pair"):
            read(line)
    assert parse_row(json.dumps(raw(note="\U0001f600"))).note == "\U0001f600"
