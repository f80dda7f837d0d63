"""Index rows: the fields of a raw or latent clip, and how one JSON line becomes a checked row.

Everything an ordinary row must satisfy is expressed as types that pydantic-core checks without calling Python (a few
microseconds a row); the sentences a person reads are made only after a row has failed. (spec operations 4.1)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, cast, get_type_hints

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from typing_extensions import TypedDict

SHARD_IDENTITY = ("shard_generation", "shard_size", "shard_md5_b64", "shard_digest")
LATENT_FIELD = "encoder_contract_digest"
# Tells latent lines from raw ones before they are parsed; a raw line that quotes it is sorted out when it fails.
LATENT_KEY = b'"encoder_contract_digest"'

# One path segment that is not '', '.' or '..', in a language without look-ahead; the first one holds no colon.
_SEGMENT = r"(?:[^./{0}][^/{0}]*|\.(?:[^./{0}][^/{0}]*|\.[^/{0}]+))"
_FIRST, _OTHER = (_SEGMENT.format(refused) for refused in (r"\\\x00:", r"\\\x00"))
RELATIVE_PATH_PATTERN = f"^{_FIRST}(?:/{_OTHER})*$"
MD5_PATTERN = "^[A-Za-z0-9+/]{22}==$"
SHA256_PATTERN = "^[0-9a-f]{64}$"
# Counts and frame numbers are kept as numpy columns; no clip or weight comes near this.
LARGEST_COUNT = 2**31 - 1
LARGEST_SIZE = 2**63 - 1


def check_relative_path(value: str) -> str:
    """Return `value` if it is a relative POSIX path that cannot leave its root; raise ValueError otherwise."""
    if not value:
        raise ValueError("is empty, expected a relative POSIX path")
    if "\\" in value or "\0" in value:
        raise ValueError(f"found {value!r}, expected a POSIX path without backslash")
    if ":" in value.split("/", 1)[0]:
        raise ValueError(f"found {value!r}, expected a path without a scheme or drive")
    if any(segment in ("", ".", "..") for segment in value.split("/")):
        raise ValueError(f"found {value!r}, expected a relative path without '', '.' or '..' segments")
    return value


Text = Annotated[StrictStr, Field(min_length=1)]
RelativePath = Annotated[StrictStr, Field(pattern=RELATIVE_PATH_PATTERN)]
Count = Annotated[StrictInt, Field(ge=1, le=LARGEST_COUNT)]
FrameNumber = Annotated[StrictInt, Field(ge=0, le=LARGEST_COUNT)]
Sha256 = Annotated[StrictStr, Field(pattern=SHA256_PATTERN)]
Md5 = Annotated[StrictStr, Field(pattern=MD5_PATTERN)]
_SizeText = Annotated[StrictStr, Field(pattern="^0*[1-9][0-9]{0,17}$"), AfterValidator(int)]
Size = Annotated[
    Annotated[StrictInt, Field(ge=1, le=LARGEST_SIZE)] | _SizeText, Field(union_mode="left_to_right")
]


class Member(BaseModel):
    """Where one file lies inside its shard: byte offset of its content, length and SHA-256."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    offset: Annotated[StrictInt, Field(ge=512, le=LARGEST_SIZE)]
    bytes: Annotated[StrictInt, Field(ge=0, le=LARGEST_SIZE)]
    sha256: Sha256


Members: TypeAlias = dict[RelativePath, Member]


def _released_members(value: Any) -> Any:
    """Return None for the members of released latent rows: archive names by suffix record no offsets."""
    if not isinstance(value, dict) or not value or not all(isinstance(name, str) for name in value.values()):
        return value
    for name in value.values():
        check_relative_path(name)
    return None


class Row(BaseModel):
    """The fields of every row. Fields no class names are kept and written back. (spec operations 4.1.1)"""

    model_config = ConfigDict(extra="allow", frozen=True)

    sample_id: Text
    key: Text
    shard: RelativePath
    epoch_repeats: Count = 1
    shard_size: Size | None = None
    shard_generation: Text | None = None
    shard_md5_b64: Md5 | None = None
    shard_digest: Sha256 | None = None
    num_frames: Count | None = None
    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    height: Count | None = None
    width: Count | None = None
    caption: StrictStr | None = None
    dataset: StrictStr | None = None
    split: StrictStr | None = None
    start_frame: FrameNumber | None = None
    members: Members | None = None

    def shard_identity(self) -> tuple[Any, ...]:
        """Return what all rows of one shard must agree on."""
        return tuple(getattr(self, name) for name in SHARD_IDENTITY)


