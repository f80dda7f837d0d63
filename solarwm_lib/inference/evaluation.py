"""One pass of one checkpoint over a frozen plan: what it is, who does which slot, and every slot to its end.

`validate` and `infer` both run this; they differ in where the result is published.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tqdm import tqdm

from solarwm_lib import artifacts
from solarwm_lib.config.geometry import pixel_frames
from solarwm_lib.data.dataset import read_dataset
from solarwm_lib.inference import preview
from solarwm_lib.inference.contract import check_contract
from solarwm_lib.inference.generate import (
    Causal,
    Request,
    Sampling,
    decode_stretches,
    load_models,
    reconstructor,
    sample_all,
    sound_latents,
)
from solarwm_lib.inference.latents import LatentStore, slot_name
from solarwm_lib.inference.measurement import Measurement
from solarwm_lib.inference.plan import check_plan
from solarwm_lib.inference.slots import METRIC_COLUMNS, Slot, csv_text, members_of
from solarwm_lib.runtime.errors import (
    ConfigError,
    NonFiniteError,
    Preempted,
    SolarError,
    of_exit_code,
)
from solarwm_lib.runtime.files import json_bytes

if TYPE_CHECKING:
    import torch

    from solarwm_lib.backbones.codec import Codec
    from solarwm_lib.config.load import Resolved
    from solarwm_lib.inference.cases import Cases
    from solarwm_lib.training.peers import Peers
    from solarwm_lib.training.topology import Topology

CHECKPOINT_SCHEMA = "solarwm.checkpoint.v1"
SUMMARY_SCHEMA = "solarwm.validation-summary.v1"
KEPT_FAILURES = 8
COMPLETE, PARTIAL, FAILED = "complete", "partial", "failed"


class Public(Protocol):
    """Makes further files of a slot that is ok, by their path in the artifact."""

    def padding(self, case: Mapping[str, Any], frames: int) -> int:
        """Return how often the last of `frames` generated frames is repeated."""
        ...

    def __call__(self, slot: Slot, clips: Cases, frames: int, video: bytes) -> dict[str, bytes]:
        """Return path -> content; `video` is an MP4 of the generated frames and their padding."""
        ...


@dataclass(frozen=True)
class PassRun:
    """A pass of a checkpoint over a plan; `chosen` restricts it to some slots, the others are skipped.

    `public` makes further files of a slot.
    """

    resolved: Resolved
    plan: dict[str, Any]
    settings: Any
    checkpoint: artifacts.Artifact
    chosen: frozenset[int] | None = None
    public: Public | None = None

    @property
    def config(self) -> Any:
        return self.resolved.config

    @property
    def sampling(self) -> Sampling:
        """The pass's sampling; ConfigError when a bidirectional pass is to have another length than the plan's cases."""
        wanted, have = (
            self.settings.rollout_latent_frames or self.plan["latent_frames"],
            self.plan["latent_frames"],
        )
        bidirectional = self.settings.mode == "bidirectional"
        if bidirectional and wanted != have:
            raise ConfigError(
                f"validation.passes {self.settings.name!r}: rollout_latent_frames is {wanted}, a bidirectional pass "
                f"generates the {have} latent frames of its cases; leave it out or change data.pixel_frames"
            )
        return Sampling(
            self.settings.mode,
            self.settings.solver,
            self.settings.num_inference_steps,
            self.config.model.timestep_shift,
            wanted,
            None if bidirectional else causal_of(self.config),
        )

    def latent_frames(self, case: Mapping[str, Any]) -> int:
        """How many latent frames of a case are generated: its own horizon, else that of the pass."""
        return case.get("latent_frames") or self.sampling.latent_frames

    def shown_frames(self, case: Mapping[str, Any]) -> int:
        """How many pixel frames of them are kept: all, or as many as a camera-length case publishes."""
        frames = pixel_frames(self.config.model.family, self.latent_frames(case))
        return min(frames, case.get("published_frames", frames))

    @property
    def weights_id(self) -> str:
        return f"{self.checkpoint.path.name}@{self.checkpoint.digest[:16]}#{self.settings.weights}"

    @property
    def title(self) -> str:
        """The pass as a caption."""
        camera = "" if self.settings.camera == "recorded" else f", {self.settings.camera} camera"
        s = self.settings
        return f"{s.name} ({s.weights}, {s.solver} {s.num_inference_steps}{camera})"

    def identity(self) -> dict[str, Any]:
        """Everything the latents depend on; no path, world size or batch layout."""
        return {
            "plan_digest": self.plan["payload_digest"],
            "checkpoint_digest": self.checkpoint.digest,
            "pass": {**self.settings.model_dump(), "rollout_latent_frames": self.sampling.latent_frames},
            "timestep_shift": self.config.model.timestep_shift,
            "timesteps": self.sampling.timesteps(),
            "camera_translation_transform": self.config.model.camera_translation_transform,
            **({} if self.sampling.causal is None else {"causal": asdict(self.sampling.causal)}),
            **({} if self.chosen is None else {"slots": sorted(self.chosen)}),
        }

    def parents(self) -> list[artifacts.Artifact]:
        """The checkpoint, the data set and the base weights (codec and text encoder)."""
        data = self.config.data
        dataset = read_dataset(data.root, shards_elsewhere=bool(data.transport.root))
        return [self.checkpoint, dataset, artifacts.read(self.config.model.base_path)]

    def donor(self, slot: int) -> dict[str, Any]:
        """The case whose camera slot `slot` uses: its own, or the next one's when cameras are shuffled."""
        cases = self.plan["cases"]
        return cases[(slot + (self.settings.camera == "shuffled")) % len(cases)]


