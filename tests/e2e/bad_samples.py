"""The table of bad input: cameras, videos, captions; see `bad_input.py`."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
from bad_bench import Bench, Case, Prepare, Rows, met_by, rows, same

from solarwm_lib.data import video
from solarwm_lib.data.camera import npz_bytes


def _camera(change: Callable[[np.ndarray], Any], command: str = "freeze-plan", edit: Any = same) -> Prepare:
    return lambda bench: met_by(bench, command, bench.dataset(edit, camera=change))


def _nan(c2w: np.ndarray) -> np.ndarray:
    c2w[3, 0, 3] = np.nan
    return c2w


def _scaled(c2w: np.ndarray) -> np.ndarray:
    c2w[:, :3, :3] *= 1.5
    return c2w


def _sheared(c2w: np.ndarray) -> np.ndarray:
    c2w[:, 0, 1] += 0.5
    return c2w


def _mirrored(c2w: np.ndarray) -> np.ndarray:
    c2w[:, :3, 1] *= -1
    return c2w


def _far(c2w: np.ndarray) -> np.ndarray:
    c2w[:, 0, 3] += 100 * np.arange(len(c2w))
    return c2w


def _pickled(c2w: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, c2w=np.array([{"a": 1}], object))
    return stream.getvalue()


def _promising(c2w: np.ndarray) -> bytes:
    """An array header that promises a million billion frames."""
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000, 4, 4), }".ljust(117) + b"\n"
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("c2w.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    return stream.getvalue()


def _unpacking(c2w: np.ndarray) -> bytes:
    """A few kilobytes that unpack to 65 MiB."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("c2w.npy", bytes(65 << 20))
    return stream.getvalue()


def _attested(**fields: Any) -> Prepare:
    """Fields of the manifests' camera block."""
    return lambda bench: [
        "train",
        *bench.on(bench.dataset(manifest=lambda manifest: manifest["camera"].update(fields))),
    ]


def _video(change: Callable[[bytes], bytes], edit: Any = same, **changes: Any) -> Prepare:
    return lambda bench: ["train", *bench.on(bench.dataset(edit, video=change), **changes)]


def _blank(frames: int, height: int, width: int) -> bytes:
    return video.mp4_bytes(np.zeros((frames, height, width, 3), np.uint8), 16)