class RawRow(Row):
    """One raw clip: video, camera and manifest (inline or a member). (spec operations 4.1.2)"""

    video_member: RelativePath
    camera_member: RelativePath
    manifest_member: RelativePath | None = None
    manifest: dict[str, Any] | None = None
    source_frame_indices: list[FrameNumber] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> RawRow:
        check_raw(self.__dict__)
        return self


class LatentRow(Row):
    """One preencoded clip: tensors, the camera and manifest it came with. (spec operations 4.1.3)"""

    encoder_contract_digest: Sha256
    source_sample_id: Text
    source_frame_indices: Annotated[list[FrameNumber], Field(min_length=1)]
    preencoded_member: RelativePath
    camera_member: RelativePath
    manifest_member: RelativePath
    provenance_member: RelativePath | None = None
    latents_key: Sha256 | None = None
    prompt_key: Sha256 | None = None
    members: Annotated[Members | None, BeforeValidator(_released_members)] = None

    @model_validator(mode="after")
    def _consistent(self) -> LatentRow:
        check_latent(self.__dict__)
        return self


AnyRow: TypeAlias = RawRow | LatentRow


def check_raw(fields: Mapping[str, Any]) -> None:
    """Raise ValueError if the fields of a raw row contradict each other."""
    get = fields.get
    manifest = get("manifest_member")
    if manifest is None and get("manifest") is None:
        raise ValueError("field 'manifest': absent, expected an inline manifest or manifest_member")
    _check_shard_size(get)
    if (members := get("members")) is not None and not (
        fields["video_member"] in members
        and fields["camera_member"] in members
        and (manifest is None or manifest in members)
    ):
        _name_missing_member(members, (fields["video_member"], fields["camera_member"], manifest))


def check_latent(fields: Mapping[str, Any]) -> None:
    """Raise ValueError if the fields of a latent row contradict each other."""
    get = fields.get
    _check_shard_size(get)
    first = fields["source_frame_indices"][0]
    if (start := get("start_frame")) is not None and start != first:
        raise ValueError(f"field 'start_frame': found {start}, source_frame_indices start at {first}")
    if (members := get("members")) is not None:
        names = ("preencoded_member", "camera_member", "manifest_member", "provenance_member")
        _name_missing_member(members, tuple(get(name) for name in names))


def _check_shard_size(get: Callable[[str], Any]) -> None:
    if get("shard_size") is None and any(get(name) is not None for name in SHARD_IDENTITY):
        raise ValueError("field 'shard_size': absent, required beside any other shard_* identity field")


def _name_missing_member(members: Mapping[str, Any], named: tuple[str | None, ...]) -> None:
    for name in named:
        if name is not None and name not in members:
            raise ValueError(f"field 'members': no entry for {name!r}, found {', '.join(members) or 'none'}")


def parse_row(line: bytes | str) -> AnyRow:
    """Return the row of one JSON line: latent if it has `encoder_contract_digest`, raw otherwise.

    Raises ValueError with one line saying which field is wrong. Duplicate keys and NaN are looked for by
    `strict_object`, which an index applies to every line when it is opened.
    """
    data = line if isinstance(line, bytes) else line.encode()
    model = LatentRow if LATENT_KEY in data else RawRow
    try:
        return model.__pydantic_validator__.validate_json(data)
    except ValidationError:
        return validate_row(strict_object(data))


def validate_row(fields: Mapping[str, Any]) -> AnyRow:
    """Return the row of a JSON object; ValueError with one line saying which field is wrong."""
    try:
        return (LatentRow if LATENT_FIELD in fields else RawRow).model_validate(fields)
    except ValidationError as error:
        raise ValueError(describe(error)) from None


def strict_object(line: bytes | str) -> dict[str, Any]:
    """Return a JSON object without duplicate keys, NaN or infinities; ValueError otherwise.

    Raises UnicodeDecodeError (a ValueError) for bytes that are not UTF-8.
    """
    text = line.decode("utf-8") if isinstance(line, bytes) else line
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():
            # An escape may stand for half a character, which cannot be written as UTF-8 again.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, expected whole characters") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}, expected a JSON object")
    return value


