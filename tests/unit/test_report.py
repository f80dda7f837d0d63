"""Completion report, gallery and graph picture of a small results folder made with the real writers."""

import base64
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.artifacts import Transaction
from solarwm_lib.config.load import resolve_values
from solarwm_lib.data.video import decode, probe_by_decoding
from solarwm_lib.inference.comparison import compare
from solarwm_lib.inference.evaluation import PassRun, PassWriter
from solarwm_lib.inference.measurement import measure
from solarwm_lib.inference.slots import Slot
from solarwm_lib.report import gallery
from solarwm_lib.report.charts import Series, line_chart
from solarwm_lib.report.completion import completion_report, risks, write_completion_report
from solarwm_lib.report.facts import read_run
from solarwm_lib.report.graph_picture import parse_dot, svg_from_dot
from solarwm_lib.report.markdown import to_html
from solarwm_lib.runtime.errors import ConfigError, DataError
from solarwm_lib.training.metrics import append_event

FRAMES, SIZE = 5, 32
RUN = "tiny"
PASSES = [{"name": "live", "weights": "live"}, {"name": "shuffled", "weights": "live", "camera": "shuffled"}]
RULEGRAPH = """digraph snakemake_dag {
    graph[bgcolor=white, margin=0];
    node[shape=box, style=rounded, fontname=sans,                 fontsize=10, penwidth=2];
    edge[penwidth=2, color=grey];
\t0[label = "all", color = "0.00 0.6 0.85", style="rounded"];
\t1[label = "gallery", color = "0.24 0.6 0.85", style="rounded"];
\t2[label = "compare", color = "0.12 0.6 0.85", style="rounded"];
\t3[label = "validate", color = "0.61 0.6 0.85", style="rounded"];
\t4[label = "train_segment", color = "0.55 0.6 0.85", style="rounded"];
\t5[label = "preflight", color = "0.30 0.6 0.85", style="rounded"];
\t6[label = "synthesize_clips", color = "0.48 0.6 0.85", style="rounded"];
\t1 -> 0
\t2 -> 1
\t3 -> 2
\t4 -> 3
\t5 -> 4
\t6 -> 4
\t6 -> 5
\t6 -> 3
}
"""


def resolve(run: Path):
    return resolve_values(
        {
            "schema": "solarwm.run.v1",
            "action": "train",
            "name": RUN,
            "model": {
                "family": "wan22_ti2v_5b",
                "architecture": "wan22-tiny",
                "base_path": "/base",
                "text_length": 16,
            },
            "data": {"root": "/data", "pixel_frames": FRAMES, "height": SIZE, "width": SIZE},
            "train": {
                "stage": "stage0p5",
                "causal_mode": "bidirectional",
                "objective": "flow_matching",
                "micro_batch_size": 8,
                "max_steps": 40,
                "precision": "float32",
                "optimizer": {"warmup_steps": 2},
            },
            "validation": {"sample_count": 2, "passes": PASSES},
            "runtime": {"output_dir": str(run)},
        }
    )


