"""The tiny world: exact geometry, generous motion, reproducible bytes."""

import hashlib
import json

import numpy as np
import pytest

from solarwm_lib import artifacts
from solarwm_lib.data import camera, room, synthetic, video
from solarwm_lib.data.index import read_index
from solarwm_lib.data.shards import ShardReader
from solarwm_lib.data.synthetic import SynthSpec, camera_path, film, synthesize
from solarwm_lib.runtime.errors import ArtifactError, ConfigError

SPEC = SynthSpec(
    "tiny", rooms=2, train_clips=5, test_clips=2, frames=9, height=32, width=48, clips_per_shard=2
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("data") / "tiny", SPEC, progress=False)


def psnr(a, b):
    return 10 * np.log10(255**2 / np.mean((a.astype(float) - b) ** 2))


def digests(root):
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_the_same_spec_gives_the_same_bytes(dataset, tmp_path):
    again = synthesize(tmp_path / "elsewhere", SPEC, progress=False)
    assert digests(again.path) == digests(dataset.path)
    assert again.digest == dataset.digest


def test_a_finished_dataset_is_kept_and_another_spec_is_refused(dataset):
    before = digests(dataset.path)
    assert synthesize(dataset.path, SPEC, progress=False).digest == dataset.digest
    with pytest.raises(ArtifactError, match="seed"):
        synthesize(dataset.path, SynthSpec(**vars(SPEC) | {"seed": 1}), progress=False)
    assert digests(dataset.path) == before


def test_the_layout_is_shards_indexes_and_a_preview(dataset):
    artifacts.verify(dataset.path, deep=True)
    assert dataset.schema == "solarwm.dataset.raw.v1"
    assert {member.path for member in dataset.members} == {
        "preview.png",
        "shards/test-000000.tar",
        "shards/train-000000.tar",
        "shards/train-000001.tar",
        "shards/train-000002.tar",
        "test-index.jsonl",
        "train-index.jsonl",
    }
    train, test = (read_index(dataset.path / f"{split}-index.jsonl") for split in ("train", "test"))
    assert len(train) == 5 and len(test) == 2
    assert not {row.sample_id for row in train} & {row.sample_id for row in test}
    assert all(row.num_frames == 9 and row.fps == 16 and row.caption for row in [*train, *test])


def test_stored_cameras_and_pixels_are_those_of_the_renderer(dataset):
    reader = ShardReader(dataset.path)
    rows = [row for split in ("train", "test") for row in read_index(dataset.path / f"{split}-index.jsonl")]
    for row, filmed in zip(rows, film(SPEC), strict=True):
        np.testing.assert_array_equal(camera.load_c2w(reader.read(row, row.camera_member), "c2w"), filmed.c2w)
        manifest = json.loads(reader.read(row, row.manifest_member))
        assert manifest["camera"] == camera.camera_manifest((9, 4, 4))
        assert manifest["video"] == {"num_frames": 9, "fps": 16.0, "height": 32, "width": 48}
        assert psnr(video.decode(reader.read(row, row.video_member)), filmed.frames) > 28


def test_training_and_held_out_paths_differ():
    paths = [filmed.c2w[:, :3, 3].tobytes() for filmed in film(SPEC)]
    assert len(set(paths)) == len(paths)


def test_paths_turn_60_to_120_degrees_walk_and_stay_inside():
    for clip in range(300):
        c2w = camera_path(33, 9, "path", clip)
        camera.check_rigid(c2w, "path")
        forward = c2w[:, [0, 2], 2]
        yaw = np.degrees(np.unwrap(np.arctan2(forward[:, 0], forward[:, 1])))
        assert 60 - 1e-2 <= abs(yaw[-1] - yaw[0]) <= 120 + 1e-2
        step = np.linalg.norm(np.diff(c2w[:, [0, 2], 3], axis=0), axis=1)
        assert 0.2 - 1e-3 <= step.sum() <= 1.5 and step.max() < 0.06
        assert np.abs(np.diff(yaw, 2)).max() < 1.0  # degrees per frame²: smooth
        assert np.abs(c2w[:, [0, 2], 3]).max() < 1.7 and np.abs(c2w[:, 1, 3]).max() < 0.3


def test_longer_paths_go_on_moving():
    long = camera_path(97, 1, "path")
    for start in (0, 32, 64):
        window = camera.relative_c2w(long, range(start, start + 33))
        assert np.linalg.norm(window[-1, :3, 3]) > 0.19


