"""What the graph sets in a recipe: names, places and topology, over or under what the workflow config sets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib.config import sources

if TYPE_CHECKING:
    from solarwm_lib.graph import Workflow


def of_run(workflow: Workflow, run: str) -> dict[str, Any]:
    """Dotted key -> value for every job of a run."""
    spec = workflow.config.runs[run]
    stored: dict[str, Any] = {}
    if spec.latents:
        stored = {
            "data.encoding": "preencoded",
            "data.latents_root": _absolute(workflow.latents_dir(spec.latents)),
            "data.random_start": False,
        }
    return {
        "name": run,
        "distributed.world_size": spec.processes,
        **spec.set,
        **_pins(workflow, run),
        **_places(workflow, run),
        **stored,
        **sources.overrides(workflow, run),
    }


def of_latents(workflow: Workflow, name: str) -> dict[str, Any]:
    """Dotted key -> value for every job of a generation of latents."""
    spec = workflow.config.latents[name]
    inputs = workflow.latents_inputs(name)
    return {
        "name": name,
        # Shards lie beside their index, unless it is one of windows; for a bucket `set` says where.
        "data.transport.root": _folder(inputs["raw"]) if "raw" in inputs else "",
        **spec.set,
        "data.root": _folder(inputs["source"]),
        "data.encoding": "online",
        "data.random_start": False,
        "model.base_path": _folder(inputs["assets"]),
        "preencode.generation_id": name,
        "preencode.parts": spec.parts,
        "preencode.reuse": [_absolute(workflow.latents_dir(other)) for other in spec.reuse],
        "runtime.output_dir": _absolute(workflow.latents_dir(name)),
    }


def of_inference(workflow: Workflow, name: str) -> dict[str, Any]:
    """Dotted key -> value for a standalone inference."""
    spec = workflow.config.inference[name]
    inputs = workflow.inference_inputs(name)
    return {
        "name": name,
        "distributed.world_size": 1,
        **spec.set,
        "data.root": _folder(inputs["data"]),
        "model.base_path": _folder(inputs["assets"]),
        "runtime.output_dir": _folder(workflow.inference_marker(name)),
        "checkpoint.path": _folder(inputs["checkpoint"]),
    }


def _pins(workflow: Workflow, run: str) -> dict[str, Any]:
    """Keep whole, when the run thins its checkpoints, those that other runs of the workflow go on from (full_resume)."""
    folder = Path(workflow.run_dir(run)).absolute()
    steps = set()
    for spec in workflow.config.runs.values():
        path = Path(str(spec.set.get("checkpoint.path", ""))).absolute()
        name = re.fullmatch(r"checkpoint_model_(\d+)", path.name)
        if spec.set.get("checkpoint.mode") == "full_resume" and path.parent == folder and name:
            steps.add(int(name[1]))
    own = workflow.config.runs[run].set.get("checkpoint.keep_full_steps", [])
    return {"checkpoint.keep_full_steps": sorted({*own, *steps})} if steps else {}


def _places(workflow: Workflow, run: str) -> dict[str, Any]:
    spec = workflow.config.runs[run]
    return {
        "data.root": _folder(workflow.data_marker(spec.data)),
        "model.base_path": _folder(workflow.assets_marker(spec.assets)),
        "runtime.output_dir": _absolute(workflow.run_dir(run)),
    }


def _folder(marker: str) -> str:
    return _absolute(str(Path(marker).parent))


def _absolute(path: str) -> str:
    return str(Path(path).absolute())