def write_run(root: Path) -> Path:
    """A run of 20 steps with checkpoints at 10 and 20, two passes at each, one failed slot in the last."""
    run = root / "runs" / RUN
    run.mkdir(parents=True)
    resolved = resolve(run)
    (run / "resolved-config.json").write_text(json.dumps(resolved.values))
    launch = {
        "route": resolved.route.key,
        "started": "2026-01-01T00:00:00+00:00",
        "until_step": 20,
        "world": {"world_size": 4, "sequence_parallel_size": 2, "nodes": 1},
        "source": {"available": True, "commit": "0123abcd", "clean": False},
        "environment": {"packages": {"torch": "2.13.0"}, "devices": [], "cpu": {"usable": 2, "logical": 4}},
        "deviations": [{"key": "train.max_steps", "value": 40, "released": 10000}],
    }
    result = {"status": "preempted", "exit_code": 75, "seconds": 61.0}
    for number, outcome in ((1, result), (2, {**result, "status": "complete", "exit_code": 0})):
        folder = run / f"launches/attempt-{number:03d}"
        folder.mkdir(parents=True)
        (folder / "launch-manifest.json").write_text(json.dumps(launch))
        (folder / "run-result.json").write_text(json.dumps(outcome))
    records = [
        {
            "step": step,
            "loss": 1.0 / step,
            "learning_rate": 1e-3,
            "gradient_norm": 0.5,
            "step_seconds": 0.25,
            "data_seconds": 0.01,
            "samples_per_second": 32.0,
            "memory_bytes": 2**28,
        }
        for step in range(1, 21)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    append_event(run, "save", 8, seconds=50.0, kind="rolling")
    append_event(run, "lost_steps", 8, seconds=2.0, steps=8)
    append_event(run, "restart", 8, seconds=3.0)
    append_event(run, "save", 10, seconds=50.0, kind="published")
    for step in (10, 20):
        target = run / f"checkpoint_model_{step:06d}"
        with Transaction(target, "solarwm.checkpoint.v1", {"step": step}) as transaction:
            transaction.write_json("state.json", {"completed_steps": step, "ema_updates": step, "run": {}})
            transaction.write_bytes("model.safetensors", bytes(2**20))
        for settings in resolved.config.validation.passes:
            write_pass(resolved, settings, transaction.artifact, fail=step == 20 and settings.name == "live")
    return run


def write_pass(resolved, settings, checkpoint, fail: bool) -> None:
    """Publish a pass beside its checkpoint: truth plus a little noise, more of it with shuffled cameras."""
    run, step = checkpoint.path.parent, checkpoint.identity["step"]
    cases = [
        {"slot": slot, "sample_id": f"<room>-{slot}", "start_frame": 0, "occurrence": 0, "prompt": "a room"}
        for slot in (0, 1)
    ]
    plan = {
        "payload_digest": "0" * 64,
        "cases": cases,
        "fps": 16.0,
        "pixel_frames": FRAMES,
        "latent_frames": 2,
        "height": SIZE,
        "width": SIZE,
    }
    spec = PassRun(resolved, plan, settings, checkpoint)
    random = np.random.default_rng(step)
    out = run / f"validation/step_{step:06d}/{settings.name}"
    with Transaction(
        out, "solarwm.validation.v1", {"step": step, "pass": settings.name}, [checkpoint.path]
    ) as transaction:
        writer = PassWriter(spec, transaction.write_bytes)
        for case in cases:
            ramp = np.linspace(0, 180, FRAMES * SIZE * SIZE * 3).reshape(FRAMES, SIZE, SIZE, 3)
            truth = (ramp + 20 * case["slot"]).astype(np.uint8)
            noise = 0.02 if settings.camera != "shuffled" else 0.3
            pixels = truth / 127.5 - 1 + noise * random.standard_normal(truth.shape)
            if fail and case["slot"] == 1:
                pixels[3] = np.nan
            slot = Slot(case)
            measure(slot, truth, pixels, truth, 16.0, spec.title)
            writer.add(slot)
        writer.finish()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("results é 'x'")
    run = write_run(root)
    passes = [run / "validation/step_000020/live", run / "validation/step_000020/shuffled"]
    compare(passes, root / "comparisons/demo")
    with Transaction(root / "data/room", "solarwm.dataset.raw.v1", {"seed": 1}) as transaction:
        transaction.write_bytes("preview.png", base64.b64decode(PIXEL))
    (root / "rulegraph.dot").write_text(RULEGRAPH)
    return root


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_completion_report_says_everything_that_the_specification_asks_for(results):
    text = completion_report(read_run(results / "runs" / RUN))
    for expected in (
        "action: train",
        "route: wan22_ti2v_5b",
        "code revision: 0123abcd with uncommitted changes",
        "torch 2.13.0",
        "world size: 4",
        "sequence-parallel size: 2",
        "data-parallel size: 2",
        "global batch: 8",
        "initial weights: base weights",
        "| attempt-001 | 2026-01-01T00:00:00+00:00 | 20 | preempted | 75 | 1 min 01 s |",
        "final step: 20",
        "gradient norm before clipping: 0.500",
        "step time, median: 0.250 s",
        "| `train.max_steps` | 40 | 10000 |",
        "2 complete.",
        "3 of 4 passes complete, 8 of 8 slots have a comparison video",
        "strategy: replicate",
        "average (EMA): decay 0.9999, from step 0, 20 updates in the last checkpoint",
        "restarts: 1, after steps 8",
        "| lost steps | 1 | 2 s | 40.0% |",
        "| save | 2 | 1 min 40 s |",
        "| 20 | live | live | recorded | partial | 1/2 |",
        "| 20 | live | 1 | <room>-1 | non_finite | 1 of 5 frames are not finite, the first is frame 3 |",
    ):
        assert expected in text


def test_completion_report_is_the_same_text_each_time_and_holds_no_absolute_path(results, tmp_path):
    run = results / "runs" / RUN
    first = write_completion_report(run, tmp_path / "a/report.md").read_text()
    assert (
        first
        == write_completion_report(run, tmp_path / "b.md").read_text()
        == completion_report(read_run(run))
    )
    assert str(results) not in first


def test_remaining_risks_name_what_would_mislead_a_reader(results):
    found = "\n".join(risks(read_run(results / "runs" / RUN)))
    assert "validation pass live of step 20 is partial: its means cover only the slots that are ok" in found
    assert "planned for 40 steps and the last checkpoint is of step 20" in found
    assert "the code had uncommitted changes" in found
    assert "validation cases: 2, too few" in found
    assert "hardly steers" not in found and "does not beat" not in found


def test_damaged_and_missing_results_are_reported_not_hidden(tmp_path):
    run = write_run(tmp_path)
    (run / "checkpoint_model_000020/model.safetensors").write_bytes(b"short")
    (run / "validation/step_000020/live/COMPLETE.json").unlink()
    (run / "validation/step_000020/shuffled").rename(run / "validation/step_000020/shuffled.failed-001")
    facts = read_run(run)
    found = "\n".join(risks(facts))
    assert facts.final is not None and facts.final.step == 10
    assert (
        "checkpoint checkpoint_model_000020 does not verify: " in found
        and "'model.safetensors' has 5 bytes" in found
    )
    assert "pass live of step 20 is damaged" in found
    assert "pass shuffled of step 20 is failed: every slot failed, see shuffled.failed-001" in found
    assert "1 complete, 1 not." in completion_report(facts)


def test_a_folder_that_is_no_run_is_refused_with_the_runs_beside_it(results):
    with pytest.raises(ConfigError, match=r"not a run directory.*runs beside it: tiny"):
        read_run(results / "runs/absent")


class Page(HTMLParser):
    """Collects what a browser would fetch, the ids, and whether tags close in order."""

    VOID = ("meta", "link", "img", "br", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.labels: list[tuple[str, dict]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.fetched += [
            v for k, v in attrs if k in ("src", "href", "poster", "srcset", "data", "action") and v
        ]
        self.ids += [values["id"]] if "id" in values else []
        self.labels.append((tag, values))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()


def test_gallery_is_one_file_that_loads_nothing_and_shows_everything(results, tmp_path):
    out = gallery.build(
        results, tmp_path / "report/gallery.html", title="Tiny <world>", graph=results / "rulegraph.dot"
    )
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert all(value.startswith(("data:", "#")) for value in page.fetched)
    assert not re.search(r"url\((?!#)|@import|<iframe|<object|<base", text)
    assert "default-src 'none'" in text and "prefers-color-scheme:dark" in text
    assert len(page.ids) == len(set(page.ids))
    assert {"comparisons", "runs", "data", "graph"} <= set(page.ids)
    videos = [values for tag, values in page.labels if tag == "video"]
    assert len(videos) == 2 + 2 + 2 and all(
        v["aria-label"] and v["poster"].startswith("data:image/jpeg") for v in videos
    )
    embedded = base64.b64decode(videos[0]["src"].partition(",")[2])
    assert embedded == (results / "comparisons/demo/slot-000000/compare.mp4").read_bytes()
    assert len(decode(embedded)) == FRAMES
    assert all(values.get("alt") for tag, values in page.labels if tag == "img")
    for shown in (
        "Tiny &lt;world&gt;",
        "&lt;room&gt;-1",
        "&lt;room&gt;-0 from frame 0",
        "Completion report",
        "train_segment",
    ):
        assert shown in text
    assert "<room>" not in text and "latents" not in text


def test_clips_beyond_the_budget_are_named_with_their_place(results, tmp_path):
    text = gallery.build(results, tmp_path / "gallery.html", media_budget=1).read_text(encoding="utf-8")
    assert "<video" not in text and "<code>comparisons/demo/slot-000000/compare.mp4</code>" in text
    assert "6 clips are not embedded" in text
    Page(text)


def test_artifacts_that_do_not_verify_are_listed_with_the_reason(tmp_path):
    write_run(tmp_path)
    (tmp_path / "comparisons/broken").mkdir(parents=True)
    text = gallery.build(tmp_path, tmp_path / "gallery.html").read_text(encoding="utf-8")
    assert "comparisons/broken" in text and "no COMPLETE.json" in text


def test_a_gallery_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run and no artifact here"):
        gallery.build(tmp_path, tmp_path / "gallery.html")
    assert not (tmp_path / "gallery.html").exists()


def boxes_and_edges(svg: str):
    tree = ET.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    boxes = [
        tuple(float(box.get(key)) for key in ("x", "y", "width", "height"))
        for box in tree.iter(f"{space}rect")
    ]
    edges = [path for path in tree.iter(f"{space}path") if path.get("class") == "edge"]
    labels = [text.text for text in tree.iter(f"{space}text")]
    return tree, boxes, edges, labels


def test_graph_picture_draws_every_rule_and_every_arrow():
    tree, boxes, edges, labels = boxes_and_edges(svg_from_dot(RULEGRAPH))
    assert labels == [
        "all",
        "gallery",
        "compare",
        "validate",
        "train_segment",
        "preflight",
        "synthesize_clips",
    ]
    assert len(boxes) == 7 and len(edges) == 8
    top = dict(zip(labels, (box[1] for box in boxes), strict=True))
    assert top["synthesize_clips"] < top["preflight"] < top["train_segment"] < top["validate"] < top["all"]
    assert (
        tree.get("role") == "img" and "synthesize_clips leads to train_segment" in ET.tostring(tree).decode()
    )
    assert svg_from_dot(RULEGRAPH) == svg_from_dot(RULEGRAPH)


def test_graph_picture_takes_job_graphs_loops_and_cycles():
    dot = (
        'digraph x {\n0[label = "train_segment\\nrun: a<b", color = "0.1 0.6 0.85"];\n1[label = "validate"];\n'
        "0 -> 0\n0 -> 1\n1 -> 0\n}"
    )
    _, boxes, edges, labels = boxes_and_edges(svg_from_dot(dot))
    assert labels == ["train_segment", "run: a<b", "validate"] and len(boxes) == 2
    assert len(edges) == 2  # the loop, and one line with a tip at both ends
    assert sum("marker-start" in edge.attrib and "marker-end" in edge.attrib for edge in edges) == 1


@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))))
    )
)
def test_no_two_boxes_overlap_and_nothing_leaves_the_picture(graph):
    count, edges = graph
    lines = [f'{i}[label = "{"rule_" * (1 + i % 3)}{i}"];' for i in range(count)] + [
        f"{a} -> {b}" for a, b in edges
    ]
    tree, boxes, _, _ = boxes_and_edges(svg_from_dot("digraph x {\n" + "\n".join(lines) + "\n}"))
    width, height = float(tree.get("width")), float(tree.get("height"))
    for index, (x, y, w, h) in enumerate(boxes):
        assert x >= 0 and y >= 0 and x + w <= width + 1 and y + h <= height + 1
        for other_x, other_y, other_w, other_h in boxes[:index]:
            assert x >= other_x + other_w or other_x >= x + w or y >= other_y + other_h or other_y >= y + h