def count_keys(fields: Mapping[str, Any]) -> int:
    """Return how many JSON keys the fields of a plain row stand for, nested ones of `members` and `manifest` included."""
    count = len(fields)
    if members := fields.get("members"):
        count += len(members) * (1 + len(Member.model_fields))
    if manifest := fields.get("manifest"):
        count += nested_keys(manifest)
    return count


def nested_keys(value: Any) -> int:
    """Return the number of keys of all dictionaries in a JSON value."""
    if isinstance(value, dict):
        return len(value) + sum(map(nested_keys, value.values()))
    return sum(map(nested_keys, value)) if isinstance(value, list) else 0


def most_keys(text: bytes) -> int:
    """Return an upper bound of the keys in JSON text: colons that follow a quote or white space.

    A parsed object has one entry a distinct key. If the entries reach this bound, no key was written twice.
    """
    characters = np.frombuffer(text, np.uint8)
    colon, before = characters[1:] == ord(":"), characters[:-1]
    # White space in JSON is at most 32; a colon after another control character is a bad line anyway.
    return int(np.count_nonzero(colon & ((before == ord('"')) | (before <= ord(" ")))))


def may_hold_constants(text: bytes) -> bool:
    """Tell whether NaN or Infinity could be in JSON text (pydantic-core lets them pass in fields it does not know)."""
    characters = np.frombuffer(text, np.uint8)
    first, third = characters[:-2], characters[2:]
    # Two letters of each first: five times faster than looking for the words in ordinary text.
    nan = np.any((first == ord("N")) & (third == ord("N")))
    infinity = np.any((first == ord("I")) & (third == ord("f")))
    return bool((nan and b"NaN" in text) or (infinity and b"Infinity" in text))


def describe(error: ValidationError) -> str:
    """Return `field 'x': what is wrong, found VALUE` for the first problem of a failed row."""
    first = error.errors()[0]
    value, message = first["input"], first["msg"].removeprefix("Value error, ")
    path = [str(part) for part in first["loc"]]
    if path[:1] == ["shard_size"]:
        path, message = path[:1], f"found {value!r}, expected a positive integer"
    elif first["type"] == "string_pattern_mismatch":
        message = _pattern_message(first["ctx"]["pattern"], value, message)
    if "found" not in message and path and first["type"] != "missing":
        message += f", found {value!r:.80}"
    return f"field '{'.'.join(path)}': {message}" if path else message


def _pattern_message(pattern: str, value: str, message: str) -> str:
    if pattern == MD5_PATTERN:
        return f"found {value!r}, expected base64 of 16 bytes"
    if pattern == SHA256_PATTERN:
        return f"found {value!r:.80}, expected 64 lower-case hexadecimal digits"
    if pattern == RELATIVE_PATH_PATTERN:
        try:
            check_relative_path(value)
        except ValueError as error:
            return str(error)
    return message


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return result


def _refuse_constant(value: str) -> None:
    raise ValueError(f"{value} is not JSON")


def _plain(model: type[BaseModel], extra: Literal["allow", "forbid", "ignore"], **changes: Any) -> Any:
    """Return a TypedDict with the fields and checks of a model: a dict is what a pass over an index needs."""
    hints = get_type_hints(model, include_extras=True) | changes
    fields = {
        name: hints[name] if info.is_required() else NotRequired[hints[name]]
        for name, info in model.model_fields.items()
    }
    plain = cast(Any, TypedDict)(f"Plain{model.__name__}", fields)
    plain.__pydantic_config__ = ConfigDict(extra=extra)
    return plain


def _parser(
    model: type[BaseModel], extra: Literal["allow", "ignore"], member: Literal["forbid", "ignore"]
) -> Callable[[bytes], dict[str, Any]]:
    members: Any = dict[RelativePath, _plain(Member, member)] | None  # type: ignore[misc]
    if model is LatentRow:
        members = Annotated[members, BeforeValidator(_released_members)]
    return TypeAdapter(_plain(model, extra, members=members)).validator.validate_json


# JSON line -> dict of checked fields, extra ones included; `check_raw` / `check_latent` complete the check.
raw_fields = _parser(RawRow, "allow", "forbid")
latent_fields = _parser(LatentRow, "allow", "forbid")
# The same without looking for extra fields, a fifth faster: right for lines whose keys are all counted in the result.
ordinary_fields = _parser(RawRow, "ignore", "ignore")
