"""`solarwm status` and `solarwm watch`: what is said of a run, by real runs and by processes that really live or died."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from operate_world import ROOT, begin, edit_heartbeat, end, start_rank

from solarwm_lib import artifacts
from solarwm_lib.cli import main
from solarwm_lib.operate import show
from solarwm_lib.operate.run_state import QUIET_SECONDS, duration, find_run, quiet_limit, read_state
from solarwm_lib.operate.watch import watch
from solarwm_lib.runtime.errors import ConfigError, NonFiniteError, Preempted
from solarwm_lib.runtime.thinning import thin
from solarwm_lib.training import metrics


@pytest.fixture(scope="module")
def world(tiny_world, tmp_path_factory) -> Path:
    """A results root whose run `one` is trained to step 2 of 12 and validated there."""
    runs = tmp_path_factory.mktemp("world") / "results/runs"
    run = runs / "one"
    run.mkdir(parents=True)
    config = runs.parent.parent / "one.json"
    config.write_text(json.dumps(tiny_world.values(run)))
    plan = run / "validation/frozen-plan.json"
    words = ["--config", str(config)]
    checkpoint = run / "checkpoint_model_000002"
    assert main(["train", *words, "--until-step", "2"]) == 0
    assert main(["freeze-plan", *words, "--out", str(plan)]) == 0
    words += ["--checkpoint", str(checkpoint), "--plan", str(plan), "--pass", "live"]
    assert main(["validate", *words, "--out", str(run / "validation/step_000002/live")]) == 0
    return runs.parent.parent


@pytest.fixture
def run_dir(tiny_world, tmp_path) -> Path:
    """A run directory with the records of an attempt that has just begun."""
    begin(tiny_world, tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_run_says_what_it_made(world):
    state = read_state(world / "results/runs/one")
    records = metrics.read(world / "results/runs/one/metrics.jsonl")
    assert (state.state, state.step, state.target_step, state.planned_steps) == ("complete", 2, 2, 12)
    assert state.loss == records[-1]["loss"] and state.learning_rate == records[-1]["learning_rate"]
    assert state.step_seconds == pytest.approx(sum(r["step_seconds"] for r in records) / 2)
    assert 0 < state.data_fraction < 1 and state.seconds_to_end is None
    assert [(save["step"], save["status"]) for save in state.checkpoints] == [(2, "complete")]
    assert state.rolling == [] and state.lost_seconds["save"] > 0
    assert [(x.step, x.name, x.status, x.ok, x.error) for x in state.passes] == [
        (2, "live", "complete", 2, 0)
    ]
    assert [(rank.rank, rank.phase, rank.step) for rank in state.ranks] == [(0, "complete", 2)]
    text = show.text(state)
    for expected in (
        "one: complete",
        "2/2 of 12 planned",
        "checkpoints            2\n",
        "2     live  complete  2   0",
    ):
        assert expected in text, text


def test_training_and_validation_left_event_files_outside_the_artifacts(world):
    run = world / "results/runs/one"
    found = sorted(path.relative_to(run).parent.as_posix() for path in run.rglob("*tfevents*"))
    assert found == ["tensorboard/training", "tensorboard/validation/live"]


def test_the_command_prints_json_and_takes_a_name(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    capsys.readouterr()
    assert main(["status", "one", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["state"] == "complete" and values["passes"][0]["ok"] == 2 and values["exit_code"] == 0
    assert find_run("results/runs/one") == Path("results/runs/one")
    with pytest.raises(ConfigError, match="runs there: one"):
        find_run("two")


def test_the_results_root_of_the_workflow_is_used(world, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text(f"results: {world / 'results'}\n")
    assert find_run("one", tmp_path).samefile(world / "results/runs/one")


def test_a_thinned_and_a_damaged_checkpoint_are_marked(world, tmp_path):
    run = tmp_path / "results/runs/one"
    subprocess.run(["cp", "-r", world / "results", tmp_path], check=True)
    assert thin(artifacts.read(run / "checkpoint_model_000002")) > 0
    assert read_state(run).checkpoints[0]["status"] == "thinned"
    assert "2 (thinned)" in show.text(read_state(run))
    (run / "checkpoint_model_000002/model.safetensors").write_bytes(b"short")
    read_state.__globals__["_verified_checkpoint"].cache_clear()
    damaged = read_state(run).checkpoints[0]
    assert damaged["status"] == "damaged" and "model.safetensors" in damaged["problem"]
    (run / "checkpoint_model_000012").mkdir()  # as Snakemake leaves it before the job begins
    (run / "validation/step_000012/live").mkdir(parents=True)
    state = read_state(run)
    assert len(state.checkpoints) == 1 and state.passes[-1].status == "missing"


def test_a_run_that_never_started(tiny_world, tmp_path):
    values = tiny_world.resolve(tmp_path / "run").values
    (tmp_path / "run").mkdir()
    (tmp_path / "run/resolved-config.json").write_text(json.dumps(values))
    assert read_state(tmp_path / "run").state == "never started"


def test_a_living_rank_runs_and_a_killed_one_has_failed(run_dir):
    process = start_rank(run_dir)
    state = read_state(run_dir)
    assert (state.state, state.step, state.ranks[0].alive, state.ranks[0].pid) == (
        "running",
        3,
        True,
        process.pid,
    )
    end(process)
    state = read_state(run_dir)
    assert state.state == "failed" and "was killed" in state.detail and state.ranks[0].alive is False


def test_silence_of_all_ranks_is_a_hang_only_after_a_while(run_dir):
    process = start_rank(run_dir)
    try:
        assert read_state(run_dir, time.time() + QUIET_SECONDS - 10).state == "running"
        state = read_state(run_dir, time.time() + QUIET_SECONDS + 60)
        assert state.state == "hanging?" and "rank 0, forward_backward of step 4" in state.detail
    finally:
        end(process)
    assert quiet_limit("optimizer", 60.0) == 1200 and quiet_limit("save", 0.1) > quiet_limit("optimizer", 0.1)


def test_a_lost_rank_beside_a_living_one_is_named(run_dir):
    first, second = start_rank(run_dir, 0), start_rank(run_dir, 1)
    try:
        end(second)
        state = read_state(run_dir)
        assert state.state == "hanging?" and f"rank 1, process {second.pid}" in state.detail
        edit_heartbeat(run_dir, 1, phase="complete")
        assert read_state(run_dir).state == "running"
    finally:
        end(first)


def test_processes_of_another_host_are_judged_by_their_beats(run_dir):
    end(start_rank(run_dir))
    edit_heartbeat(run_dir, 0, boot="another", host="node7")
    state = read_state(run_dir)
    assert state.state == "running" and "node7" in state.detail and state.ranks[0].alive is None
    assert read_state(run_dir, time.time() + 3600).state == "hanging?"


def test_heartbeats_of_an_earlier_attempt_do_not_count(run_dir, tiny_world):
    end(start_rank(run_dir, 1))
    begin(tiny_world, run_dir)
    process = start_rank(run_dir, 0)
    try:
        state = read_state(run_dir)
        assert [rank.rank for rank in state.ranks] == [0] and state.state == "running"
        assert (state.attempt, state.attempts) == ("attempt-002", 2)
    finally:
        end(process)


@pytest.mark.parametrize(
    ("error", "word", "code"),
    [
        (Preempted("stopped after step 3 of 12 on request (SIGTERM)"), "preempted", 75),
        (Preempted("stopped after step 3 of 12 on request (SIGINT)"), "stopped", 75),
        (KeyboardInterrupt(), "stopped", 130),
        (NonFiniteError("non-finite loss"), "failed", 5),
        (None, "complete", 0),
    ],
)
def test_an_ended_attempt_is_one_word_and_watch_ends_with_its_exit_code(
    tiny_world, tmp_path, error, word, code
):
    begin(tiny_world, tmp_path / "run").end(error)
    assert read_state(tmp_path / "run").state == word
    out = io.StringIO()
    assert watch(tmp_path / "run", 1.0, out) == code and out.getvalue().count("\n") == 1


def test_watch_shows_a_line_per_change_until_the_run_ends(tiny_world, tmp_path):
    attempt = begin(tiny_world, tmp_path / "run")
    process = start_rank(tmp_path / "run")
    out, looks = io.StringIO(), []

    def wait(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            end(process)
            attempt.end(Preempted("stopped after step 3 of 12 on request (SIGTERM)"))

    assert watch(tmp_path / "run", 0.5, out, wait) == 75
    lines = out.getvalue().splitlines()
    assert looks == [0.5] * 3 and len(lines) == 2 and "running" in lines[0] and "preempted" in lines[1]


def test_watch_redraws_a_terminal(tiny_world, tmp_path):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    begin(tiny_world, tmp_path / "run").end(None)
    out = Terminal()
    watch(tmp_path / "run", 1.0, out)
    assert out.getvalue().startswith("\x1b[H") and "directory" in out.getvalue()


def test_no_command_imports_torch(world):
    code = (
        "import sys\nfrom solarwm_lib.cli import main\n"
        "for words in (['status'], ['watch'], ['stop', '--yes'], ['diagnose']): main([words[0], 'one', *words[1:]])\n"
        "print(*sorted({'torch', 'numpy', 'pydantic', 'tensorboard'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=world, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.splitlines()[-1] == "", done.stdout + done.stderr


def test_durations_are_read_at_a_glance():
    found = [duration(x) for x in (0.42, 17, 249, 7500, 273600)]
    assert found == ["0.4 s", "17 s", "4 min 09 s", "2 h 05 min", "3 d 04 h"]
