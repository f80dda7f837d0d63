"""Documentation says what the program does: codes, options and links are compared with the code."""

import argparse
import re
from pathlib import Path

import pytest

from solarwm_lib import cli_reference
from solarwm_lib.config.routes import format_table
from solarwm_lib.config.schema import reference_markdown
from solarwm_lib.data import pack_options
from solarwm_lib.runtime.errors import EXIT_CODES

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"
PAGES = [REPO / "README.md", REPO / "config/README.md", *sorted(DOCS.rglob("*.md"))]


def test_every_exit_code_is_documented():
    table = (DOCS / "reference/exit-codes.md").read_text(encoding="utf-8")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == {*EXIT_CODES, 130, 141}


def test_pack_options_in_the_documentation_exist_and_defaults_agree():
    parser = argparse.ArgumentParser()
    pack_options.add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    text = (DOCS / "how-to/pack-your-videos.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--[a-z][a-z-]+", text))
    named -= {"--out", "--config", "--overlay", "--set", "--until-step"}
    assert named <= known
    defaults = pack_options.PackOptions()
    for option, value in re.findall(r"^\| `--([a-z-]+)` \| `?([\w.]+)`? \|", text, re.MULTILINE):
        found = getattr(defaults, option.replace("-", "_"))
        assert str(found) == value or float(found) == float(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page in its links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = (heading.strip().lower() for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_links_into_a_page_name_one_of_its_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


@pytest.mark.parametrize(
    ("page", "text", "command"),
    [
        ("config.md", reference_markdown(), "solarwm config reference"),
        ("cli.md", cli_reference.reference_markdown(), "python -m solarwm_lib.cli_reference"),
    ],
)
def test_generated_pages_are_current(page, text, command):
    path = DOCS / "reference" / page
    assert path.read_text(encoding="utf-8") == text, f"run: {command} > docs/reference/{page}"


def test_the_page_of_routes_shows_the_table():
    assert f"```text\n{format_table()}\n```" in (DOCS / "reference/routes.md").read_text(encoding="utf-8")


def test_every_page_is_in_the_index():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#:]+)\)", index)}
    assert {page for page in PAGES if page.parent != REPO} - {DOCS / "README.md"} <= linked


def test_every_section_of_the_command_reference_is_a_command():
    sections = re.findall(r"^## `solarwm (.+)`$", cli_reference.reference_markdown(), re.MULTILINE)
    assert {"train", "verify", "config resolve", "data pack", "report gallery"} <= set(sections)
    assert len(sections) == len(set(sections))