def prepare(
    resolved: Resolved,
    checkpoint: Path | str,
    plan: dict[str, Any],
    settings: Any,
    slots: Sequence[int] | None = None,
) -> PassRun:
    """Return the pass after everything that can be refused without loading a model was checked.

    Raises ConfigError when plan, checkpoint and configuration do not belong together, ArtifactError for a checkpoint
    that is not one.
    """
    if not resolved.route.runs:
        raise ConfigError(
            f"route {resolved.route.key} cannot be sampled by this version, only its configurations are checked; see "
            "`solarwm config routes`"
        )
    chosen = None if slots is None else frozenset(slots)
    run = PassRun(resolved, plan, settings, artifacts.read(checkpoint, CHECKPOINT_SCHEMA), chosen)
    data = resolved.config.data
    read_dataset(data.root, shards_elsewhere=bool(data.transport.root))
    check_plan(plan, resolved)
    check_contract(run.checkpoint, resolved)
    run.sampling.timesteps()
    run.donor(0)
    return run


def causal_of(config: Any) -> Causal:
    """Return chunk and windows of a causal configuration, and the steps of its student; ConfigError for a noisy context."""
    causal, forcing = config.model.causal, config.train.self_gradient_forcing
    if forcing is not None and forcing.context_timestep != 0:
        raise ConfigError(
            f"train.self_gradient_forcing.context_timestep is {forcing.context_timestep}: this version samples with a clean "
            "context only; set 0"
        )
    return Causal(
        causal.chunk_latent_frames,
        causal.max_prior_clean_chunks,
        causal.local_attention_latent_frames,
        causal.sink_latent_frames,
        () if forcing is None else tuple(forcing.denoising_timesteps),
    )


def find_pass(config: Any, name: str) -> Any:
    """Return the pass `name` of `validation.passes`; ConfigError lists the names."""
    found = {item.name: item for item in config.validation.passes}
    if name not in found:
        raise ConfigError(f"no pass {name!r} in validation.passes, found {', '.join(found) or 'none'}")
    return found[name]


def run_pass(
    run: PassRun, clips: Cases, latents_dir: Path, topology: Topology, peers: Peers, device: torch.device
) -> Iterator[list[Slot]]:
    """Yield finished slots, one wave (a slot per sequence group) at a time; every rank sees all of them.

    Sequence-parallel `peers` sample together, the first of them keeps and decodes. Sampling comes first and its latents are kept in `latents_dir` before anything is decoded; latents found there are
    used. No failure of a slot leaves this function; each ends in its manifest.
    """
    slots = [Slot(case) for case in run.plan["cases"]]
    groups, keeps = topology.data_world_size, topology.sequence_rank == 0
    mine = {slot.case["slot"]: slot for slot in slots[topology.data_rank :: groups]}
    codec, available = _sample(run, clips, mine, latents_dir, topology, peers, device)
    with _progress(run, topology, len(slots), "decoding") as bar:
        for start in range(0, len(slots), groups):
            slot = mine.get(start + topology.data_rank) if keeps else None
            if slot is not None and slot.status != "error" and (number := slot.case["slot"]) in available:
                _guarded(slot, functools.partial(_finish, slot, run, clips, codec, device, available[number]))
            wave = [other for other in gather_objects(slot) if other is not None]
            bar.update(len(wave))
            yield wave


