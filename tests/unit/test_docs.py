"""Documentation says what the program does: codes, options and links are compared with the code."""

import argparse
import re
from pathlib import Path

import pytest

from solarwm_lib.data import pack_options
from solarwm_lib.runtime.errors import EXIT_CODES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def test_every_exit_code_is_documented():
    table = (DOCS / "reference/exit-codes.md").read_text(encoding="utf-8")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == {*EXIT_CODES, 130}


def test_pack_options_in_the_documentation_exist_and_defaults_agree():
    parser = argparse.ArgumentParser()
    pack_options.add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    text = (DOCS / "how-to/pack-your-videos.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--out", "--config", "--set"}
    assert named <= known
    defaults = pack_options.PackOptions()
    for option, value in re.findall(r"^\| `--([a-z-]+)` \| `?([\w.]+)`? \|", text, re.MULTILINE):
        found = getattr(defaults, option.replace("-", "_"))
        assert str(found) == value or float(found) == float(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
