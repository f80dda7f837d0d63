"""Trains several runs one after the other in one process group: `sharded_worker.py JOBS.json`, a list of [values, step]."""

import json
import os
import sys
from pathlib import Path

import torch

from solarwm_lib.config.load import resolve_values
from solarwm_lib.training import train
from solarwm_lib.training.collectives import process_group
from solarwm_lib.training.topology import from_environment

torch.set_num_threads(1)
jobs = json.loads(Path(sys.argv[1]).read_text())
distributed = jobs[0][0]["distributed"]
topology = from_environment(
    os.environ, distributed["world_size"], distributed.get("sequence_parallel_size", 1)
)
with process_group(topology, timeout_seconds=240):
    for values, step in jobs:
        train.run(resolve_values(values), run_dir=Path(values["runtime"]["output_dir"]), until_step=step)
