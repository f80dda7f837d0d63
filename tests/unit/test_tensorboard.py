"""TensorBoard event files, read back with TensorBoard's own reader, and the events of `metrics.jsonl`."""

import io
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_report import write_run

from solarwm_lib.data.video import encode_mp4
from solarwm_lib.inference import tensorboard as passes
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import metrics, tensorboard
from solarwm_lib.training.metrics import FILE, MetricsLog, StepRecord, append_event


def record(step: int, loss: float, **details: float) -> StepRecord:
    return StepRecord(
        step, loss, 1e-3, 0.5, 0.25, 0.01, 32.0, 2**28, 1e9 + step, float(step), details=details
    )


def accumulator(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    return found.Reload()


def curve(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = accumulator(run_dir / "tensorboard/training").Scalars(tag)
    return [(event.step, event.value) for event in events]


def test_every_number_of_a_step_becomes_a_curve(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=True)
    log.append(record(1, 2.0))
    log.append(record(2, 1.5, student_loss=0.75))
    log.close()
    assert curve(tmp_path, "loss") == [(1, 2.0), (2, 1.5)]
    assert curve(tmp_path, "details/student_loss") == [(2, 0.75)]
    tags = accumulator(tmp_path / "tensorboard/training").Tags()["scalars"]
    assert set(tags) == {*tensorboard.SCALARS.values(), "details/student_loss"}
    assert curve(tmp_path, "memory/peak_bytes")[0][1] == 2**28


def test_a_resumed_run_shows_neither_lost_steps_nor_doubles(tmp_path):
    killed = MetricsLog(tmp_path, 0, tensorboard=True)
    for step in range(1, 7):
        killed.append(record(step, float(step)))
    resumed = MetricsLog(tmp_path, 3, tensorboard=True)
    for step in (4, 5):
        resumed.append(record(step, 10.0 * step))
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]
    assert curve(tmp_path, "loss") == expected
    assert [(line["step"], line["loss"]) for line in metrics.read(tmp_path / FILE)] == expected


def test_steps_after_a_checkpoint_that_is_made_again_stay(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=True)
    for step in range(1, 7):
        log.append(record(step, float(step)))
    log.close()
    again = MetricsLog(tmp_path, restored_step=1, until_step=3, published_step=6, tensorboard=True)
    for step in (2, 3):
        again.append(record(step, 10.0 * step))
    again.close()
    assert [value for _, value in curve(tmp_path, "loss")] == [1.0, 20.0, 30.0, 4.0, 5.0, 6.0]


def test_without_tensorboard_nothing_is_written(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.append(record(1, 1.0))
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_broken_event_file_is_one_warning_and_the_metrics_go_on(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING):
        log = MetricsLog(tmp_path, 0, tensorboard=True)
        log.append(record(1, 1.0))
        log.append(record(2, 1.0))
        log.close()
    assert len(metrics.read(tmp_path / FILE)) == 2
    assert len(caplog.records) == 1 and "no more TensorBoard events" in caplog.text


def test_an_event_file_that_breaks_later_is_one_warning(tmp_path, caplog):
    curves = tensorboard.TrainingCurves(tmp_path, 0)
    curves.add({"step": 1, "loss": 1.0})
    curves._events._file.close()
    with caplog.at_level(logging.WARNING):
        curves.add({"step": 2, "loss": 1.0})
        curves.add({"step": 3, "loss": 1.0})
        curves.close()
    assert len(caplog.records) == 1 and curve(tmp_path, "loss") == [(1, 1.0)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("results"))


def test_a_pass_becomes_scalars_and_moving_pictures_at_its_step(run):
    made = {path: passes.show_pass(path) for path in sorted(run.glob("validation/step_*/live"))}
    assert made[run / "validation/step_000020/live"] == (
        run / "tensorboard/validation/live/events.out.tfevents.step_000020"
    )
    again = passes.show_pass(run / "validation/step_000020/live")
    assert again is not None and len([*again.parent.iterdir()]) == 2
    found = accumulator(run / "tensorboard/validation/live")
    assert [event.step for event in found.Scalars("live/psnr")] == [10, 20]
    assert [event.value for event in found.Scalars("live/slots_ok")] == [2.0, 1.0]
    assert [event.value for event in found.Scalars("live/slots_error")] == [0.0, 1.0]
    image = found.Images("live/slot-000000")[-1]
    gif = Image.open(io.BytesIO(image.encoded_image_string))
    assert (gif.format, gif.n_frames, gif.info["loop"], gif.size) == (
        "GIF",
        5,
        0,
        (image.width, image.height),
    )
    assert len(image.encoded_image_string) <= passes.MAX_BYTES and max(gif.size) <= passes.MAX_SIDE


def test_a_long_and_noisy_comparison_stays_within_the_limits_and_keeps_its_pace(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (34, 288, 512, 3), dtype=np.uint8)
    encode_mp4(tmp_path / "compare.mp4", noise, 16.0)
    data, width, height = passes.animation(tmp_path / "compare.mp4", 16.0)
    gif = Image.open(io.BytesIO(data))
    assert len(data) <= passes.MAX_BYTES and gif.size == (width, height) and width < 512
    assert gif.n_frames == 17 and gif.info["duration"] == 120  # every second of 34 at 16 fps, in hundredths


def test_what_is_no_pass_of_a_run_is_left_alone(run, tmp_path):
    assert passes.show_pass(tmp_path / "inference/walk") is None
    assert passes.event_path(tmp_path / "run/validation/step_x/live") is None
    assert [*tmp_path.iterdir()] == []


def test_a_pass_that_cannot_be_shown_is_a_warning(run, caplog):
    path = run / "validation/step_000010/shuffled"
    video = path / "slot-000000/compare.mp4"
    data = video.read_bytes()
    video.chmod(0o644)
    video.write_bytes(b"no video")
    with caplog.at_level(logging.WARNING):
        assert passes.show_pass(path) is None
    video.write_bytes(data)
    assert "no TensorBoard events of" in caplog.text
    assert [*(run / "tensorboard/validation/shuffled").iterdir()] == []


def test_events_stand_beside_steps_and_are_not_read_as_steps(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.append(record(step, 1.0))
    append_event(tmp_path, "save", 2, seconds=0.5)
    log.close()
    MetricsLog(tmp_path, 2).close()
    assert [line["step"] for line in metrics.read(tmp_path / FILE)] == [1, 2]
    events = metrics.read_events(tmp_path / FILE)
    assert [(event["event"], event["step"], event["seconds"]) for event in events] == [
        ("save", 2, 0.5),
        ("lost_steps", 2, 0.25),
    ]
    MetricsLog(tmp_path, 2).close()
    assert metrics.read_events(tmp_path / FILE) == events


def test_the_last_records_are_read_without_the_whole_file(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in range(1, 201):
        log.append(record(step, 1.0))
        if step % 10 == 0:
            append_event(tmp_path, "save", step, seconds=0.1)
    path = tmp_path / FILE
    with open(path, "a") as file:
        file.write('{"step": 201, "lo')  # being written
    for block in (64, 1000, 2**20):
        tail = metrics.read_tail(path, 5, block)
        assert [line["step"] for line in tail] == [196, 197, 198, 199, 200]
    assert len(metrics.read_tail(path, 1000, 64)) == 200
    path.write_text(path.read_text().replace('{"batch_digest"', "{batch_digest", 200))
    with pytest.raises(ArtifactError, match="is not JSON"):
        metrics.read_tail(path, 5)
