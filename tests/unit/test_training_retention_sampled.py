"""Looked at every 10 ms while saves succeed, fail and go, a run always has a checkpoint that verifies, and what others need."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import saver_world
from saver_world import set_step
from test_artifacts_disk import file_size_limit, small_disk

from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import checkpoint

PINNED = 1


class Sampler(threading.Thread):
    """Verifies to the last byte, again and again, that some save is complete and the pinned checkpoint is whole."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.done, self.looks, self.newest = run_dir, threading.Event(), 0, 0
        self.problems: list[str] = []

    def run(self) -> None:
        while not self.done.wait(0.01):
            self.looks += 1
            self._look()

    def _look(self) -> None:
        complaints: list[str] = []
        for _ in range(5):  # a save may go between the list and the look: then the list has changed
            found = checkpoint.candidates(self.run_dir, 10**6)[0]
            for candidate in found:
                try:
                    checkpoint.open_verified(candidate.path)
                    break
                except (ArtifactError, OSError) as error:
                    complaints.append(str(error))
            else:
                if found == checkpoint.candidates(self.run_dir, 10**6)[0]:
                    self.problems.append(f"none of {[c.path.name for c in found]} verifies: {complaints}")
                    return
                continue
            self.newest = max(self.newest, candidate.step)
            break
        else:
            self.problems.append(f"no complete save in five looks: {complaints}")
        try:
            checkpoint.open_verified(self.run_dir / checkpoint.directory_name(PINNED))
        except (ArtifactError, OSError) as error:
            self.problems.append(f"what another run starts from: {error}")


def test_there_is_always_a_verified_checkpoint_and_what_another_run_starts_from(tmp_path):
    state = saver_world.learner({"weight": (128, 512)})
    with small_disk(tmp_path / "disk", 16 << 20) as disk:
        saver = saver_world.saver(disk, state, keep_full=1, keep_full_steps=[PINNED])
        set_step(state, PINNED)
        saver.publish(disk / checkpoint.directory_name(PINNED))
        # Names that promise more than there is: a save that never finished, and one of a step that is not this run's.
        for stale in ("rolling/step_000900", checkpoint.directory_name(950)):
            (disk / stale).mkdir(parents=True)
            (disk / stale / checkpoint.MODEL).write_bytes(b"half")
        sampler = Sampler(disk)
        sampler.start()
        failures = 0
        for step in range(PINNED + 1, 31):
            set_step(state, step)
            try:
                if step % 7 == 0:
                    with file_size_limit(200_000):  # the write fails half way
                        saver.rolling()
                        saver.finish()
                elif step % 11 == 0:
                    ballast = disk / "ballast"
                    ballast.write_bytes(bytes(11 << 20))  # the disk is full
                    saver.rolling()
                    saver.finish()
                elif step % 5 == 0:
                    saver.publish(disk / checkpoint.directory_name(step))
                else:
                    saver.rolling()
            except (ArtifactError, OSError) as error:
                assert "disk full" in str(error) or isinstance(error, OSError)
                failures += 1
            finally:
                (disk / "ballast").unlink(missing_ok=True)
            seen = sampler.looks
            while (
                sampler.looks < seen + 2 and sampler.is_alive()
            ):  # under load a look takes longer than a step
                time.sleep(0.005)
        saver.finish()
        saver.close()
        sampler.done.set()
        sampler.join()
        assert not sampler.problems, sampler.problems[:3]
        assert sampler.looks > 50 and sampler.newest == 30 and failures >= 4
        thinned = [
            step
            for step in (5, 10, 15, 20, 25, 30)
            if not (disk / checkpoint.directory_name(step) / checkpoint.OPTIMIZER).exists()
        ]
        assert thinned == [5, 10, 15, 20, 25]
        with pytest.raises(ArtifactError, match=r"no COMPLETE\.json"):
            checkpoint.open_verified(disk / checkpoint.directory_name(950))
