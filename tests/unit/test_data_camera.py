"""Camera arrays: conventions, rebasing, guards and the numbers of spec operations 5 and appendix A."""

import io
import struct
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.data import camera
from solarwm_lib.data.camera import CameraGuardError
from solarwm_lib.runtime.errors import ConfigError, DataError


def rotation(yaw, pitch=0.0):
    c, s, cp, sp = np.cos(yaw), np.sin(yaw), np.cos(pitch), np.sin(pitch)
    return np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]]) @ np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])


def path(frames=9, step=0.1):
    """A camera that walks along its own +z while turning: float32 [frames, 4, 4] camera-to-world."""
    c2w = np.tile(np.eye(4), (frames, 1, 1))
    for i in range(frames):
        c2w[i, :3, :3] = rotation(0.3 + 0.1 * i, 0.05 * i)
        c2w[i, :3, 3] = [step * i, -0.02 * i, 0.5 + step * i]
    return c2w.astype(np.float32)


def npz(**arrays):
    return camera.npz_bytes(**arrays)


def test_load_returns_the_stored_float32_c2w():
    c2w = path()
    loaded = camera.load_c2w(npz(c2w=c2w), "c2w")
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, c2w)


def stored_as(c2w, key, axes="opencv", scale=1.0):
    """`c2w` as another project would store it, float64: built with general inverses and flips, not with ours."""
    flip = np.diag([1.0, -1, -1, 1]) if axes == "opengl" else np.eye(4)
    poses = c2w.astype(np.float64) @ flip
    poses[:, :3, 3] /= scale
    w2c = np.linalg.inv(poses)
    arrays = {"c2w": poses, "w2c": w2c, "relative_w2c": w2c @ poses[0]}
    return arrays[key.removeprefix("vipe_")]


def ray_map(w2c, height=3, width=4):
    """Origins and directions in the first camera's frame of a small grid of pixels: float64 [T, H, W, 6]."""
    c2w = np.linalg.inv(w2c.astype(np.float64))
    x, y = np.meshgrid((np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height)
    pixels = np.stack([x, y, np.ones_like(x)], axis=-1)
    rays = pixels @ np.linalg.inv(camera.fixed_intrinsics().astype(np.float64)).T
    directions = np.einsum("tij,hwj->thwi", c2w[:, :3, :3], rays)
    origins = np.broadcast_to(c2w[:, None, None, :3, 3], directions.shape)
    return np.concatenate([origins, directions], axis=-1)


@pytest.mark.parametrize("axes", camera.AXES)
@pytest.mark.parametrize("key", [*camera.C2W_KEYS, *camera.W2C_KEYS, camera.RELATIVE_KEY])
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_one_path_stored_any_declared_way_gives_the_same_ray_map(key, axes, scale):
    c2w, indices = path(), (2, 3, 7)
    stored = npz(**{key: stored_as(c2w, key, axes, scale), "vipe_status": np.array("ok")})
    loaded = camera.load_cameras(stored, key, axes=axes, scale=scale)
    assert loaded.dtype == np.float32
    np.testing.assert_allclose(
        ray_map(camera.relative_w2c(loaded, indices)), ray_map(camera.relative_w2c(c2w, indices)), atol=3e-6
    )
    if key != camera.RELATIVE_KEY:
        np.testing.assert_allclose(
            camera.load_c2w(stored, key, axes=axes, scale=scale), c2w, rtol=1e-6, atol=1e-6
        )


def test_nothing_is_converted_that_is_not_declared():
    for other in (stored_as(path(), "w2c"), stored_as(path(), "c2w", "opengl"), 100 * path() + 0 * path()):
        other = other.astype(np.float32)
        other[:, :3, :3] = path()[:, :3, :3]  # still rigid
        other[:, 3] = [0, 0, 0, 1]
        np.testing.assert_array_equal(camera.load_c2w(npz(c2w=other), "c2w"), other)


def test_relative_cameras_have_no_absolute_place_and_start_at_the_identity():
    stored = npz(relative_w2c=stored_as(path(), "relative_w2c"))
    with pytest.raises(ConfigError, match=r"relative_w2c.*holds no absolute cameras"):
        camera.load_c2w(stored, "relative_w2c")
    with pytest.raises(
        DataError, match=r"clip-a: array 'relative_w2c': row 0 differs from identity by 0\.\d+"
    ):
        camera.load_cameras(npz(relative_w2c=stored_as(path(), "w2c")), "relative_w2c", name="clip-a")


def test_relative_cameras_rebased_to_their_own_first_frame_come_back():
    stored = stored_as(path(), "relative_w2c").astype(np.float32)
    loaded = camera.load_cameras(npz(relative_w2c=stored), "relative_w2c")
    np.testing.assert_allclose(camera.relative_w2c(loaded, range(9)), stored, atol=5e-7)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"key": "extrinsics"}, "data.camera_array_key: found 'extrinsics'.*relative_w2c"),
        ({"axes": "blender"}, "data.camera_axes: found 'blender', expected one of opencv, opengl"),
        ({"scale": 0.0}, "data.camera_scale: found 0.0, expected a positive number"),
        ({"scale": float("nan")}, "data.camera_scale"),
    ],
)
def test_an_unknown_convention_is_a_configuration_error(declared, message):
    declared = {"key": "c2w"} | declared
    with pytest.raises(ConfigError, match=message):
        camera.load_cameras(npz(c2w=path(), extrinsics=path()), **declared)