def _sample(
    run: PassRun,
    clips: Cases,
    mine: Mapping[int, Slot],
    latents_dir: Path,
    topology: Topology,
    peers: Peers,
    device: torch.device,
) -> tuple[Codec, dict[int, torch.Tensor]]:
    """Return the codec and slot -> latents. The backbone ends here: decoding beside it is what runs out of memory.

    Only previews, which can be left out, are decoded while it is there.
    """
    store = LatentStore(latents_dir, run.identity(), run.parents())
    wanted = {number: slot for number, slot in mine.items() if run.chosen is None or number in run.chosen}
    requests = [_guarded(slot, functools.partial(request_of, run, clips, slot)) for slot in wanted.values()]
    kept = {number: store.load(number) for number in wanted}
    available = {number: tensor for number, tensor in kept.items() if tensor is not None}
    todo = [request for request in requests if request is not None and request.slot not in available]
    models = load_models(run.config, run.checkpoint.path, run.settings.weights, run.weights_id, device)
    models.backbone.set_sequence_group(peers.group)
    keeps = topology.sequence_rank == 0
    with _progress(run, topology, len(todo), "sampling") as bar, ExitStack() as stack:
        shown = (
            keeps
            and preview.wanted(run.config)
            and preview.Previews(latents_dir, models.codec, run.plan["fps"])
        )
        if shown:
            stack.enter_context(shown)

        def on_chunk(requests: Sequence[Request], done: int, chunks: int, latents: torch.Tensor) -> None:
            bar.set_postfix_str(f"chunk {done}/{chunks}")
            if shown:
                shown(requests, done, chunks, latents)

        for request, outcome, seconds in sample_all(models, todo, run.sampling, on_chunk=on_chunk):
            slot = mine[request.slot]
            slot.timings["sample"] = seconds
            slot.facts["numerics"] = models.numerics()
            if isinstance(outcome, Exception):
                slot.fail(outcome)
            elif keeps:
                store.publish(request.slot, outcome)
                available[request.slot] = outcome
            bar.update()
    return models.codec, available


def _progress(run: PassRun, topology: Topology, total: int, phase: str) -> tqdm:
    """Return a bar on the terminal of rank 0; nothing where output is a file."""
    shown = None if run.config.runtime.progress and topology.is_main else True
    return tqdm(total=total, desc=f"{phase} {run.settings.name}", unit="slot", disable=shown)


def request_of(run: PassRun, clips: Cases, slot: Slot) -> Request:
    """Materialise a case; DataError if the data no longer are what the plan froze."""
    begun = time.perf_counter()
    case, donor = slot.case, run.donor(slot.case["slot"])
    frames = run.latent_frames(case)
    read = clips.read(case, frames)
    other = read if donor is case else clips.read(donor, frames)
    slot.facts["camera"] = {"slot": donor["slot"], "sample_id": donor["sample_id"]}
    if other.camera_frames < frames:
        slot.facts["camera"]["repeated_from_latent"] = other.camera_frames
    if frames != run.plan["latent_frames"]:
        shown = run.shown_frames(case)
        slot.facts |= {"latent_frames": frames, "pixel_frames": shown}
    slot.timings["prepare"] = time.perf_counter() - begun
    return Request(
        slot=case["slot"],
        prompt=case["prompt"],
        first_frame=read.first_frame.copy(),
        w2c=other.w2c,
        intrinsics=other.intrinsics,
        noise_key=(case["noise_seed"], case["sample_id"], case["occurrence"]),
        latent_frames=frames,
    )


def _finish(
    slot: Slot, run: PassRun, clips: Cases, codec: Codec, device: torch.device, latents: torch.Tensor
) -> None:
    slot.facts["latents"] = latent_statistics(latents)
    shown = run.shown_frames(slot.case)
    _, complaint = sound_latents(latents)
    if complaint:
        slot.fail(NonFiniteError(complaint))
    recorded = clips.truth_frames(slot.case, shown)
    pad = run.public.padding(slot.case, shown) if run.public else 0
    begun, count = time.perf_counter(), 0
    with Measurement(slot, shown, recorded, run.plan["fps"], run.title, pad) as measurement:
        through_codec = reconstructor(codec, device)
        stretches = decode_stretches(codec, latents, shown, device)
        for frames, statistics in _timed(stretches, slot, "decode"):
            truth = clips.truth(slot.case, min(recorded, count + len(frames)), count)
            measurement.add(frames, statistics, truth, through_codec(truth))
            count += len(frames)
        measurement.finish()
    slot.timings["measure"] = time.perf_counter() - begun - slot.timings["decode"]
    if run.public is not None and slot.status == "ok":
        video = measurement.padded or slot.members["generated.mp4"]
        slot.public = run.public(slot, clips, shown, video)


def _timed(items: Iterator[Any], slot: Slot, name: str) -> Iterator[Any]:
    """Yield `items`; the time that making them takes is added up in the slot's timings."""
    slot.timings[name] = 0.0
    while True:
        begun = time.perf_counter()
        item = next(items, None)
        slot.timings[name] += time.perf_counter() - begun
        if item is None:
            return
        yield item


