"""The run configuration as one object: `validate(values) -> RunConfig`, or one line that says what to change."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from solarwm_lib.config import rules
from solarwm_lib.config.defaults import FORMER_NAMES
from solarwm_lib.config.sections import (
    Checkpoint,
    Data,
    Distributed,
    Inference,
    Model,
    Preencode,
    Runtime,
    Section,
    Train,
    Validation,
    knob,
)
from solarwm_lib.runtime.errors import ConfigError

SCHEMA = "solarwm.run.v1"


class RunConfig(Section):
    """One run: train, infer or preencode. `values()` is its JSON form with every default filled in."""

    schema_: Literal["solarwm.run.v1"] = knob(..., "Version of this file format.", alias="schema")
    action: Literal["train", "infer", "preencode"] = knob(..., "Must equal the command that reads the file.")
    name: str = knob(..., "Name of the run.", min_length=1)
    model: Model = knob(..., "")
    data: Data = knob(..., "")
    distributed: Distributed = knob(Distributed(), "")
    train: Train = knob(Train(), "")
    validation: Validation = knob(Validation(), "")
    checkpoint: Checkpoint = knob(Checkpoint(), "")
    inference: Inference = knob(Inference(), "")
    preencode: Preencode | None = knob(None, "")
    runtime: Runtime = knob(..., "")
    metadata: dict[str, Any] = knob({}, "Free mapping, copied into the launch manifest.")

    def values(self) -> dict[str, Any]:
        """JSON values; sections the action does not use are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude=rules.UNUSED_SECTIONS[self.action])


def validate(values: Mapping[str, Any]) -> RunConfig:
    """Check `values` whole: keys, types and ranges, then what one field demands of another. `ConfigError` otherwise."""
    if not isinstance(values, dict):
        raise ConfigError(
            "a configuration is a mapping with the keys schema, action, name, model, data, runtime"
        )
    unknown = list(unknown_keys(values))
    if unknown:
        raise ConfigError("; ".join(unknown))
    rules.check_sections(values)
    try:
        config = RunConfig.model_validate(rules.fill(values))
    except ValidationError as error:
        raise ConfigError(_explain(error.errors(include_url=False))) from None
    rules.check(config)
    return config


def fields(
    model: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None]]:
    """Every field as (dotted key, field, section class or None), depth first in file order."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        section = _section(field.annotation)
        yield key, field, section
        if section is not None:
            yield from fields(section, f"{key}.")


def known_keys() -> list[str]:
    """Every dotted key of the schema; entries of a list of sections appear without their position."""
    return [key for key, _, _ in fields()]


def unknown_keys(
    values: Mapping[str, Any], model: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[str]:
    """One message per key the schema does not have, at any depth, with the likeliest meant key."""
    by_name = {field.alias or name: field for name, field in model.model_fields.items()}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in by_name:
            yield unknown_key_message(key, sorted(by_name))
            continue
        section = _section(by_name[name].annotation)
        if section is None:
            continue
        if isinstance(value, dict):
            yield from unknown_keys(value, section, f"{key}.")
        for position, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, dict):
                yield from unknown_keys(item, section, f"{key}.{position}.")


def unknown_key_message(key: str, siblings: list[str]) -> str:
    """`unknown key train.lr; did you mean train.optimizer.learning_rate?`"""
    parent, _, name = key.rpartition(".")
    close = get_close_matches(name, siblings, n=1, cutoff=0.6)
    renamed = FORMER_NAMES.get(key)
    # The same leaf in another section, then anything spelt alike, catches a right name in the wrong place.
    elsewhere = [known for known in known_keys() if known.rpartition(".")[2] == name]
    leaves = [known for known, _, section in fields() if section is None]
    alike = get_close_matches(key, leaves, n=1, cutoff=0.75)
    if renamed:
        return f"unknown key {key}; here it is called {renamed}"
    if close:
        return f"unknown key {key}; did you mean {parent + '.' if parent else ''}{close[0]}?"
    if elsewhere or alike:
        return f"unknown key {key}; did you mean {(elsewhere or alike)[0]}?"
    return f"unknown key {key}; {parent or 'the top level'} has: {', '.join(siblings)}"


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section class inside `Section`, `Section | None` or `list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        found = _section(inner)
        if found is not None:
            return found
    return None


_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "string_too_short": "text that is not empty",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-', starting with a letter or digit",
    "finite_number": "a finite number",
    "too_short": "{min_length} entries or more",
    "too_long": "{max_length} entries or fewer",
}


def _explain(errors: Sequence[Any]) -> str:
    """Pydantic's errors as `key: found X, expected Y`, one per key."""
    # A union reports each branch and appends its name to the location; only keys and list positions belong to the key.
    names = {part for key in known_keys() for part in key.split(".")}
    lines: dict[str, str] = {}
    for item in errors:
        key = ".".join(str(part) for part in item["loc"] if isinstance(part, int) or part in names)
        limits = item.get("ctx") or {}
        if item["type"] == "missing":
            text = "not set, and it has no default; add it"
        elif item["type"] == "literal_error":
            choices = str(limits["expected"]).replace("'', ", "").replace("'", "")
            text = f"found {_shown(item['input'])}, expected {choices}"
        else:
            expected = _EXPECTED.get(item["type"], item["msg"]).format(**limits)
            text = f"found {_shown(item['input'])}, expected {expected}"
        lines.setdefault(key, f"{key}: {text}")
    # Of a union, the branch that got furthest says most.
    return "; ".join(
        text for key, text in lines.items() if not any(other.startswith(f"{key}.") for other in lines)
    )