def test_translations_beyond_float32_are_refused():
    far = path().astype(np.float64)
    far[:, 0, 3] = 1e300
    with pytest.raises(DataError, match="beyond float32"):
        camera.load_c2w(npz(c2w=far), "c2w")
    far[:, 0, 3] = [3e38, *[-3e38] * 8]
    with pytest.raises(DataError, match="clip-a: relative translations overflow float32"):
        camera.relative_c2w(camera.load_c2w(npz(c2w=far), "c2w"), (0, 1), name="clip-a")


@pytest.mark.parametrize("key", ["w2c", "relative_w2c"])
def test_a_stored_inverse_is_inverted_with_more_than_float32(key):
    far = path()
    far[:, :3, 3] += [500, -300, 900]
    found = camera.relative_w2c(camera.load_cameras(npz(**{key: stored_as(far, key)}), key), (0, 4))
    expected = (np.linalg.inv(far.astype(np.float64)) @ far[0].astype(np.float64))[[0, 4]]
    np.testing.assert_allclose(found, expected, atol=2e-4)  # float32 spacing at 900 is 6e-5


@given(
    yaw=st.floats(-3, 3),
    pitch=st.floats(-1.5, 1.5),
    at=st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3),
)
def test_conversions_are_involutions(yaw, pitch, at):
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = rotation(yaw, pitch), at
    for key in ("w2c", "relative_w2c"):
        for axes in camera.AXES:
            twice = camera.to_c2w(camera.to_c2w(pose, key, axes), key, axes)
            if key == "relative_w2c" or axes == "opencv":
                np.testing.assert_allclose(twice, pose, atol=1e-9)
    np.testing.assert_array_equal(camera.to_c2w(camera.to_c2w(pose, "c2w", "opengl"), "c2w", "opengl"), pose)


def test_the_flip_is_right_of_c2w_and_left_of_w2c():
    c2w, flip = path().astype(np.float64), np.diag([1.0, -1, -1, 1])
    np.testing.assert_array_equal(camera.to_c2w(c2w, "c2w", "opengl"), c2w @ flip)
    w2c = np.linalg.inv(c2w)
    np.testing.assert_allclose(np.linalg.inv(camera.to_c2w(w2c, "w2c", "opengl")), flip @ w2c, atol=1e-6)
    relative = w2c @ c2w[0]
    np.testing.assert_allclose(
        np.linalg.inv(camera.to_c2w(relative, "relative_w2c", "opengl")), flip @ relative @ flip, atol=1e-6
    )


