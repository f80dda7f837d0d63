"""The gallery: one self-contained HTML page of what a results folder holds.

Videos are embedded as base64 with a poster frame, so the page works from file:// and can be sent as one file. Embedding
stops at a budget; later clips are named with their path instead, and the page says so.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact, write_atomic
from solarwm_lib.report.charts import Series, line_chart
from solarwm_lib.report.completion import completion_report, risks
from solarwm_lib.report.facts import RunFacts, read_run, setting
from solarwm_lib.report.graph_picture import svg_from_dot
from solarwm_lib.report.markdown import table_html, to_html
from solarwm_lib.report.page import play_button, render, tile
from solarwm_lib.runtime.errors import ConfigError, DataError

MEDIA_BUDGET = 32 * 2**20
CLIPS_PER_ARTIFACT = 8
POSTER_WIDTH = 960
COMPARISON_SCHEMA = "solarwm.comparison.v1"
INFERENCE_SCHEMA = "solarwm.inference.v1"
DATASET_SCHEMA = "solarwm.dataset.raw.v1"
SUMMARY_COLUMNS = (
    "pass",
    "status",
    "n",
    "psnr",
    "ssim",
    "margin_db",
    "margin_over_shuffled_db",
    "codec_ceiling_psnr",
)
SUMMARY_HEAD = (
    "pass",
    "status",
    "cases",
    "PSNR dB",
    "SSIM",
    "over first frame dB",
    "over shuffled camera dB",
    "codec limit dB",
)
SUMMARY_NOTE = (
    "Means over held-out clips, without the given first frame. The codec limit is what encoding and decoding the ground truth "
    "reaches; no model on this codec can pass it."
)


def build(
    results_root: Path | str,
    out_html: Path | str,
    *,
    title: str = "SolarWM results",
    graph: Path | str | None = None,
    media_budget: int = MEDIA_BUDGET,
) -> Path:
    """Write the page of everything complete under `results_root` at `out_html` and return its path.

    `graph` is a file with the output of `snakemake --rulegraph`. Artifacts that do not verify are named with the reason.
    `media_budget` is the number of bytes of videos and pictures to embed.

    Raises:
        ConfigError: `results_root` holds no run and no artifact.
    """
    root = Path(results_root)
    runs = [read_run(path.parent) for path in sorted(root.glob("runs/*/resolved-config.json"))]
    media = Media(root, media_budget)
    kinds = {
        "comparisons": artifacts.scan(root / "comparisons", COMPARISON_SCHEMA),
        "inference": artifacts.scan(root / "inference", INFERENCE_SCHEMA),
        "data": artifacts.scan(root / "data", DATASET_SCHEMA),
    }
    if not runs and not any(good for good, _ in kinds.values()):
        raise ConfigError(
            f"{root}: no run and no artifact here; expected a results folder with runs/, data/, comparisons/"
        )
    sections: list[tuple[str, str, str]] = []
    if kinds["comparisons"][0]:
        body = "".join(_comparison(artifact, media) for artifact in kinds["comparisons"][0])
        sections.append(("comparisons", "Comparisons", body))
    if runs:
        sections.append(("runs", "Runs", "".join(_run(run, media) for run in runs)))
    if kinds["inference"][0]:
        body = "".join(_inference(artifact, media) for artifact in kinds["inference"][0])
        sections.append(("inference", "Inference", body))
    if kinds["data"][0]:
        sections.append(("data", "Data", "".join(_dataset(artifact, media) for artifact in kinds["data"][0])))
    if graph is not None:
        sections.append(("graph", "Graph", _graph(Path(graph))))
    if problems := [(path, why) for _, bad in kinds.values() for path, why in bad if _counts(path)]:
        rows = [
            (str(path.relative_to(root)), why.replace(f"{root.absolute()}/", "")) for path, why in problems
        ]
        sections.append(("problems", "Not shown", table_html(("artifact", "reason"), rows)))
    write_atomic(out_html, render(title, _lead(runs, kinds["comparisons"][0], media), sections))
    return Path(out_html)


class Media:
    """Turns files into `data:` URIs until the budget of the page is spent."""

    def __init__(self, root: Path, budget: int) -> None:
        self.root, self._left = root.absolute(), budget
        self.named = 0

    def video(self, path: Path, caption: str) -> str:
        """Return a `<figure>` with the video, or its poster and place if it no longer fits."""
        poster = self._poster(path)
        data = self._uri(path, "video/mp4")
        if data is None:
            self.named += 1
            where = escape(str(path.absolute().relative_to(self.root)))
            picture = f'<img class="wide" src="{poster}" alt="{escape(caption)}">' if poster else ""
            return f"<figure>{picture}<figcaption>{escape(caption)}: not embedded, see <code>{where}</code></figcaption></figure>"
        shown = f' poster="{poster}"' if poster else ""
        return (
            f'<figure><video controls loop muted playsinline preload="none"{shown} aria-label="{escape(caption)}" '
            f'src="{data}"></video><figcaption>{escape(caption)}</figcaption></figure>'
        )

    def image(self, path: Path, caption: str) -> str:
        data = self._uri(path, "image/png")
        if data is None:
            return ""
        return f'<figure><img class="wide" src="{data}" alt="{escape(caption)}"><figcaption>{escape(caption)}</figcaption></figure>'

    def _uri(self, path: Path, kind: str) -> str | None:
        size = path.stat().st_size
        if size > self._left:
            return None
        self._left -= size
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"

    def _poster(self, path: Path) -> str | None:
        """A frame past the middle as JPEG: the first one is given to the model and shows nothing of what it made."""
        from PIL import Image

        from solarwm_lib.data.video import iterate

        try:
            frames = [frame for _, frame in iterate(path)]
        except DataError:
            return None
        picture = Image.fromarray(frames[2 * len(frames) // 3])
        picture.thumbnail((POSTER_WIDTH, POSTER_WIDTH))
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=80, optimize=True)
        return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _lead(runs: Sequence[RunFacts], comparisons: Sequence[Artifact], media: Media) -> str:
    tiles = []
    for run in runs:
        if run.final:
            tiles.append(tile(f"step {run.final.step}", run.name))
        best = max(
            (
                p
                for p in run.passes
                if p.mean("margin_db") is not None and setting(p.summary or {}, "pass.camera") != "shuffled"
            ),
            key=lambda p: (p.step, p.mean("margin_db")),
            default=None,
        )
        if best is not None:
            margin = best.mean("margin_db") or 0.0
            label = f"PSNR over repeating the first frame, {best.name}"
            tiles.append(tile(f"{margin:+.2f} dB", label, "good" if margin > 0 else "bad"))
    for artifact in comparisons:
        for row in _rows(artifact.file("summary.csv")):
            if row["margin_over_shuffled_db"]:
                margin = float(row["margin_over_shuffled_db"])
                label = f"PSNR over shuffled cameras, {row['pass']}"
                tiles.append(tile(f"{margin:+.2f} dB", label, "good" if margin > 0 else "bad"))
    note = ""
    if media.named:
        note = f'<p class="note">{media.named} clips are not embedded to keep this page small; they are named with their place.</p>'
    return f'<ul class="tiles">{"".join(tiles)}</ul>{note}'


def _comparison(artifact: Artifact, media: Media) -> str:
    name = artifact.path.name
    videos = [member.path for member in artifact.members if member.path.endswith("compare.mp4")]
    rows = _rows(artifact.file("summary.csv"))
    parts = [f"<h3>{escape(name)}</h3>", table_html(SUMMARY_HEAD, [_summary_row(row) for row in rows])]
    parts.append(f'<p class="note">{SUMMARY_NOTE}</p>')
    parts.append(
        _clips(f"clips-{_slug(name)}", [(artifact.file(v), _caption(artifact, v)) for v in videos], media)
    )
    parts.append(media.image(artifact.file("metrics.png"), f"{name}: PSNR over frames"))
    cases = _rows(artifact.file("metrics.csv"))
    if cases:
        table = table_html(list(cases[0]), [[_rounded(cell) for cell in row.values()] for row in cases])
        parts.append(f"<details><summary>Every case</summary>{table}</details>")
    return f'<article class="card">{"".join(parts)}</article>'


def _summary_row(row: dict[str, str]) -> list[str]:
    cells = [row.get(column, "") for column in SUMMARY_COLUMNS]
    return [
        f"{row['n']}/{row['cases']}" if c == "n" else _rounded(v)
        for c, v in zip(SUMMARY_COLUMNS, cells, strict=True)
    ]


def _run(run: RunFacts, media: Media) -> str:
    worries = list(risks(run))
    tone = (
        f'<span class="tag bad">{len(worries)} remarks</span>'
        if worries
        else '<span class="tag good">no remarks</span>'
    )
    parts = [
        f"<h3>{escape(run.name)} {tone}</h3>",
        _run_tiles(run),
        f'<div class="charts">{_charts(run)}</div>',
    ]
    last = max((item.step for item in run.passes), default=None)
    for item in (item for item in run.passes if item.step == last and item.summary):
        artifact = artifacts.read(item.path)
        videos = [m.path for m in artifact.members if m.path.endswith("compare.mp4")]
        anchor = f"clips-{_slug(run.name)}-{_slug(item.name)}"
        clips = _clips(anchor, [(artifact.file(v), _caption(artifact, v)) for v in videos], media)
        parts.append(
            f"<details><summary>Clips of pass {escape(item.name)} ({escape(item.status)})</summary>{clips}</details>"
        )
    report = to_html(completion_report(run), top_level=4)
    parts.append(f"<details><summary>Completion report</summary>{report}</details>")
    return f'<article class="card">{"".join(parts)}</article>'


def _run_tiles(run: RunFacts) -> str:
    tiles = []
    if run.final:
        tiles.append(
            tile(str(run.final.step), f"completed steps of {setting(run.config, 'train.max_steps', '?')}")
        )
    for value, form, label in (
        (run.tail("loss"), "{:.4f}", "loss, last steps"),
        (run.step_seconds(), "{:.2f} s", "per step, median"),
        (run.tail("samples_per_second"), "{:.1f}", "samples per second"),
    ):
        if value is not None:
            tiles.append(tile(form.format(value), label))
    return f'<ul class="tiles">{"".join(tiles)}</ul>'


def _charts(run: RunFacts) -> str:
    def curve(key: str, label: str, log: bool = False) -> str:
        points = [(record["step"], record[key]) for record in run.records if record.get(key) is not None]
        return line_chart(label, [Series(label, points)], x_label="completed steps", log=log)

    charts = [
        curve("loss", "Loss", log=True),
        curve("learning_rate", "Learning rate"),
        curve("gradient_norm", "Gradient norm before clipping", log=True),
        curve("step_seconds", "Seconds per step"),
    ]
    steps = sorted({item.step for item in run.passes})
    if len(steps) > 1:
        names = dict.fromkeys(item.name for item in run.passes)
        lines = [
            Series(
                name,
                [
                    (p.step, value)
                    for p in run.passes
                    if p.name == name and (value := p.mean("psnr")) is not None
                ],
            )
            for name in names
        ]
        charts.append(line_chart("PSNR on held-out clips, dB", lines, x_label="completed steps"))
    return "".join(charts)


def _inference(artifact: Artifact, media: Media) -> str:
    videos = [m.path for m in artifact.members if m.path.endswith("compare.mp4")]
    clips = _clips(
        f"infer-{_slug(artifact.path.name)}",
        [(artifact.file(v), _caption(artifact, v)) for v in videos],
        media,
    )
    return f'<article class="card"><h3>{escape(artifact.path.name)}</h3>{clips}</article>'


def _dataset(artifact: Artifact, media: Media) -> str:
    pictures = [m.path for m in artifact.members if m.path.endswith(".png")]
    size = artifact.bytes / 2**20
    note = f'<p class="note">{size:.1f} MiB in {len(artifact.members)} files, marker <code>{artifact.digest[:16]}</code></p>'
    shown = "".join(media.image(artifact.file(p), f"{artifact.path.name}: {Path(p).stem}") for p in pictures)
    return f'<article class="card"><h3>{escape(artifact.path.name)}</h3>{note}{shown}</article>'


def _clips(anchor: str, videos: Sequence[tuple[Path, str]], media: Media) -> str:
    if not videos:
        return ""
    shown = "".join(media.video(path, caption) for path, caption in videos[:CLIPS_PER_ARTIFACT])
    rest = len(videos) - CLIPS_PER_ARTIFACT
    more = (
        f'<p class="note">and {rest} more in <code>{escape(videos[0][0].parent.parent.name)}</code></p>'
        if rest > 0
        else ""
    )
    return f'{play_button(anchor)}<div class="clips" id="{anchor}">{shown}</div>{more}'


def _graph(path: Path) -> str:
    try:
        picture = svg_from_dot(path.read_text(encoding="utf-8"))
    except (DataError, OSError) as error:
        return f'<p class="note">No picture: {escape(str(error))}</p>'
    return f'<p class="note">Every rule of this results folder; an arrow leads from what is made to what needs it.</p><div class="graph" tabindex="0">{picture}</div>'


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def _rounded(cell: str) -> str:
    if not re.fullmatch(r"[+-]?\d+\.\d+(e[+-]?\d+)?", cell):
        return cell or "-"
    return f"{float(cell):.{3 if abs(float(cell)) < 1 else 2}f}"


def _caption(artifact: Artifact, member: str) -> str:
    """Name a slot's clip by its pass, sample and score, as its manifest has them."""
    folder = member.rpartition("/")[0]
    manifest = json.loads(artifact.file(f"{folder}/manifest.json").read_bytes())
    case = manifest.get("case") or manifest
    words = [f"{folder.partition('/')[0]}: "] if "/" in folder else []
    words.append(f"{case['sample_id']} from frame {case['start_frame']}")
    if psnr := (manifest.get("metrics") or {}).get("psnr"):
        words.append(f", PSNR {psnr:.2f} dB")
    if manifest["status"] != "ok":
        words.append(f" ({manifest['status']})")
    return "".join(words)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", name)


def _counts(path: Path) -> bool:
    """Latents and failed attempts stand beside results on purpose; they are no missing results."""
    return not re.search(r"\.(latents|launch)$|\.failed-\d+$", path.name)
