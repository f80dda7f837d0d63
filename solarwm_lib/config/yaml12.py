"""YAML with the scalar rules of YAML 1.2 (core schema), duplicate keys and non-JSON values refused.

YAML 1.1, which PyYAML speaks, reads `5e-5` as text, `12_34` as 1234 and `no` as false; the same spelling must mean the
same value in a file and after `--set`, so both go through here. Error texts never quote the document: it may hold a
secret.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import yaml

from solarwm_lib.runtime.errors import ConfigError

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_MAX_DIGITS = 400  # far above any legal value and far below the interpreter's conversion limit


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars, string keys only, unique keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own shape

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.complete: set[int] = set()  # mapping nodes whose keys are all known, by identity

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check the keys and flatten `<<`; PyYAML's own flattening loses overridden one-letter keys (6.0.4)."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            place = f"line {key.start_mark.line + 1}"
            if key.tag == "tag:yaml.org,2002:merge":
                for target in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(target, yaml.MappingNode) or id(target) not in self.complete:
                        raise ConfigError(f"{place}: '<<' takes a mapping that was defined before")
                    for pair in target.value:
                        merged.setdefault(pair[0].value, pair)
            elif key.tag != "tag:yaml.org,2002:str":
                raise ConfigError(f"{place}: a key is not text; quote it")
            elif key.value in own:
                raise ConfigError(f"{place}: duplicate key {key.value!r}; keep one")
            else:
                own[key.value] = (key, value)
        node.value = [*(pair for name, pair in merged.items() if name not in own), *own.values()]
        self.complete.add(id(node))
        return node


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if len(text) > _MAX_DIGITS:
        raise ConfigError(
            f"line {node.start_mark.line + 1}: a number of {len(text)} digits; quote it if it is text"
        )
    base = 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10
    return int(text, base)


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node)
    value = float(
        text.replace(".inf", "inf")
        .replace(".Inf", "inf")
        .replace(".INF", "inf")
        .lower()
        .replace(".nan", "nan")
    )
    if not math.isfinite(value):
        raise ConfigError(
            f"line {node.start_mark.line + 1}: a number that is not finite; use null for no limit"
        )
    return value


def _boolean(loader: _Loader, node: yaml.ScalarNode) -> bool:
    return loader.construct_scalar(node).lower() == "true"


def _null(loader: _Loader, node: yaml.ScalarNode) -> None:
    loader.construct_scalar(node)


def _refuse(loader: _Loader, node: yaml.Node) -> None:
    raise ConfigError(
        f"line {node.start_mark.line + 1}: only text, numbers, true/false, null, lists and mappings"
    )


def _implicit(tag: str, pattern: re.Pattern[str] | str, first: str | None) -> None:
    anchored = re.compile(f"^(?:{pattern if isinstance(pattern, str) else pattern.pattern})$")
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{tag}", anchored, list(first) if first is not None else [""]
    )


_implicit("bool", "true|True|TRUE|false|False|FALSE", "tTfF")
_implicit("int", _INT, "-+0123456789")
_implicit("float", _FLOAT, "-+.0123456789")
_implicit("merge", "<<", "<")
for _first in ("~nN", None):
    _implicit("null", "~|null|Null|NULL|", _first)
_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag in {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
}
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:bool", _boolean)
_Loader.add_constructor("tag:yaml.org,2002:null", _null)
_Loader.add_constructor(None, _refuse)


def parse_yaml(text: str, source: str = "") -> Any:
    """One YAML document as JSON values; `ConfigError` names `source` and the line, never the content."""
    prefix = f"{source}: " if source else ""
    try:
        value = yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = error.problem or "syntax error"
        if "'\\t'" in problem:
            problem = "a tab; indent with spaces"
        problem = re.sub(r"'[^']{2,}'", "'...'", problem)
        raise ConfigError(f"{prefix}{place}not valid YAML: {problem}") from None
    except yaml.YAMLError:
        raise ConfigError(f"{prefix}not valid YAML: a character that text files do not hold") from None
    except RecursionError:
        raise ConfigError(f"{prefix}not valid YAML: nested too deeply") from None
    _refuse_cycles(value, prefix, ())
    return value


def parse_json(text: str, source: str = "") -> Any:
    """One JSON document; duplicate keys and NaN or Infinity are refused, floats are exact."""
    prefix = f"{source}: " if source else ""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            keys = [key for key, _ in items]
            raise ConfigError(
                f"{prefix}duplicate key {next(k for k in keys if keys.count(k) > 1)!r}; keep one"
            )
        return result

    def number(text: str) -> float:
        if not math.isfinite(float(text)):
            raise ConfigError(f"{prefix}a number that is not finite; use null for no limit")
        return float(text)

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=number, parse_float=number)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{prefix}line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}"
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{prefix}not valid JSON: a number or nesting beyond any use") from None


def _refuse_cycles(value: Any, prefix: str, above: tuple[int, ...]) -> None:
    """An anchor that contains itself has no JSON form."""
    if not isinstance(value, dict | list):
        return
    if id(value) in above:
        raise ConfigError(f"{prefix}an anchor contains itself")
    for child in value.values() if isinstance(value, dict) else value:
        _refuse_cycles(child, prefix, (*above, id(value)))