@pytest.mark.parametrize(
    ("arrays", "key", "message"),
    [
        ({"c2w": np.full((3, 4, 4), np.nan)}, "c2w", "frame 0 holds NaN"),
        ({"c2w": np.eye(4)}, "c2w", r"shape \[4, 4\], expected \[T, 4, 4\]"),
        ({"c2w": np.zeros((0, 4, 4))}, "c2w", "T >= 1"),
        ({"c2w": np.zeros((2, 3, 4))}, "c2w", r"shape \[2, 3, 4\]"),
        ({"c2w": np.tile(np.eye(4, dtype=int), (2, 1, 1))}, "c2w", "dtype int64"),
        ({"c2w": np.tile(np.diag([2.0, 2, 2, 1]), (2, 1, 1))}, "c2w", "frame 0 is not a rotation"),
        ({"c2w": np.tile(np.diag([1.0, -1, 1, 1]), (2, 1, 1))}, "c2w", "mirrored"),
        ({"c2w": np.tile(np.diag([1.0, 1, 1, 2]), (2, 1, 1))}, "c2w", "bottom row"),
        ({"pose": path()}, "c2w", "no array 'c2w', found pose"),
        ({"vipe_c2w": path(), "vipe_status": np.array("failed")}, "vipe_c2w", "vipe_status is failed"),
        ({"vipe_c2w": path()}, "vipe_c2w", "vipe_status is absent"),
        (
            {"vipe_w2c": path(), "vipe_status": np.array(["ok", "lost"])},
            "vipe_w2c",
            "vipe_status is lost, ok",
        ),
        ({"w2c": np.tile(np.diag([1.0, 1, -1, 1]), (2, 1, 1))}, "w2c", "frame 0 is mirrored"),
        ({"w2c": np.tile(np.diag([1.0, 1, 1.1, 1]), (2, 1, 1))}, "w2c", "frame 0 is not a rotation"),
    ],
)
def test_bad_camera_is_one_line_with_exit_code_3(arrays, key, message):
    with pytest.raises(DataError, match=message) as caught:
        camera.load_c2w(npz(**arrays), key, name="clip-a")
    assert caught.value.exit_code == 3
    assert str(caught.value).startswith("clip-a:") and "\n" not in str(caught.value)


def test_unreadable_and_pickled_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="missing"):
        camera.load_c2w(tmp_path / "none.npz", "c2w")
    for data in (b"", b"junk", npz(c2w=path())[:100]):
        with pytest.raises(DataError, match="not a readable NPZ"):
            camera.load_c2w(data, "c2w")
    stream = io.BytesIO()
    np.savez(stream, c2w=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match="not a readable NPZ"):
        camera.load_c2w(stream.getvalue(), "c2w")
    stream = io.BytesIO()
    np.save(stream, path())
    with pytest.raises(DataError, match="not a readable NPZ"):
        camera.load_c2w(stream.getvalue(), "c2w")


@given(data=st.data())
def test_a_damaged_file_is_one_line_or_still_a_camera(data):
    stream = io.BytesIO()
    np.savez_compressed(stream, c2w=path())
    stored = bytearray(stream.getvalue())
    for at in data.draw(st.lists(st.integers(0, len(stored) - 1), min_size=1, max_size=4)):
        stored[at] = data.draw(st.integers(0, 255))
    try:
        loaded = camera.load_c2w(bytes(stored), "c2w", name="clip-a")
    except DataError as error:
        assert str(error).startswith("clip-a:") and "\n" not in str(error)
    else:
        assert loaded.shape[1:] == (4, 4)


def test_bytes_status_is_read_and_other_arrays_are_not():
    stream = io.BytesIO()
    np.savez(stream, vipe_c2w=path(), vipe_status=np.array(b"ok"), notes=np.array([{}], dtype=object))
    np.testing.assert_array_equal(camera.load_c2w(stream.getvalue(), "vipe_c2w"), path())


def test_relative_w2c_equals_inv_c2w_i_times_c2w_0():
    c2w, indices = path(), (0, 1, 5)
    expected = [np.linalg.inv(c2w[i].astype(np.float64)) @ c2w[0].astype(np.float64) for i in indices]
    relative = camera.relative_w2c(c2w, indices)
    assert relative.dtype == np.float32
    np.testing.assert_array_equal(relative[0], np.eye(4))
    np.testing.assert_allclose(relative, expected, atol=1e-6)


def test_the_first_selected_frame_is_the_anchor_and_world_frame_is_irrelevant():
    c2w = path()
    world = np.eye(4, dtype=np.float32)
    world[:3, :3], world[:3, 3] = rotation(1.1, -0.4), [3, 4, 5]
    np.testing.assert_allclose(
        camera.relative_w2c(world @ c2w, (2, 3, 7)), camera.relative_w2c(c2w, (2, 3, 7)), atol=2e-6
    )


def test_inverse_and_axis_flip_are_involutions():
    c2w = path()
    np.testing.assert_allclose(camera.invert_rigid(camera.invert_rigid(c2w)), c2w, atol=1e-6)
    np.testing.assert_array_equal(camera.opengl_to_opencv(camera.opengl_to_opencv(c2w)), c2w)
    # An OpenGL camera looks along -z; after the flip the viewing direction is +z, the centre unchanged.
    np.testing.assert_array_equal(camera.opengl_to_opencv(c2w)[:, :3, 2], -c2w[:, :3, 2])
    np.testing.assert_array_equal(camera.opengl_to_opencv(c2w)[:, :3, 3], c2w[:, :3, 3])


