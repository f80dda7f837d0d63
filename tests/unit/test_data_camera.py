"""Camera arrays: conventions, rebasing, guards and the numbers of spec operations 5 and appendix A."""

import io

import numpy as np
import pytest

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


def test_the_array_name_decides_the_direction():
    c2w = path()
    w2c = np.linalg.inv(c2w.astype(np.float64))
    np.testing.assert_allclose(camera.load_c2w(npz(w2c=w2c), "w2c"), c2w, atol=1e-6)
    np.testing.assert_allclose(
        camera.load_c2w(npz(vipe_w2c=w2c, vipe_status=np.array("ok")), "vipe_w2c"), c2w, atol=1e-6
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


def test_an_unknown_key_is_a_configuration_error():
    with pytest.raises(ConfigError, match="camera_array_key"):
        camera.load_c2w(npz(extrinsics=path()), "extrinsics")


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


def test_npz_bytes_are_reproducible_and_plain_numpy_reads_them():
    c2w = path()
    assert npz(c2w=c2w) == npz(c2w=c2w.copy())
    with np.load(io.BytesIO(npz(c2w=c2w))) as archive:
        np.testing.assert_array_equal(archive["c2w"], c2w)
