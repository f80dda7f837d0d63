"""What stored cameras look like under a declared convention: every wrong declaration is named with its numbers."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from solarwm_lib.data import camera, camera_report
from solarwm_lib.data.camera_report import Convention
from solarwm_lib.data.index import RawRow

FLIP = np.diag([1.0, -1, -1, 1])


def walk(seed=0, frames=49, step=0.08, turn=0.03, start=(3.0, 1.5, -2.0)):
    """A person walking along their view while turning: float64 c2w [frames, 4, 4], OpenCV, metres."""
    rng = np.random.default_rng(seed)
    yaw = rng.uniform(0, 2 * np.pi) + np.cumsum(np.full(frames, turn) + rng.normal(0, 0.01, frames))
    c, s = np.cos(yaw), np.sin(yaw)
    c2w = np.tile(np.eye(4), (frames, 1, 1))
    c2w[:, 0, 0], c2w[:, 0, 2], c2w[:, 2, 0], c2w[:, 2, 2] = c, s, -s, c
    centre = np.cumsum(c2w[:, :3, 2] * step * rng.uniform(0.8, 1.2, (frames, 1)), axis=0)
    c2w[:, :3, 3] = np.array(start) + np.concatenate([np.zeros((1, 3)), centre[:-1]])
    return c2w


def walks(change=lambda c2w: c2w, count=8, **options):
    return [(f"clip-{seed}", change(walk(seed, **options))) for seed in range(count)]


def report(cameras, **declared):
    summary = camera_report.summarize(cameras, convention=Convention(**declared))
    json.dumps(summary, allow_nan=False)
    found = camera_report.warnings(summary)
    assert not any("\n" in line for line in found)
    return summary, found


STORED = {
    ("c2w", "opencv"): lambda c2w: c2w,
    ("c2w", "opengl"): lambda c2w: c2w @ FLIP,
    ("w2c", "opencv"): np.linalg.inv,
    ("w2c", "opengl"): lambda c2w: FLIP @ np.linalg.inv(c2w),
    ("relative_w2c", "opencv"): lambda c2w: np.linalg.inv(c2w) @ c2w[0],
    ("relative_w2c", "opengl"): lambda c2w: FLIP @ np.linalg.inv(c2w) @ c2w[0] @ FLIP,
}


@pytest.mark.parametrize(("key", "axes"), STORED)
def test_a_right_declaration_walks_forward_and_warns_of_nothing(key, axes):
    summary, found = report(walks(STORED[key, axes]), array_key=key, axes=axes)
    assert found == []
    assert summary["forward_dot_step"] > 0.99 and summary["handedness"] == "right"
    assert summary["step_length"]["mean"] == pytest.approx(0.08, rel=0.05)
    assert summary["turn_degrees"]["mean"] == pytest.approx(np.degrees(0.03), rel=0.1)
    assert summary["rotation_error_max"] < 1e-12 and summary["jump_count"] == 0
    assert (summary["samples"], summary["frames"], summary["steps"]) == (8, 8 * 49, 8 * 48)


@pytest.mark.parametrize("key", ["c2w", "w2c"])
@pytest.mark.parametrize("axes", camera.AXES)
def test_wrong_axes_are_named_with_the_axes_that_move_forward(key, axes):
    other = camera.AXES[1 - camera.AXES.index(axes)]
    summary, found = report(walks(STORED[key, axes]), array_key=key, axes=other)
    assert summary["forward_dot_step"] < -0.99
    (line,) = found
    assert (
        f"declared {key}/{other} gives forward_dot_step -1.00 over 8 moving clips, 8 of them backward" in line
    )
    assert f"forward would be {key}/{axes} +1.00" in line and "data.camera_axes" in line


@pytest.mark.parametrize(("stored", "declared"), [("w2c", "c2w"), ("c2w", "w2c")])
@pytest.mark.parametrize("axes", camera.AXES)
@pytest.mark.parametrize("turn", [0.004, 0.03])
@pytest.mark.parametrize("relative", [False, True])
def test_a_wrong_direction_is_named_with_the_right_one_first(stored, declared, axes, turn, relative):
    def change(c2w):
        return STORED[stored, axes](np.linalg.inv(c2w[0]) @ c2w if relative else c2w)

    summary, found = report(walks(change, count=16, turn=turn), array_key=declared, axes=axes)
    right = summary["forward_by_interpretation"][f"{stored}/{axes}"]
    assert right > 0.99 > abs(summary["forward_dot_step"])
    if relative and axes == "opengl":
        # Near the identity an inverse and a flip undo each other: this pair no movement can tell apart.
        assert summary["forward_dot_step"] > 0.9 and found == []
        return
    (line,) = found
    assert f"declared {declared}/{axes} gives forward_dot_step" in line
    assert f"forward would be {stored}/{axes} +1.00 (mean step 0.0803 m)" in line


@pytest.mark.parametrize("turn", [0.005, 0.02, 0.035, 0.05, 0.1])
def test_looking_around_while_walking_straight_is_no_contradiction(turn):
    def change(c2w):
        heading = c2w[0, :3, 2].copy()
        c2w[:, :3, 3] = 0.08 * np.arange(len(c2w))[:, None] * heading
        return np.linalg.inv(c2w[0]) @ c2w

    summary, found = report(walks(change, turn=turn))
    assert summary["step_by_direction"]["c2w"] < summary["step_by_direction"]["w2c"]
    assert found == []


def test_an_orbit_around_the_origin_is_no_contradiction():
    def change(c2w):
        c2w[:, :3, 3] = -3 * c2w[:, :3, 2]
        return c2w

    assert report(walks(change))[1] == []


def test_the_four_interpretations_are_two_pairs_of_opposites():
    values = report(walks())[0]["forward_by_interpretation"]
    assert set(values) == {"c2w/opencv", "c2w/opengl", "w2c/opencv", "w2c/opengl"}
    assert values["c2w/opengl"] == -values["c2w/opencv"] and values["w2c/opengl"] == -values["w2c/opencv"]


def test_a_single_clip_walking_backward_is_no_contradiction():
    def backward(c2w):
        return c2w[::-1]

    assert report(walks(backward, count=1))[1] == []
    assert len(report(walks(backward, count=4))[1]) == 1
    sideways = walks(lambda c2w: c2w @ np.array([[0, 0, 1, 0], [0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 1.0]]))
    summary, found = report(sideways)
    assert abs(summary["forward_dot_step"]) < 0.01 and found == []


def mirror(c2w):
    return c2w @ np.diag([1.0, -1, 1, 1])


def test_mirrored_cameras_are_reported_not_raised():
    summary, found = report(walks(mirror))
    assert summary["handedness"] == "left" and summary["mirrored_frames"] == 8 * 49
    assert "392 of 392 frames are mirrored (determinant -1, handedness left)" in found[0]
    summary, _ = report(walks(mirror, count=1) + walks(count=1))
    assert summary["handedness"] == "mixed"


def test_a_scale_stored_in_the_rotation_is_named():
    def scaled(c2w):
        return c2w * np.array([2.0, 2, 2, 1])

    summary, found = report(walks(scaled))
    assert summary["rotation_error_max"] == pytest.approx(3)
    assert "392 of 392 frames are no rotations" in found[0]
    assert "a scale of 2 to 2 is stored in the matrix" in found[0]

    def sheared(c2w):
        return c2w @ np.array([[1, 0.01, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])

    (line,) = report(walks(sheared))[1]
    assert "no rotations" in line and "scale" not in line


def test_transposed_and_unfinished_matrices_are_named():
    assert any(
        "a bottom row differs from 0 0 0 1" in line
        for line in report(walks(lambda m: m.transpose(0, 2, 1)))[1]
    )

    def holed(c2w):
        c2w[3, 1, 1], c2w[9] = np.nan, np.inf
        return c2w

    summary, found = report(walks(holed, count=2))
    assert summary["nonfinite_frames"] == 4 and summary["steps"] == 2 * (48 - 4)
    assert found == ["cameras: 4 of 98 frames hold NaN or infinite values"]


@pytest.mark.parametrize(
    ("unit", "scale"), [("centimetres", 0.01), ("millimetres", 0.001)], ids=["centimetres", "millimetres"]
)
def test_another_unit_is_suspected_and_declaring_it_settles_it(unit, scale):
    def stored(c2w):
        c2w[:, :3, 3] /= scale
        return c2w

    (line,) = report(walks(stored))[1]
    assert f"the median step is {0.08 / scale:.3g}"[:21] in line
    assert f"if positions are in {unit}, set data.camera_scale to {scale:g}" in line
    summary, found = report(walks(stored), scale=scale)
    assert found == [] and summary["step_length"]["mean"] == pytest.approx(0.08, rel=0.05)


def test_hardly_any_movement_and_coarse_positions_are_named():
    (line,) = report(walks(step=1e-5))[1]
    assert "hardly a movement" in line and "data.camera_scale" in line
    (line,) = report(walks(start=(450_000, 0, 5_000_000)))[1]
    assert "float32 rounds them to 0.5 m, the median step is 0.08" in line
    still = walks(lambda c2w: np.repeat(c2w[:1], 49, axis=0))
    summary, found = report(still)
    assert summary["forward_dot_step"] is None and found == []


def test_cuts_are_counted_and_the_first_is_named():
    def cut(c2w):
        c2w[20:, :3, 3] += [5, 0, 0]
        return c2w

    summary, found = report(walks(cut, count=3))
    assert summary["jump_count"] == 3 and len(summary["jump_examples"]) == 3
    assert "3 of 144 steps are longer than 10 times" in found[0]
    assert "sample 'clip-0' frames 19 to 20" in found[0]


def test_one_wrong_dataset_among_right_ones_is_the_one_named():
    cameras = [(name, c2w, "right") for name, c2w in walks()]
    cameras += [(name + "x", c2w @ FLIP, "wrong") for name, c2w in walks(count=3)]
    summary, found = report(cameras)
    assert set(summary["datasets"]) == {"right", "wrong"} and summary["samples"] == 11
    (line,) = found
    assert line.startswith("cameras of dataset 'wrong': declared c2w/opencv gives forward_dot_step -1.00")
    assert "datasets" not in report(walks())[0]


def test_rows_are_read_and_unreadable_ones_are_counted():
    members = {f"c{i}.npz": camera.npz_bytes(c2w=walk(i).astype(np.float32)) for i in range(3)}
    members["c1.npz"] = b"junk"
    rows = [
        RawRow(
            sample_id=f"clip-{i}", key=f"c{i}", shard="a.tar", video_member="v", camera_member=f"c{i}.npz",
            manifest_member="m", dataset="a",
        )
        for i in range(3)
    ]  # fmt: skip
    summary = camera_report.summarize_rows(rows, lambda row, name: members[name], convention=Convention())
    assert summary["samples"] == 2 and summary["unreadable"] == 1
    (line,) = camera_report.warnings(summary)
    assert line.startswith("cameras: 1 of 3 cannot be read, first: sample 'clip-1': not a readable NPZ")


def test_nothing_to_look_at_is_reported_as_such():
    summary, found = report([])
    assert summary["samples"] == 0 and summary["handedness"] == "none" and found == []
    assert "no movement" in camera_report.format_summary(summary)


def test_the_terminal_form_names_the_declaration_and_the_numbers():
    cameras = [(name, c2w, "abc"[i % 2]) for i, (name, c2w) in enumerate(walks())]
    text = camera_report.format_summary(report(cameras, scale=0.5)[0])
    assert text.splitlines()[0] == "cameras (c2w, opencv axes, scale 0.5)"
    for word in (
        "handedness        right",
        "forward_dot_step  +1.000",
        "step_length",
        "rotation_error",
        "    samples",
        "  a",
    ):
        assert word in text


@given(
    stored=arrays(
        np.float32,
        st.tuples(st.integers(1, 6), st.just(4), st.just(4)),
        elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
    ),
    key=st.sampled_from(["c2w", "w2c", "relative_w2c"]),
    axes=st.sampled_from(camera.AXES),
)
def test_whatever_is_stored_gives_a_report(stored, key, axes):
    summary, _ = report([("a", stored), ("b", stored)], array_key=key, axes=axes)
    assert summary["frames"] == 2 * len(stored)
    camera_report.format_summary(summary)


def test_the_report_and_the_loader_agree_on_what_is_refused():
    """A clip without a `_broken` warning loads; one with it does not."""
    for change in (
        lambda c2w: c2w,
        mirror,
        lambda c2w: c2w * np.array([2.0, 2, 2, 1]),
        lambda c2w: c2w * np.nan,
    ):
        stored = change(walk())
        refused = bool(report([("a", stored)])[1])
        stream = io.BytesIO()
        np.savez(stream, c2w=stored)
        try:
            camera.load_c2w(stream.getvalue(), "c2w")
        except camera.DataError:
            assert refused
        else:
            assert not refused