@pytest.mark.parametrize(
    ("family", "frames", "count", "last"),
    [
        ("wan22_ti2v_5b", 81, 21, 77),
        ("wan22_i2v_a14b", 153, 39, 149),
        ("wan22_ti2v_5b", 33, 9, 29),
        ("ltx25_video", 153, 20, 145),
        ("minimax_h3", 158, 47, 154),
    ],
)
def test_latent_cameras_are_the_first_frame_of_each_group(family, frames, count, last):
    indices = camera.latent_frame_indices(frames, family)
    assert len(indices) == count and indices[:2] == (0, 1) and indices[-1] == last
    stride = 8 if family == "ltx25_video" else 4
    assert indices[2] == 1 + stride


def test_h3_cameras_repeat_1_4_4_4_4():
    indices = camera.latent_frame_indices(158, "minimax_h3")
    assert np.diff(indices).tolist()[:9] == [1, 4, 4, 4, 4, 1, 4, 4, 4]


@pytest.mark.parametrize(("latents", "last"), [(45, 149), (47, 154), (50, 166)])
def test_h3_rollouts_of_whole_chunks_have_cameras_too(latents, last):
    positions = camera.latent_positions(latents, "minimax_h3")
    assert (len(positions), positions[-1]) == (latents, last)
    # With the 51 - 1 cadence of Stage1 sampling: pixel increments 1, 4, 4, 4, 4 repeated.
    assert set(np.diff(positions)[::5]) == {1} and set(np.diff(positions)) == {1, 4}


def test_ltx_relative_translations_of_its_acceptance_values():
    c2w = np.tile(np.eye(4, dtype=np.float32), (153, 1, 1))
    c2w[:, 0, 3] = np.arange(153)
    relative = camera.relative_w2c(c2w, camera.latent_frame_indices(153, "ltx25_video"))
    assert relative[1, 0, 3] == -1 and relative[19, 0, 3] == -145


def test_illegal_frame_counts_and_families_are_refused():
    with pytest.raises(ConfigError, match=r"77.*81"):
        camera.latent_frame_indices(80, "wan22_ti2v_5b")
    with pytest.raises(ConfigError, match="wan22_ti2v_5b"):
        camera.latent_frame_indices(81, "wan")


@pytest.mark.parametrize(("frames", "audited", "total"), [(81, 21, 21), (153, 39, 39), (957, 41, 240)])
def test_audited_rows_of_appendix_a(frames, audited, total):
    indices = camera.latent_frame_indices(frames, "wan22_ti2v_5b")
    assert (camera.audit_rows(indices, 16, frames), len(indices)) == (audited, total)


def audit(relative, indices, frames, **guards):
    guards = {"max_relative_translation": 20.0, "max_camera_absolute": 20.0} | guards
    camera.audit(relative, indices, fps=16, pixel_frames=frames, name="clip-a", **guards)


def test_guards_look_at_the_first_ten_seconds_only():
    indices = camera.latent_frame_indices(957, "wan22_ti2v_5b")
    relative = np.tile(np.eye(4, dtype=np.float32), (len(indices), 1, 1))
    relative[41, 0, 3] = 100
    audit(relative, indices, 957)
    relative[40, 0, 3] = 100
    with pytest.raises(CameraGuardError, match=r"clip-a: translation 100 at pixel frame 157 exceeds"):
        audit(relative, indices, 957)


def test_guards_are_euclidean_norm_and_largest_entry_and_null_disables():
    relative = np.tile(np.eye(4, dtype=np.float32), (2, 1, 1))
    relative[1, :3, 3] = [15, 15, 0]  # norm 21.2, entries 15
    with pytest.raises(CameraGuardError, match="max_relative_translation"):
        audit(relative, (0, 1), 5)
    audit(relative, (0, 1), 5, max_relative_translation=None)
    relative[1, :3, 3] = [0, -25, 0]
    with pytest.raises(CameraGuardError, match="max_camera_absolute"):
        audit(relative, (0, 1), 5, max_relative_translation=None)
    audit(relative, (0, 1), 5, max_relative_translation=None, max_camera_absolute=None)


def test_a_guard_refuses_what_it_cannot_compare():
    relative = np.tile(np.eye(4, dtype=np.float32), (2, 1, 1))
    relative[1, 0, 3] = np.nan
    with pytest.raises(CameraGuardError, match="translation nan"):
        audit(relative, (0, 1), 5)


