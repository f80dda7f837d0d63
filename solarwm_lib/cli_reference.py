"""The command line as a Markdown page: `python -m solarwm_lib.cli_reference > docs/reference/cli.md`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from solarwm_lib.cli import build_parser

HEAD = """# Command line

Generated from the parser (`python -m solarwm_lib.cli_reference`); do not edit.

Every command takes `--help` and `--traceback`. `python -m solarwm_lib` is the same program, for launchers that want a
module. Exit codes: [exit-codes.md](exit-codes.md).
"""


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers that run something, in the order in which they were added."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for command in group.choices.values():
            yield from commands(command)


def reference_markdown() -> str:
    """One section per command: what it does, its usage line, and a table of its arguments."""
    return "\n".join([HEAD, *(_section(command) for command in commands(build_parser()))])


def _section(command: argparse.ArgumentParser) -> str:
    actions = [
        action for action in command._actions if action.dest not in ("help", "traceback") and action.help
    ]
    words = [_usage_word(action) for action in _shown(command)]
    lines = [f"## `{command.prog}`", "", _sentence(command.description), ""]
    lines += ["```text", " ".join([command.prog, *words]), "```", ""]
    if actions:
        lines += ["| argument | meaning | default |", "|---|---|---|"]
        lines += [_row(action) for action in actions]
        lines.append("")
    return "\n".join(lines)


def _shown(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """Positional arguments, then required options; optional ones are in the table."""
    actions = [action for action in command._actions if action.dest not in ("help", "traceback")]
    return [action for action in actions if not action.option_strings] + [
        action for action in actions if action.option_strings and action.required
    ]


def _usage_word(action: argparse.Action) -> str:
    name = _value_name(action)
    if action.option_strings:
        return f"{action.option_strings[-1]} {name}"
    return f"{name} ..." if action.nargs == "+" else name


def _value_name(action: argparse.Action) -> str:
    return action.metavar if isinstance(action.metavar, str) else action.dest.upper().replace("-", "_")


def _row(action: argparse.Action) -> str:
    takes_value = action.nargs != 0
    name = action.option_strings[-1] if action.option_strings else _value_name(action)
    if action.option_strings and takes_value:
        name += f" {'/'.join(map(str, action.choices)) if action.choices else _value_name(action)}"
    default = ""
    if action.required:
        default = "required"
    elif takes_value and action.default not in (None, []):
        default = f"`{action.default}`"
    return f"| `{name}` | {_cell(action.help)} | {default} |"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", r"\|")


def _sentence(text: str | None) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


if __name__ == "__main__":
    print(reference_markdown(), end="")
