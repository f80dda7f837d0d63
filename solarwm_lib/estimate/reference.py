"""The predictions for the released recipes and topologies as Markdown: `python -m solarwm_lib.estimate.reference`.

Writes the tables between the two marks of docs/explanation/estimate.md; a test compares the page with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from solarwm_lib.config.architectures import CONFIG_ROOT
from solarwm_lib.config.load import Resolved, load, resolve_values
from solarwm_lib.estimate.flops import flops
from solarwm_lib.estimate.hardware import GIB, gpu
from solarwm_lib.estimate.memory import plan
from solarwm_lib.estimate.report import hours
from solarwm_lib.estimate.sizes import checkpoint
from solarwm_lib.estimate.topology import smallest
from solarwm_lib.estimate.traffic import traffic
from solarwm_lib.estimate.workload import workload_of
from solarwm_lib.runtime.files import write_atomic

PAGE = CONFIG_ROOT.parent / "docs/explanation/estimate.md"
BEGIN, END = (
    "<!-- written by python -m solarwm_lib.estimate.reference -->",
    "<!-- end of what is written -->",
)
SMALL, LARGE, MFU = "h100-80", "h200-141", 0.4


def _released(
    family: str, architecture: str, frames: int, size: tuple[int, int], **rest: Any
) -> dict[str, Any]:
    """A configuration of a family without recipes, by what its release states (operations.md 8.5)."""
    stage, causal, objective = rest["route"]
    role = {"path": "/path/to/checkpoint", "source_step": 1}
    start: dict[str, Any] = {}
    if stage == "stage1":
        start = {"mode": "weights_only", "weights": "ema", **role}
    elif stage == "stage2":
        start = {"initialization": {name: role for name in ("student", "teacher", "critic")}}
    return {
        "schema": "solarwm.run.v1",
        "action": "train",
        "name": rest["name"],
        "model": {"family": family, "architecture": architecture, "base_path": "/path/to/base"},
        "data": {
            "root": "/path/to/raw-wds",
            "encoding": "preencoded",
            "latents_root": "/path/to/latents",
            "latent_schema": "released",
            "pixel_frames": frames,
            "height": size[0],
            "width": size[1],
        },
        "distributed": {"world_size": rest["world"], "sequence_parallel_size": rest["sequence"]},
        "train": {
            "stage": stage,
            "causal_mode": causal,
            "objective": objective,
            "gradient_accumulation_steps": rest.get("accumulation", 1),
            "strategy": "hybrid_shard",
        },
        "checkpoint": start,
        "runtime": {"output_dir": "/path/to/run"},
    }


_H3: dict[str, Any] = {
    "family": "minimax_h3",
    "architecture": "minimax-h3-33b",
    "frames": 158,
    "size": (768, 1344),
    "world": 256,
}
WITHOUT_RECIPE = (
    _released("ltx25_video", "ltx25-22b", 153, (512, 768), name="ltx25-stage0p5-153f", world=16, sequence=2,
              accumulation=2, route=("stage0p5", "bidirectional", "native_rectified_flow")),
    _released(**_H3, name="minimax-h3-stage0p5-158f", sequence=2, route=("stage0p5", "bidirectional", "flow_matching")),
    _released(**_H3, name="minimax-h3-stage1-158f", sequence=2,
              route=("stage1", "teacher_forcing", "anyflow_forward_map")),
    _released(**_H3, name="minimax-h3-stage2-158f", sequence=4,
              route=("stage2", "self_gradient_forcing", "flow_matching")),
)  # fmt: skip


def released() -> Iterator[Resolved]:
    """Every training recipe, then the routes that this version checks and does not train."""
    for recipe in sorted((CONFIG_ROOT / "recipes").rglob("train_*.yaml")):
        yield load(recipe)
    for values in WITHOUT_RECIPE:
        yield resolve_values(values)


def tables() -> str:
    """Memory, work and the smallest topology of every released run, as three Markdown tables."""
    small, large = gpu(SMALL), gpu(LARGE)
    memory = [
        f"| run | topology | kept state | activations and gradients | rest | peak | {SMALL} | {LARGE} |"
    ]
    work = [f"| run | FLOPs per GPU and step | sent per GPU and step | step | run on {SMALL} | checkpoint |"]
    least = [f"| run | smallest on {SMALL} | smallest on {LARGE} |"]
    memory += ["|---|---|---|---|---|---|---|---|"]
    work += ["|---|---|---|---|---|---|"]
    least += ["|---|---|---|"]
    for resolved in released():
        w = workload_of(resolved)
        found, name, t = plan(w), resolved.config.name, w.topology
        kept = sum(size for part, size in found.resident.items() if part not in ("codec", "text encoder"))
        moving = sum(found.temporary.get(part, 0) for part in ("activations", "gradients"))
        shape = f"{t.world}, {t.strategy}, SP {t.sequence}, x{t.accumulation}, {'' if t.checkpointing else 'no '}ckpt"
        fits = ["fits" if found.total <= each.usable else "no" for each in (small, large)]
        cells = [
            name,
            shape,
            _gib(kept),
            _gib(moving),
            _gib(found.total - kept - moving),
            _gib(found.total),
            *fits,
        ]
        memory.append(_row(cells))
        step, used = flops(w), hours(flops(w), w, small, MFU)
        seconds = used * 3600 / t.world / w.max_steps
        work.append(_row([name, f"{step.model:.2e}", _gib(traffic(w).sent), f"{seconds:.2f} s", f"{used:,.0f} GPU h", _gib(checkpoint(w))]))  # fmt: skip
        least.append(_row([name, *(_smallest(smallest(w, each)) for each in (small, large))]))
    titles = ("Memory of one GPU", f"Work, at an assumed {MFU:.0%} of the peak", "Smallest topology")
    parts = [
        f"### {title}\n\n" + "\n".join(rows)
        for title, rows in zip(titles, (memory, work, least), strict=True)
    ]
    return "\n\n".join(parts)


def _smallest(found: Any) -> str:
    if found is None:
        return "none up to 1024"
    t = found.topology
    checkpointing = "ckpt" if t.checkpointing else "no ckpt"
    return f"{t.world}, {t.strategy}, SP {t.sequence}, x{t.accumulation}, {checkpointing}: {_gib(plan(found).total)}"


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def page(path: Path = PAGE) -> str:
    """The page with its tables written anew."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    write_atomic(PAGE, page().encode())