def test_rebasing_agrees_with_float64():
    c2w = path(81, 0.2)
    indices = camera.latent_frame_indices(81, "wan22_ti2v_5b")
    exact = c2w.astype(np.float64)[list(indices)]
    np.testing.assert_allclose(
        camera.relative_c2w(c2w, indices), np.linalg.inv(exact[0]) @ exact, atol=2e-6, rtol=1e-6
    )
    np.testing.assert_allclose(
        camera.logd4(camera.relative_w2c(c2w, indices)),
        camera.logd4(np.linalg.inv(exact) @ exact[0]),
        atol=2e-6,
    )


def test_logd4_of_appendix_a_leaves_rotation_alone():
    w2c = np.tile(path(1), (5, 1, 1))
    lengths = np.array([0, 0.5, 1, 2, 20], np.float32)
    w2c[:, :3, 3] = lengths[:, None] * np.array([0.6, 0, 0.8], np.float32)
    transformed = camera.logd4(w2c)
    np.testing.assert_allclose(
        np.linalg.norm(transformed[:, :3, 3], axis=1), [0, 0.101366, 0.173287, 0.274653, 0.761131], atol=1e-6
    )
    np.testing.assert_array_equal(transformed[:, :3, :3], w2c[:, :3, :3])
    assert transformed.dtype == np.float32


def test_fixed_intrinsics_are_the_released_constants():
    expected = [[0.50505051, 0, 0.5], [0, 0.89786756, 0.5], [0, 0, 1]]
    np.testing.assert_allclose(camera.fixed_intrinsics(), expected, atol=1e-8)


FOUR = [0.6, 0.9, 0.5, 0.45]
K = [[0.6, 0, 0.5], [0, 0.9, 0.45], [0, 0, 1]]


@pytest.mark.parametrize(
    "stored",
    [
        np.array(FOUR),
        np.array([FOUR]),
        np.array(K),
        np.array([K], np.float32),
        np.tile(FOUR, (9, 1)),
        np.tile(K, (9, 1, 1)),
        np.array([[9, 9, 9, 9], [9, 9, 9, 9], *[FOUR] * 7], float),  # rows outside the clip do not count
    ],
)
def test_intrinsics_of_a_clip_are_static_or_those_of_its_first_frame(stored):
    found = camera.clip_intrinsics(npz(intrinsics=stored), "intrinsics", [2, 3, 7])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, K, rtol=1e-6)


def test_small_changes_of_the_focal_length_take_the_first_frame():
    stored = np.tile(FOUR, (9, 1))
    stored[3:, :2] *= 1.04
    np.testing.assert_allclose(camera.clip_intrinsics(npz(k=stored), "k", [2, 3, 7]), K, rtol=1e-6)


def zoomed():
    rows = np.tile(FOUR, (9, 1))
    rows[7, 0] *= 1.5
    return rows


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (
            np.array([970, 970, 960, 540.0]),
            r"holds 970, which is in pixels.*divide fx and cx by the image width",
        ),
        (np.array([0.6, -0.9, 0.5, 0.5]), "focal length -0.9, expected a positive one"),
        (np.array([0.6, np.nan, 0.5, 0.5]), "NaN or infinite"),
        (np.array([1, 1, 0, 0]), "dtype int64"),
        (np.array([0.6, 0.9]), r"shape \[2\], expected \[4\]"),
        (np.zeros((0, 4)), r"shape \[0, 4\]"),
        (np.tile(np.eye(4), (2, 1)), "focal length 0"),
        (np.array([[0.6, 0.1, 0.5], [0, 0.9, 0.5], [0, 0, 1]]), "no skew"),
        (np.array([[0.6, 0, 0], [0, 0.9, 0], [0.5, 0.5, 1]]), "bottom row 0 0 1"),
        (np.tile(FOUR, (5, 1)), "has 5 rows, the clip needs row 7"),
        (zoomed(), "focal length changes by 50% within the clip"),
    ],
)
def test_bad_intrinsics_are_refused(stored, message):
    with pytest.raises(DataError, match=f"clip-a: array 'intrinsics'.*{message}") as caught:
        camera.clip_intrinsics(npz(intrinsics=stored), "intrinsics", [2, 3, 7], name="clip-a")
    assert "\n" not in str(caught.value)


def test_absent_intrinsics_name_what_is_there_and_the_key():
    with pytest.raises(DataError, match=r"'intrinsics' is missing, found c2w; set data.intrinsics_array_key"):
        camera.clip_intrinsics(npz(c2w=path()), "intrinsics", [0])