def latent_statistics(latents: torch.Tensor) -> dict[str, Any]:
    """Return finite fraction, and mean and standard deviation of the finite values, of one clip's latents."""
    values = latents.numpy()
    finite = values[np.isfinite(values)]
    return {
        "shape": list(values.shape),
        "finite_fraction": finite.size / values.size,
        "mean": float(finite.mean()) if finite.size else None,
        "std": float(finite.std()) if finite.size else None,
    }


def _guarded(slot: Slot, work: Callable[[], Any]) -> Any:
    """Run `work`; what it raises becomes the slot's failure, except a request to stop."""
    try:
        return work()
    except Preempted:
        raise
    except Exception as error:
        slot.fail(error)
        return None


def gather_objects(value: Any) -> list[Any]:
    """Return the (picklable) `value` of every rank, in rank order."""
    from solarwm_lib.training.collectives import world_size

    if world_size() == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


@dataclass
class PassWriter:
    """Writes a pass into an open transaction as its slots finish, and its tables at the end.

    `prefix` is the folder of the pass inside the artifact, empty or ending in `/`. Only manifests stay in memory.
    """

    run: PassRun
    write: Callable[[str, bytes], None]
    prefix: str = ""

    def __post_init__(self) -> None:
        self.slots: list[Slot] = []
        self.evidence: dict[str, bytes] = {}
        self.manifests: list[dict[str, Any]] = []

    def shared(self) -> dict[str, Any]:
        """The facts every slot manifest of the pass repeats."""
        plan = self.run.plan
        return {
            "run": self.run.config.name,
            "plan_digest": plan["payload_digest"],
            "weights_id": self.run.weights_id,
            "pass": self.run.settings.model_dump(),
            **{key: plan[key] for key in ("fps", "pixel_frames", "latent_frames", "height", "width")},
        }

    def extend(self, slots: Sequence[Slot]) -> None:
        """Write several finished slots."""
        for slot in slots:
            self.add(slot)

    def add(self, slot: Slot) -> None:
        """Write one finished slot and forget its files."""
        directory = f"{self.prefix}{slot_name(slot.case['slot'])}"
        files = members_of(directory, slot, self.shared())
        for member, data in {**files, **slot.public}.items():
            self.write(member, data)
        if slot.failure and sum(bool(other.failure) for other in self.slots) < KEPT_FAILURES:
            self.evidence |= files
        self.manifests.append(slot.manifest(self.shared()))
        slot.members, slot.public = {}, {}
        self.slots.append(slot)

    def finish(self) -> dict[str, Any]:
        """Write `ordered-manifest.jsonl`, `metrics.csv` and `summary.json`; return the summary."""
        self.slots.sort(key=lambda slot: slot.case["slot"])
        self.manifests.sort(key=lambda manifest: manifest["slot"])
        lines = "".join(json.dumps(m, sort_keys=True, ensure_ascii=False) + "\n" for m in self.manifests)
        self.write(f"{self.prefix}ordered-manifest.jsonl", lines.encode())
        table = csv_text(METRIC_COLUMNS, [slot.row() for slot in self.slots])
        self.write(f"{self.prefix}metrics.csv", table.encode())
        summary = self.summary()
        self.write(f"{self.prefix}summary.json", json_bytes(summary))
        return summary

    def summary(self) -> dict[str, Any]:
        """Return status, counts, means over the slots that are ok, and the failed slots with their reasons."""
        good = [slot.metrics for slot in self.slots if slot.metrics]
        failed = [slot for slot in self.slots if slot.failure]
        status = FAILED if not good else COMPLETE if len(good) == len(self.run.plan["cases"]) else PARTIAL
        return {
            **self.shared(),
            "schema": SUMMARY_SCHEMA,
            "status": status,
            "title": self.run.title,
            "slots": {
                "total": len(self.run.plan["cases"]),
                "ok": len(good),
                "error": len(failed),
                "skipped": len(self.run.plan["cases"]) - len(good) - len(failed),
            },
            "means": {name: float(np.mean([m[name] for m in good])) for name in (good[0] if good else ())},
            "failed": [
                {"slot": slot.case["slot"], "sample_id": slot.case["sample_id"], **slot.failure.record()}
                for slot in failed
                if slot.failure
            ],
        }


def first_failure(summaries: Sequence[Mapping[str, Any]], where: str) -> SolarError:
    """Return the error to raise when no slot of any pass succeeded: of the first failure's class and exit code."""
    first = summaries[0]["failed"][0]
    total = sum(summary["slots"]["error"] for summary in summaries)
    return of_exit_code(first["exit_code"])(
        f"all {total} slots failed; the first, {first['sample_id']!r}: {first['message']} (manifests: {where})"
    )