def _sound(_: bytes) -> bytes:
    """A file with a sound track only."""
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        track = container.add_stream("aac", rate=8000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 8000
        for packet in (*track.encode(silence), *track.encode(None)):
            container.mux(packet)
    return stream.getvalue()


def _sizeless(rows: Rows) -> None:
    for row in rows:
        del row["height"], row["width"]


def _uncaptioned(bench: Bench) -> list[str]:
    dataset = bench.dataset(
        lambda rows: [row.pop("caption") for row in rows], manifest=lambda manifest: manifest.pop("prompt")
    )
    return ["train", *bench.on(dataset)]


def _manifest(change: Callable[[dict[str, Any]], Any]) -> Prepare:
    return lambda bench: ["train", *bench.on(bench.dataset(manifest=change))]


def _nothing_to_pack(bench: Bench) -> list[str]:
    videos = bench.path / "videos"
    videos.mkdir()
    (videos / "broken.mp4").write_bytes(b"not a video")
    return [
        "data",
        "pack",
        str(videos),
        "--static-camera",
        "--caption",
        "a room",
        "--out",
        str(bench.path / "out"),
    ]


def bad_manifest(bench: Bench, content: bytes) -> list[str]:
    """A manifest member with other bytes."""
    return ["train", *bench.on(bench.dataset(manifest=lambda manifest: content))]


CASES: tuple[Case, ...] = (
    # cameras
    Case("camera with NaN", "sample 'tiny/test-…': test-….camera.npz: array 'c2w': frame 3 holds NaN or infinite "
         "values, expected finite ones", 3, _camera(_nan)),
    Case("the same, met by `data inspect`", "sample 'tiny/train-000000': array 'c2w': frame 3 holds NaN or infinite "
         "values, expected finite ones (and 4 more)", 3, _camera(_nan, "inspect")),
    Case("the same, met while training (launch records stay)", "sample 'tiny/train-…': train-….camera.npz: array 'c2w': "
         "frame 3 holds NaN or infinite values, expected finite ones", 3, _camera(_nan, "train"), records=True),
    Case("camera array of another shape", "sample 'tiny/test-…': test-….camera.npz: array 'c2w' has shape [9, 3, 4], "
         "expected [T, 4, 4] with T >= 1", 3, _camera(lambda c2w: c2w[:, :3])),
    Case("camera array of whole numbers", "sample 'tiny/test-…': test-….camera.npz: array 'c2w' has dtype int64, "
         "expected a floating-point array", 3, _camera(lambda c2w: npz_bytes(c2w=c2w.astype(np.int64)))),
    Case("camera that is not a rotation", "sample 'tiny/test-…': test-….camera.npz: array 'c2w': frame … is not a "
         "rotation (R Rᵀ differs from identity by 1.25, allowed 0.001); scale or shear must not be stored in the matrix",
         3, _camera(_scaled)),
    Case("sheared camera, `data inspect`", "sample 'tiny/train-000000': array 'c2w': frame 8 is not a rotation (R "
         "Rᵀ differs from identity by 0.499, allowed 0.001); scale or shear must not be stored in the matrix "
         "(and 4 more)", 3, _camera(_sheared, "inspect")),
    Case("mirrored camera", "sample 'tiny/test-…': test-….camera.npz: array 'c2w': frame … is mirrored (determinant -1, "
         "expected +1); flip two axes together, never one (OpenGL to OpenCV negates y and z)", 3, _camera(_mirrored)),
    Case("the same, `data inspect`", "sample 'tiny/train-000000': array 'c2w': frame 0 is mirrored (determinant -1, "
         "expected +1); flip two axes together, never one (OpenGL to OpenCV negates y and z) (and 4 more)", 3, _camera(_mirrored, "inspect")),
    Case("transposed camera, `data inspect`", "sample 'tiny/train-000000': array 'c2w': frame 1 has a bottom row "
         "other than 0 0 0 1 (and 4 more)", 3, _camera(lambda c2w: c2w.transpose(0, 2, 1), "inspect")),
    Case("camera under another name", "sample 'tiny/test-…': test-….camera.npz: no array 'c2w', found poses; set "
         "data.camera_array_key to the stored array, its name decides the direction", 3, _camera(lambda c2w: npz_bytes(poses=c2w))),
    Case("camera file is damaged", "sample 'tiny/test-…': test-….camera.npz: not a readable NPZ (File is not a zip "
         "file); write it again or remove the row", 3, _camera(lambda c2w: npz_bytes(c2w=c2w)[:-60])),
    Case("camera file holds pickled objects", "sample 'tiny/test-…': test-….camera.npz: not a readable NPZ (Object "
         "arrays cannot be loaded when allow_pickle=False); write it again or remove the row", 3, _camera(_pickled)),
    Case("camera file promises more than it holds", "sample 'tiny/test-…': test-….camera.npz: not a readable NPZ (Unable "
         "to allocate …); write it again or remove the row", 3, _camera(_promising)),
    Case("camera file unpacks to far more", "sample 'tiny/test-…': test-….camera.npz: not a readable NPZ (array "
         "'c2w.npy' has 68157440 bytes, expected at most 67108864); write it again or remove the row", 3, _camera(_unpacking)),
    Case("camera of failed pose estimation", "sample 'tiny/train-…': train-….camera.npz: vipe_status is failed, "
         "expected ok for array 'vipe_c2w'", 3, lambda bench: ["train", *bench.on(bench.dataset(
        camera=lambda c2w: npz_bytes(vipe_c2w=c2w, vipe_status=np.array(["failed"]))), data__camera_array_key="vipe_c2w")],
         records=True),
    Case("fewer camera rows than frames (launch records stay)", "sample 'tiny/train-…': camera has 8 rows, the "
         "video 9 frames; expected one each", 3, _camera(lambda c2w: c2w[:-1], "train"), records=True),
    Case("fewer camera rows, `data inspect`", "sample 'tiny/train-000000': camera has 8 rows, the video 9 frames; expected "
         "one each (and 4 more)", 3, _camera(lambda c2w: c2w[:-1], "inspect")),
    Case("camera array that `data inspect` cannot declare", "data.camera_array_key: found 'poses', expected one of "
         "c2w, vipe_c2w, w2c, vipe_w2c, relative_w2c", 2, lambda bench: [
        "data", "inspect", str(bench.world.dataset / "train-index.jsonl"), "--camera-array-key", "poses"]),
    Case("manifest attests another convention (launch records stay)", "sample 'tiny/train-…': manifest "
         "camera.convention is 'w2c', expected 'authoritative_source_c2w_no_axis_flip' for "
         "data.camera_array_key c2w and data.camera_axes opencv; declare what is stored "
         "(data.camera_array_key)", 3, _attested(convention="w2c"), records=True),
    Case("manifest attests OpenGL axes (launch records stay)", "sample 'tiny/train-…': manifest camera.axes is "
         "'opengl', expected 'opencv' for data.camera_array_key c2w and data.camera_axes opencv; declare what "
         "is stored (data.camera_axes)", 3, _attested(axes="opengl"), records=True),
    Case("manifest attests another guard (launch records stay)", "sample 'tiny/train-…': manifest "
         "camera.max_rel_translation is 50.0, expected 20.0; set data.max_relative_translation to the guard "
         "the clips were published under, or to null", 3, _attested(max_rel_translation=50.0), records=True),
    Case("manifest attests another shape (launch records stay)", "sample 'tiny/train-…': manifest camera.shape is "
         "[8, 4, 4], expected [9, 4, 4]; manifest and camera file do not belong together, pack the clip again", 3, _attested(shape=[8, 4, 4]), records=True),
    Case("manifest attests no camera (launch records stay)", "sample 'tiny/train-…': manifest has no 'camera' "
         "block; expected the attestation of its camera array", 3, _manifest(lambda manifest: manifest.pop("camera")),
         records=True),
    Case("every camera leaves the guards (launch records stay)", "16 clips in a row leave the camera guards, last: "
         "sample 'tiny/train-…': translation 99.99 at pixel frame 1 exceeds data.max_relative_translation = "
         "20 within the first 10 s; raise data.max_relative_translation or data.max_camera_absolute, or clean "
         "the index", 3, _camera(_far, "train"), records=True),
    Case("intrinsics are absent (launch records stay)", "sample 'tiny/train-…': array 'intrinsics' is missing, "
         "found c2w; set data.intrinsics_array_key, or model.camera_intrinsics_mode: wan_fixed", 3, lambda bench: ["train", *bench.on(
        bench.dataset(), model__camera_intrinsics_mode="per_clip")], records=True),
    Case("intrinsics in pixels (launch records stay)", "sample 'tiny/train-…': array 'intrinsics' holds 500, which "
         "is in pixels, expected at most 4; divide fx and cx by the image width, fy and cy by its height", 3, lambda bench: ["train", *bench.on(bench.dataset(
        camera=lambda c2w: npz_bytes(c2w=c2w, intrinsics=np.array([500.0, 500, 16, 16]))),
        model__camera_intrinsics_mode="per_clip")], records=True),
    # videos
    Case("video shorter than the clip", "sample 'tiny/train-000000': video has 9 frames, the clip spans 13 source frames; "
         "lower data.pixel_frames or remove the row", 3, lambda bench: ["train", *bench.config("new", data__pixel_frames=13)]),
    Case("clip longer than any video", "sample 'tiny/train-000000': video has 9 frames, the clip spans 999997 "
         "source frames; lower data.pixel_frames or remove the row", 3, lambda bench: ["train", *bench.config("new", data__pixel_frames=999_997)]),
    Case("video is none (launch records stay)", "sample 'tiny/train-…': not a readable video (Invalid data found "
         "when processing input); re-encode it or remove the clip", 3, _video(lambda data: b"not a video"), records=True),
    Case("video is empty (launch records stay)", "sample 'tiny/train-…': not a readable video (Invalid data found "
         "when processing input); re-encode it or remove the clip", 3, _video(lambda data: b""), records=True),
    Case("video is cut (launch records stay)", "sample 'tiny/train-…': does not decode (Invalid data found when "
         "processing input); re-encode or remove the file", 3, _video(lambda data: data[:-1500]), records=True),
    Case("file without a picture (launch records stay)", "sample 'tiny/train-…': holds no video stream; re-encode "
         "it or remove the clip", 3, _video(_sound), records=True),
    Case("video has fewer frames than its row says (launch records stay)", "sample 'tiny/train-…': decoded 4 "
         "frames, the index promises 9; rebuild the index", 3, _video(lambda data: _blank(4, 32, 32)),
         records=True),
    Case("video of another shape (launch records stay)", "sample 'tiny/train-…': video is 64x32, data.width x "
         "data.height is 32x32: shapes differ by 50%; pack the videos with that size (`solarwm data pack "
         "--height --width`)", 3, _video(lambda data: _blank(9, 32, 64), _sizeless), records=True),
    Case("the row says another shape (launch records stay)", "sample 'tiny/train-…': video is 64x32, data.width x "
         "data.height is 32x32: shapes differ by 50%; pack the videos with that size (`solarwm data pack "
         "--height --width`)", 3,
         rows(lambda rows: [row.update(width=64) for row in rows]), records=True),
    Case("no file can be packed", "nothing packed, refused 1 files: broken.mp4: not a readable video, or truncated "
         "(Invalid data found when processing input); read are mp4, mov, mkv, webm, avi, ts, flv and ogg", 3,
         _nothing_to_pack),
    # captions and manifests
    Case("caption is missing (launch records stay)", "sample 'tiny/train-…': no caption in the row and no "
         "prompt.text in the manifest; write one, it may be empty", 3, _uncaptioned, records=True),
    Case("manifest is no object (launch records stay)", "sample 'tiny/train-…': train-….manifest.json is not a JSON "
         "object", 3, lambda bench: bad_manifest(bench, b"[]"), records=True),
    Case("manifest is no JSON (launch records stay)", "sample 'tiny/train-…': train-….manifest.json is not JSON "
         "(Expecting property name enclosed in double quotes: line 1 column 2 (char 1))", 3, lambda bench: bad_manifest(bench, b"{"), records=True),
)  # fmt: skip