@pytest.mark.parametrize(
    ("dot", "message"), [("", "no node"), ('digraph x {\n0[label = "a"];\n0 -> 1\n}', "undeclared node 1")]
)
def test_text_that_is_no_graph_is_refused(dot, message):
    with pytest.raises(DataError, match=message):
        parse_dot(dot)


@given(st.text(max_size=200))
def test_markdown_never_lets_markup_through(text):
    html = to_html(text)
    assert set(re.findall(r"</?(\w+)", html)) <= {
        "p",
        "ul",
        "li",
        "div",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "code",
        "strong",
        *(f"h{n}" for n in range(1, 7)),
    }


def test_markdown_tables_keep_escaped_bars_and_align_numbers():
    html = to_html("| a | b |\n| --- | --- |\n| x\\|y | 1.50 |")
    assert "<td>x|y</td>" in html and '<td class="number">1.50</td>' in html
    assert to_html("# Title", top_level=3) == "<h3>Title</h3>"


@given(st.lists(st.floats(1e-9, 1e9) | st.just(float("nan")), min_size=1, max_size=600), st.booleans())
def test_charts_stay_inside_their_frame(values, log):
    chart = line_chart("Loss", [Series("loss", list(enumerate(values)))], x_label="steps", log=log)
    if all(value != value for value in values):
        assert chart == ""
        return
    ET.fromstring(chart)
    places = [
        float(number)
        for path in re.findall(r'class="line[^"]*" d="M([^"]*)"', chart)
        for number in re.split("[ L]", path)
    ]
    assert all(-0.1 <= place <= 460.1 for place in places)


def test_posters_show_a_generated_frame_of_the_clip(results):
    path = results / "comparisons/demo/slot-000000/compare.mp4"
    uri = gallery.Media(results, 0)._poster(path)
    assert uri is not None and base64.b64decode(uri.partition(",")[2])[:2] == b"\xff\xd8"
    assert probe_by_decoding(path).frames == FRAMES
