"""Lineage walks from any result to the raw data and reports, rather than fails on, a broken ancestor."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from solarwm_lib.artifacts import MARKER, Artifact, Transaction, format_lineage, lineage, lineage_json, read
from solarwm_lib.runtime.errors import ArtifactError


def publish(path: Path, schema: str, parents: tuple[Artifact, ...] = (), **identity: object) -> Artifact:
    with Transaction(path, schema, identity, parents=[p.path for p in parents]) as tx:
        tx.write_bytes("payload", path.name.encode())
    return tx.artifact


@pytest.fixture
def results(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    data = publish(root / "data/rooms", "solarwm.dataset.raw.v1", name="rooms", seed=3)
    assets = publish(root / "assets/tiny", "solarwm.assets.v1", name="tiny")
    run = root / "runs/r"
    first = publish(
        run / "checkpoint_model_000010", "solarwm.checkpoint.v1", (data, assets), completed_steps=10
    )
    second = publish(
        run / "checkpoint_model_000020", "solarwm.checkpoint.v1", (first, data), completed_steps=20
    )
    publish(run / "validation/step_000020/live", "solarwm.validation.v1", (second,), **{"pass": "live"})
    return root


VALIDATION = "runs/r/validation/step_000020/live"


def test_the_walk_reaches_the_raw_data(results: Path) -> None:
    nodes = lineage(results / VALIDATION / MARKER)
    shown = [
        (node.depth, node.path.relative_to(results).as_posix(), node.child, node.repeated) for node in nodes
    ]
    assert shown == [
        (0, VALIDATION, None, False),
        (1, "runs/r/checkpoint_model_000020", 0, False),
        (2, "runs/r/checkpoint_model_000010", 1, False),
        (3, "data/rooms", 2, False),
        (3, "assets/tiny", 2, False),
        (2, "data/rooms", 1, True),
    ]
    assert {node.status for node in nodes} == {"ok"}
    assert all(node.digest == read(node.path).digest for node in nodes)


def test_parents_are_relative_so_the_results_root_can_move(results: Path, tmp_path: Path) -> None:
    parents = read(results / VALIDATION).parents
    assert [p.path for p in parents] == ["../../../checkpoint_model_000020"]
    moved = tmp_path / "moved"
    shutil.move(results, moved)
    assert {node.status for node in lineage(moved / VALIDATION)} == {"ok"}


def test_parents_are_found_through_a_linked_results_root(results: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(results)
    assert {node.status for node in lineage(tmp_path / "link" / VALIDATION)} == {"ok"}
    (tmp_path / "run").symlink_to(results / "runs/r")
    nodes = lineage(tmp_path / "run" / "checkpoint_model_000010")
    assert {node.status for node in nodes} == {"ok"}


def test_missing_changed_and_damaged_ancestors_are_reported(results: Path) -> None:
    shutil.rmtree(results / "assets/tiny")
    shutil.rmtree(results / "data/rooms")
    publish(results / "data/rooms", "solarwm.dataset.raw.v1", name="rooms", seed=4)
    os.truncate(results / "runs/r/checkpoint_model_000010/payload", 0)
    status = {node.path.name: (node.status, node.detail) for node in lineage(results / VALIDATION)}
    assert status["live"] == ("ok", "")
    assert (
        status["checkpoint_model_000010"][0] == "damaged"
        and "'payload'" in status["checkpoint_model_000010"][1]
    )
    assert status["rooms"][0] == "changed"
    nodes = lineage(results / "runs/r/checkpoint_model_000020")
    assert [(n.path.name, n.status) for n in nodes][-1] == ("rooms", "changed")


def test_a_missing_ancestor_keeps_its_recorded_schema_and_digest(results: Path) -> None:
    recorded = read(results / "assets/tiny")
    (results / "assets/tiny" / MARKER).unlink()
    node = next(n for n in lineage(results / VALIDATION) if n.path.name == "tiny")
    assert (node.status, node.schema, node.digest) == ("missing", recorded.schema, recorded.digest)
    assert "no COMPLETE.json" in node.detail


def test_an_artifact_cannot_be_made_from_a_broken_parent(results: Path) -> None:
    data = read(results / "data/rooms")
    (results / "data/rooms" / MARKER).unlink()
    with pytest.raises(ArtifactError, match=r"rooms: is not complete"):
        publish(results / "x", "solarwm.test.v1", (data,))
    with pytest.raises(ArtifactError):
        lineage(results / "data/rooms")


def test_a_parent_named_twice_is_recorded_once_in_the_order_given(results: Path) -> None:
    data, assets = read(results / "data/rooms"), read(results / "assets/tiny")
    child = publish(results / "x", "solarwm.test.v1", (assets, data, assets))
    assert [p.path for p in child.parents] == ["../assets/tiny", "../data/rooms"]


def test_text_shows_one_indented_line_per_artifact(results: Path) -> None:
    lines = format_lineage(lineage(results / VALIDATION)).splitlines()
    digest = read(results / "data/rooms").digest[:12]
    assert lines[0].startswith("solarwm.validation.v1  runs/r/validation/step_000020/live  ")
    assert lines[3] == f"      solarwm.dataset.raw.v1  data/rooms  {digest}  name=rooms  seed=3  ok"
    assert (
        lines[5] == f"    solarwm.dataset.raw.v1  data/rooms  {digest}  name=rooms  seed=3  ok  (shown above)"
    )
    shutil.rmtree(results / "assets/tiny")
    text = format_lineage(lineage(results / VALIDATION))
    assert "assets/tiny" in text and "missing (" in text


def test_text_of_a_single_artifact_and_of_nothing(results: Path) -> None:
    assert format_lineage(lineage(results / "data/rooms")).startswith("solarwm.dataset.raw.v1  rooms  ")
    assert format_lineage([]) == ""


def test_json_is_plain_values_in_walk_order(results: Path) -> None:
    values = json.loads(json.dumps(lineage_json(lineage(results / VALIDATION))))
    assert [v["depth"] for v in values] == [0, 1, 2, 3, 3, 2]
    assert values[3]["identity"] == {"name": "rooms", "seed": 3}
    assert values[3]["path"] == str(results / "data/rooms")
    assert values[5]["child"] == 1 and values[5]["repeated"] is True


def test_a_chain_of_many_checkpoints_is_walked_once_each(tmp_path: Path) -> None:
    data = publish(tmp_path / "data", "solarwm.dataset.raw.v1")
    previous: tuple[Artifact, ...] = ()
    for step in range(60):
        previous = (publish(tmp_path / f"c{step}", "solarwm.checkpoint.v1", (*previous, data), step=step),)
    nodes = lineage(previous[0].path)
    assert len(nodes) == 120 and nodes[-1].depth == 1
    assert sum(not node.repeated for node in nodes) == 61