def _shown(value: Any) -> str:
    """A value as YAML readers know it; text is marked as such, because "8" is not 8."""
    if isinstance(value, str):
        return f"text {(value if len(value) <= 60 else value[:57] + '...')!r}"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "null" if value is None else str(value).lower()


def _type_text(annotation: Any) -> str:
    """An annotation as readers of YAML know it: text, integer, number, true/false, one of, list of, null."""
    plain = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true/false",
        type(None): "null",
        Any: "anything",
    }
    if annotation in plain:
        return plain[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " / ".join(f"`{choice}`" for choice in arguments if choice != "")
    if origin is list:
        return f"list of {_type_text(arguments[0])}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_text(argument) for argument in arguments)
    return "mapping"


def _limits_text(field: FieldInfo) -> str:
    signs = {
        "ge": ">=",
        "gt": ">",
        "le": "<=",
        "lt": "<",
        "min_length": "length >=",
        "max_length": "length <=",
    }
    found = []
    for entry in field.metadata:
        for name, sign in signs.items():
            limit = getattr(entry, name, None)
            if limit is not None:
                found.append(f"{sign} {limit}")
    return ", ".join(dict.fromkeys(found))


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    default = field.default
    if isinstance(default, BaseModel):
        return ""
    if default == "" or default == {}:
        return "empty"
    if isinstance(default, bool) or default is None:
        return f"`{str(default).lower() if default is not None else 'null'}`"
    return f"`{default}`"


def reference_markdown() -> str:
    """The configuration reference page: one table per section, generated from the fields above."""
    from solarwm_lib.config.identity import field_class

    sections: list[tuple[str, type[BaseModel]]] = [("", RunConfig)]
    sections += [(key, section) for key, _, section in fields() if section is not None]
    lines = ["# Configuration reference", "", "Generated from the schema; do not edit.", ""]
    for title, section in sections:
        lines += [f"## {f'`{title}`' if title else 'Top level'}", "", (section.__doc__ or "").strip(), ""]
        lines += [
            "| Key | Type | Default | Range | Unit | On resume | Meaning |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, field in section.model_fields.items():
            leaf = field.alias or name
            key = f"{title}.{leaf}" if title else leaf
            extra = field.json_schema_extra
            unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
            nested = _section(field.annotation) is not None
            text = field.description or (f"See `{key}` below." if nested else "")
            resume = "" if nested else field_class(key).replace("_", " ")
            cells = (
                f"`{leaf}`",
                _type_text(field.annotation),
                _default_text(field),
                _limits_text(field),
                unit,
                resume,
                text,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