def declared(key="c2w", axes="opencv", scale=1.0, limit=20.0):
    return SimpleNamespace(
        camera_array_key=key,
        camera_axes=axes,
        camera_scale=scale,
        max_relative_translation=limit,
        max_camera_absolute=limit,
    )


def block(**changes):
    fields = camera.camera_manifest((9, 4, 4)) | changes
    return {key: value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize(
    ("found", "config"),
    [
        (block(), declared()),
        (block(array_key=None), declared()),
        (block(array_key=None), declared("vipe_c2w")),
        (block(axes="opencv"), declared()),
        (block(axes="opengl"), declared(axes="opengl")),
        (block(array_key="w2c", convention=None), declared("w2c")),
        (block(array_key="w2c", convention="authoritative_source_w2c_no_axis_flip"), declared("w2c")),
        (block(array_key="w2c", convention=None, axes="opengl"), declared("w2c", "opengl")),
        (block(array_key="relative_w2c", convention="relative_w2c+normalized_K"), declared("relative_w2c")),
        (block(max_camera_abs=5, max_rel_translation=7), declared(limit=None)),
        (block(max_camera_abs=2000.0, max_rel_translation=2000), declared(scale=0.01)),
    ],
)
def test_an_attestation_of_what_is_declared_is_accepted(found, config):
    camera.check_attestation(found, (9, 4, 4), config, "clip-a")


@pytest.mark.parametrize(
    ("found", "config", "message"),
    [
        (None, declared(), "no 'camera' block"),
        (block(convention=None), declared(), "camera.convention is None, expected 'authoritative_source_c2w"),
        (
            block(array_key="w2c"),
            declared(),
            "camera.array_key is 'w2c', expected 'c2w'.*data.camera_array_key",
        ),
        (
            block(),
            declared("w2c"),
            "camera.convention is 'authoritative_source_c2w_no_axis_flip', expected '.*w2c",
        ),
        (block(convention=None, array_key=None), declared("w2c"), "camera.array_key is None, expected 'w2c'"),
        (block(), declared(axes="opengl"), "camera.axes is None, expected 'opengl'.*data.camera_axes"),
        (block(axes="opengl"), declared(), "camera.axes is 'opengl', expected 'opencv'"),
        (block(dtype="float64"), declared(), "camera.dtype is 'float64', expected 'float32'"),
        (block(finite=False), declared(), "camera.finite is False"),
        (block(shape=[8, 4, 4]), declared(), r"camera.shape is \[8, 4, 4\], expected \[9, 4, 4\]"),
        (block(magnitude_audit_seconds=5.0), declared(), "magnitude_audit_seconds is 5.0, expected 10.0"),
        (block(max_rel_translation=5.0), declared(), "max_rel_translation is 5.0, expected 20.0"),
        (block(max_camera_abs=True), declared(limit=1.0), "max_rel_translation is 20.0, expected 1.0"),
        (block(max_camera_abs=None), declared(), "max_camera_abs is None, expected 20.0"),
        (block(), declared(scale=0.01), "max_rel_translation is 20.0, expected 2000.0"),
    ],
)
def test_an_attestation_of_something_else_is_refused(found, config, message):
    with pytest.raises(DataError, match=f"clip-a: manifest .*{message}") as caught:
        camera.check_attestation(found, (9, 4, 4), config, "clip-a")
    assert "\n" not in str(caught.value)


def test_npz_bytes_are_reproducible_and_plain_numpy_reads_them():
    c2w = path()
    assert npz(c2w=c2w) == npz(c2w=c2w.copy())
    with np.load(io.BytesIO(npz(c2w=c2w))) as archive:
        np.testing.assert_array_equal(archive["c2w"], c2w)


def npz_of(content, compression=zipfile.ZIP_STORED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr("c2w.npy", content)
    return stream.getvalue()


def test_an_array_that_promises_more_than_any_file_holds_is_refused():
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000, 4, 4), }".ljust(117) + b"\n"
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    with pytest.raises(DataError, match=r"clip-a: not a readable NPZ .Unable to allocate"):
        camera.load_c2w(npz_of(header), "c2w", name="clip-a")


def test_a_small_file_that_unpacks_to_a_large_one_is_not_unpacked():
    packed = npz_of(bytes(65 << 20), zipfile.ZIP_DEFLATED)
    assert len(packed) < 100_000
    with pytest.raises(DataError, match=r"array 'c2w.npy' has 68157440 bytes, expected at most 67108864"):
        camera.load_c2w(packed, "c2w")