def project(c2w, point, height, width):
    """Pinhole projection written out independently of the renderer: (row, column) in pixels."""
    x, y, z = (np.linalg.inv(c2w.astype(np.float64)) @ np.append(point, 1.0))[:3]
    assert z > 0
    return (0.89786756 * y / z + 0.5) * height, (0.50505051 * x / z + 0.5) * width


def test_rendering_is_an_exact_pinhole_projection():
    scene = room.Room(3)
    # A single bright texel block on the +z wall, everything else black.
    atlas = np.zeros((6, room.TEXELS, room.TEXELS, 4), np.uint8)
    atlas[5, 100:104, 150:154, :3] = 255
    scene._atlas = atlas.reshape(-1).view(np.uint32)
    u, v = ((np.array([152, 102]) / room.TEXELS * 2 - 1) * scene.half[[0, 1]]).tolist()
    point = np.array([u, v, scene.half[2]])
    for pose in range(5):
        angle = np.radians(-20 + 10 * pose)
        c2w = np.eye(4, dtype=np.float32)
        c2w[0, [0, 2]], c2w[2, [0, 2]] = [np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]
        c2w[:3, 3] = [0.5 - 0.2 * pose, 0.1 * pose - 0.2, -0.3 * pose]
        image = scene.render(c2w[None], 240, 360)[0, ..., 0].astype(float)
        row, column = np.mgrid[0:240, 0:360] + 0.5
        centroid = (row * image).sum() / image.sum(), (column * image).sum() / image.sum()
        np.testing.assert_allclose(centroid, project(c2w, point, 240, 360), atol=0.5)


def test_floor_is_below_and_ceiling_above():
    scene = room.Room(0)
    level = np.eye(4, dtype=np.float32)[None]
    down, up = level.copy(), level.copy()
    down[0, :3, :3] = [[1, 0, 0], [0, 0, 1], [0, -1, 0]]  # the camera's z is the world's +y
    up[0, :3, :3] = [[1, 0, 0], [0, 0, -1], [0, 1, 0]]
    floor, ceiling = (scene.render(view, 32, 48)[0] for view in (down, up))
    assert ceiling.mean() > floor.mean() + 30
    assert np.std(scene.render(level, 32, 48)) > 15


def test_repeating_the_first_frame_is_poor_and_pixels_are_smooth():
    spec = SynthSpec("big", train_clips=12, test_clips=0)
    clips = [filmed.frames for filmed in film(spec)]
    repeat = np.mean([psnr(frames[1:], frames[:1]) for frames in clips])
    assert 10.5 < repeat < 14
    # Smoothness: halving the resolution and interpolating back loses little.
    small = np.stack(clips)[:, ::8].astype(float).reshape(-1, 32, 2, 48, 2, 3).mean(axis=(2, 4))
    back = small.repeat(2, axis=1).repeat(2, axis=2)
    assert psnr(back.reshape(-1), np.stack(clips)[:, ::8].reshape(-1)) > 26


def test_rooms_differ_by_seed_and_describe_themselves():
    a, b = room.Room(1), room.Room(2)
    assert a.caption != b.caption and room.Room(1).caption == a.caption
    for piece in (*room.LARGE, *room.SMALL, "rug", "floor", "ceiling"):
        assert piece in a.caption
    assert not np.array_equal(a._atlas, b._atlas)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "a", "clips": 3}', "unknown key 'clips', expected one of name, rooms"),
        ('{"rooms": 1}', "'name'"),
        ("{", "not JSON"),
        ('{"name": "a", "rooms": true}', "rooms is True, expected int"),
        ('{"name": "a", "rooms": 0}', "rooms is 0"),
        ('{"name": "a", "width": 95}', r"width is 95, expected an even number >= 16 \(nearest 94, 96\)"),
        ('{"name": "a", "fps": 0}', "fps > 0"),
    ],
)
def test_a_bad_spec_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        SynthSpec.from_json(text)


def test_a_spec_reads_from_json():
    assert SynthSpec.from_json('{"name": "a", "rooms": 2, "fps": 24}') == SynthSpec("a", rooms=2, fps=24.0)


def test_the_identity_is_the_spec_and_the_generator_version(dataset):
    assert dataset.identity == {
        "generator": "procedural_room",
        "version": synthetic.VERSION,
        "spec": json.loads(json.dumps(vars(SPEC))),
    }
