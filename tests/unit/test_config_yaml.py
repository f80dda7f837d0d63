"""YAML 1.2 scalars, duplicate keys, and one parser for files and `--set`."""

from __future__ import annotations

import json
import math
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.config.load import apply_set
from solarwm_lib.config.yaml12 import parse_json, parse_yaml
from solarwm_lib.runtime.errors import ConfigError

# Spellings and values of the YAML 1.2.2 core schema (section 10.3.2 of the YAML specification).
CORE = {
    "5e-5": 5e-5,
    "1E3": 1000.0,
    "-.5": -0.5,
    "+12.": 12.0,
    "0": 0,
    "-19": -19,
    "0o17": 15,
    "0x3A": 58,
    "012": 12,
    "12_34": "12_34",
    "1_000.5": "1_000.5",
    "0b11": "0b11",
    "1:30": "1:30",
    "yes": "yes",
    "No": "No",
    "on": "on",
    "off": "off",
    "y": "y",
    "true": True,
    "FALSE": False,
    "null": None,
    "~": None,
    "": None,
    "nULL": "nULL",
    "2024-01-02": "2024-01-02",
    "1e": "1e",
    "'8'": "8",
    "[live, ema]": ["live", "ema"],
    "{a: 1}": {"a": 1},
    "a=b": "a=b",
    "٣": "٣",  # an Arabic digit is text, not a number
}


@pytest.mark.parametrize(("spelling", "value"), CORE.items(), ids=repr)
def test_scalars_follow_yaml_1_2_in_files_and_on_the_command_line(spelling: str, value: object) -> None:
    from_file = parse_yaml(f"key: {spelling}")["key"]
    target: dict[str, object] = {}
    apply_set(target, f"key={spelling}")
    assert (from_file, type(from_file)) == (value, type(value))
    assert (target["key"], type(target["key"])) == (value, type(value))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_float_reads_back_exactly(value: float) -> None:
    for text in (repr(value), f"{value:.17e}"):
        read = parse_yaml(text)
        assert isinstance(read, float) and read == value and math.copysign(1, read) == math.copysign(1, value)


@given(st.integers(-(10**40), 10**40))
def test_every_integer_reads_back_exactly(value: int) -> None:
    read = parse_yaml(str(value))
    assert type(read) is int and read == value


_texts = st.text(string.ascii_letters + string.digits + " _-+.:/'\"#{}[],&*!|>%@`~=äß日", max_size=12)
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)


@given(_values)
def test_json_means_the_same_in_both_parsers_and_after_set(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    target: dict[str, object] = {}
    apply_set(target, f"some.key={text}")
    assert json.loads(text) == parse_yaml(text) == parse_json(text) == target["some"]["key"]  # type: ignore[index]


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: 2\na: 3\n",
        "x:\n  - {b: 1, b: 1}\n",
        '{"a": 1, "a": 1}',
        "a: 1\n'a': 2\n",
        "<<: {c: 1}\na: 1\na: 1\n",
    ],
)
def test_duplicate_keys_are_refused_with_their_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"file: line \d+: duplicate key '[ab]'"):
        parse_yaml(text, "file")


def test_duplicate_json_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="duplicate key 'a'"):
        parse_json('{"x": {"a": 1, "a": 1}}')


def test_merge_keys_are_flattened_and_may_be_overridden() -> None:
    text = "base: &base {a: 1, b: 2}\nmid: &mid {<<: *base, b: 3}\nuse: {<<: *mid, c: 4}\n"
    assert parse_yaml(text)["use"] == {"a": 1, "b": 3, "c": 4}
    assert parse_yaml("x: &x {k: 1}\ny: &y {k: 2, l: 3}\nz: {<<: [*x, *y]}\n")["z"] == {"k": 1, "l": 3}
    assert parse_yaml("'<<': 1") == {"<<": 1}
    for bad in ("&x {<<: *x}", "&x {k: {<<: *x}}", "a: {<<: 3}"):
        with pytest.raises(ConfigError, match="takes a mapping that was defined before"):
            parse_yaml(bad)


@pytest.mark.parametrize(
    "text",
    [
        "1: a",
        "true: a",
        "~: a",
        "a: .nan",
        "a: -.inf",
        "a: 1e999",
        "a: !!set {x}",
        "a: !!binary aGk=",
        "a: !!python/name:os.system",
        "a: !!timestamp 2024-01-01",
        "a: &x [*x]",
        "a: &x {k: *x}",
        "a: [1",
        "a: 1\n---\nb: 2\n",
        "a: \x00",
        "a: " + "9" * 5000,
        "[" * 5000,
    ],
    ids=lambda text: text[:20],
)
def test_what_has_no_json_form_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "file.yaml")
    assert str(caught.value).startswith("file.yaml: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', "{", '{"a": ' + "9" * 5000 + "}"]
)
def test_json_without_finite_numbers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^file\.json: "):
        parse_json(text, "file.json")


@pytest.mark.parametrize(
    "text",
    [
        "password: *hunter2",
        "password: !hunter2 x",
        "password: 'hunter2",
        "password: [hunter2",
        "a: hunter2: x",
    ],
)
def test_syntax_errors_never_quote_the_document(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "file.yaml")
    assert "hunter2" not in str(caught.value) and "line 1" in str(caught.value)


def test_set_makes_missing_sections_addresses_list_entries_and_refuses_to_cross_a_value() -> None:
    values: dict[str, object] = {"passes": [{"steps": 50}], "fps": 16.0, "none": None}
    apply_set(values, "passes.0.steps=8")
    apply_set(values, "a.b.c=1")
    apply_set(values, "none.x=2")
    assert values == {"passes": [{"steps": 8}], "fps": 16.0, "a": {"b": {"c": 1}}, "none": {"x": 2}}
    for text, message in (
        ("fps.x=1", "fps is a value, not a section"),
        ("passes.1.steps=8", "passes is a list of 1"),
        ("passes.-1.steps=8", "passes is a list of 1"),
        ("passes.0.steps.x=8", "passes.0.steps is a value"),
        ("novalue", "expected KEY=VALUE"),
        ("a..b=1", "expected KEY=VALUE"),
        ("=1", "expected KEY=VALUE"),
        ("x=[1", "--set x: line 1"),
    ):
        with pytest.raises(ConfigError) as caught:
            apply_set(values, text)
        assert message in str(caught.value)
