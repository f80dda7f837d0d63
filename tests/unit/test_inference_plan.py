"""A frozen plan has the released selection, holds for one setting and one index, and cannot be edited or replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from solarwm_lib.inference import plan as plans
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, DataError


def test_selection_order_is_the_released_one() -> None:
    expected = [3, 0, 8, 7, 16, 2, 11, 1, 10, 17, 12, 6, 18, 15, 13, 9, 4, 14, 5, 19]
    assert plans.selection_order(20, 42) == expected


def test_derived_seeds_are_the_released_ones() -> None:
    expected = [1602803860, 531831846, 1156771798, 888409209]
    assert [plans.release_seed("validation-noise", 0, slot, 42) for slot in range(4)] == expected
    assert plans.release_seed("clip-a", 0, 0, 0) == 1556396719
    assert plans.drawn_start("clip-a", 0, 80) == 13
    adjusted = plans.release_seed("variable-rollout-start:clip-a", 0, 0, 0)
    assert adjusted == 407386096 and np.random.RandomState(adjusted).randint(0, 80) == 20


def test_plan_is_the_same_whatever_path_topology_and_passes(tiny_world: Any, tmp_path: Path) -> None:
    first = plans.build_plan(tiny_world.resolve(tmp_path / "a"))
    other = tiny_world.resolve(
        tmp_path / "b",
        distributed__world_size=4,
        train__max_steps=99,
        validation__passes=[{"name": "x", "num_inference_steps": 7}],
    )
    assert plans.build_plan(other) == first
    assert [case["slot"] for case in first["cases"]] == [0, 1]
    assert {case["occurrence"] for case in first["cases"]} == {0}


def test_frozen_plan_is_accepted_again_and_never_replaced(tiny_world: Any, tmp_path: Path) -> None:
    path = tmp_path / "frozen-plan.json"
    frozen = plans.freeze_plan(tiny_world.resolve(tmp_path / "run"), path)
    before = path.read_bytes()
    assert plans.freeze_plan(tiny_world.resolve(tmp_path / "run"), path) == frozen == plans.load_plan(path)
    with pytest.raises(ArtifactError, match=r"noise_seed: found 42, wanted 7"):
        plans.freeze_plan(tiny_world.resolve(tmp_path / "run", validation__noise_seed=7), path)
    assert path.read_bytes() == before


def test_edited_plan_is_refused(tiny_world: Any, tmp_path: Path) -> None:
    path = tmp_path / "frozen-plan.json"
    plans.freeze_plan(tiny_world.resolve(tmp_path / "run"), path)
    content = json.loads(path.read_bytes())
    content["cases"][0]["start_frame"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="payload_digest"):
        plans.load_plan(path)


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"schema": "other"}'])
def test_what_is_not_a_plan_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "frozen-plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"frozen-plan\.json"):
        plans.load_plan(path)


def test_plan_of_another_setting_names_both_sides(tiny_world: Any, tmp_path: Path) -> None:
    frozen = plans.build_plan(tiny_world.resolve(tmp_path / "run"))
    changed = tiny_world.resolve(tmp_path / "run", validation__noise_seed=7)
    with pytest.raises(ConfigError, match=r"validation\.noise_seed: the frozen plan says 42, .* 7"):
        plans.check_plan(frozen, changed)


def test_more_cases_than_rows_says_which_key_to_lower(tiny_world: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"validation\.sample_count is 3, test-index\.jsonl has 2 rows"):
        plans.build_plan(tiny_world.resolve(tmp_path / "run", validation__sample_count=3))


def test_guards_that_leave_too_few_cases_are_reported(tiny_world: Any, tmp_path: Path) -> None:
    strict = tiny_world.resolve(tmp_path / "run", validation__max_relative_translation=1e-6)
    with pytest.raises(DataError, match=r"only 0 of 2 cases .*translation .*max_relative_translation"):
        plans.build_plan(strict)


def test_a_rejected_row_leaves_the_other_cases_as_they_were(tiny_world: Any, tmp_path: Path) -> None:
    """Noise and start belong to the sample, not to the slot it happens to get."""
    everything = plans.build_plan(tiny_world.resolve(tmp_path / "run"))["cases"]
    lengths = [_travel(tiny_world, case) for case in everything]
    limit = sum(lengths) / 2
    one = plans.build_plan(
        tiny_world.resolve(
            tmp_path / "run", validation__max_relative_translation=limit, validation__sample_count=1
        )
    )
    kept = everything[int(np.argmin(lengths))]
    assert {**one["cases"][0], "slot": 0} == {**kept, "slot": 0}


def _travel(tiny_world: Any, case: dict[str, Any]) -> float:
    from solarwm_lib.data.dataset import RawClips

    data = tiny_world.resolve(Path("x")).config.data
    w2c = RawClips(data.root, data.test_index, data).case(case["row_ordinal"], case["start_frame"]).w2c
    return float(np.linalg.norm(w2c[:, :3, 3], axis=1).max())
