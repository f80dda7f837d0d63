"""Windows, stored latents and data that exists already, as files of the graph. No Snakemake, no torch."""

import copy
import hashlib
import json
import os
import shlex
from pathlib import Path

import pytest
from folders import REPO, SMOKE, jobs, make_folder

from solarwm_lib import graph
from solarwm_lib.runtime.errors import ConfigError

PART_0, PART_1 = (f"results/latents/stored/shards/part-00000{n}/COMPLETE.json" for n in (0, 1))
INDEX = "results/latents/stored/index/COMPLETE.json"


def values(**changes):
    """The smoke config with changed keys of `latents.stored`."""
    result = copy.deepcopy(SMOKE)
    result["latents"]["stored"].update(changes)
    return {**result, "windows": {"cut": {"data": "room", "profile": "spread", "pixel_frames": 33}}}


def windowed(**changes):
    result = values(windows="cut", **changes)
    del result["latents"]["stored"]["data"]
    return result


def workflow(config=None):
    return graph.load_workflow(values() if config is None else config, REPO)


def refusal(config) -> str:
    with pytest.raises(ConfigError) as error:
        workflow(config)
    return str(error.value)


def sets_of(arguments: str) -> dict[str, str]:
    words = shlex.split(arguments)
    return dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--set")


def publish(marker: str | Path, identity, *parents: str | Path) -> None:
    """A marker as an artifact would have it, without members."""
    folder = Path(marker).parent
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        {
            "path": os.path.relpath(Path(path).parent, folder),
            "digest": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        }
        for path in parents
    ]
    Path(marker).write_text(json.dumps({"identity": identity, "parents": records}))


def test_a_generation_is_its_parts_and_one_index():
    chain = workflow()
    assert chain.latents_parts("stored") == [PART_0, PART_1]
    assert chain.latents_index("stored") == INDEX
    assert chain.named_targets()["latents_stored"] == [INDEX, PART_0, PART_1]
    assert len(workflow(values(parts=64)).latents_parts("stored")) == 64


def test_latents_are_made_from_a_data_set_or_from_windows_of_one():
    assert workflow().latents_inputs("stored") == {
        "source": "results/data/room/COMPLETE.json",
        "assets": "results/assets/tiny/COMPLETE.json",
    }
    cut = workflow(windowed())
    assert cut.latents_inputs("stored") == {
        "source": "results/windows/cut/COMPLETE.json",
        "assets": "results/assets/tiny/COMPLETE.json",
        "raw": "results/data/room/COMPLETE.json",
    }
    data = cut.resolved_latents["stored"].config.data
    assert Path(data.root) == Path("results/windows/cut").absolute()
    assert Path(data.transport.root) == Path("results/data/room").absolute()
    assert cut.windows_arguments("cut") == "--data results/data/room --profile spread --pixel-frames 33"


def test_a_part_gets_the_recipe_at_its_scale_with_the_places_of_the_graph():
    chain = workflow(values(reuse=["old"]) | {"latents": {
        "stored": SMOKE["latents"]["stored"] | {"reuse": ["old"]}, "old": SMOKE["latents"]["stored"],
    }})  # fmt: skip
    config = chain.resolved_latents["stored"].config
    assert (config.action, config.data.encoding, config.data.random_start) == ("preencode", "online", False)
    assert (config.preencode.generation_id, config.preencode.parts) == ("stored", 2)
    assert config.preencode.reuse == [str(Path("results/latents/old").absolute())]
    assert config.data.transport.root == ""
    assert chain.latents_reused("stored") == ["results/latents/old/index/COMPLETE.json"]
    assert json.loads(sets_of(chain.latents_arguments("stored"))["preencode.parts"]) == 2


def test_a_run_trains_from_its_latents_and_validates_on_clips():
    chain = workflow()
    config = chain.resolved["smoke"].config
    assert (config.data.encoding, config.data.random_start) == ("preencoded", False)
    assert config.data.latents_root == str(Path("results/latents/stored").absolute())
    assert config.data.root == str(Path("results/data/room").absolute())
    assert chain.training_inputs("smoke")["latents"] == INDEX
    assert "latents" not in chain.run_inputs("smoke") and "latents" not in chain.inference_inputs("tour")
    assert chain.resolved_inference["tour"].config.data.encoding == "online"


def test_a_run_without_latents_encodes_while_it_trains():
    online = values()
    del online["runs"]["smoke"]["latents"]
    chain = workflow(online)
    assert chain.training_inputs("smoke") == chain.run_inputs("smoke")
    assert chain.resolved["smoke"].config.data.encoding == "online"
    assert chain.identity("smoke") != workflow().identity("smoke")


def test_only_latents_that_nothing_is_made_from_are_results_of_their_own():
    assert INDEX not in workflow().all_targets()
    alone = values() | {"runs": {}, "inference": {}, "comparisons": {}}
    assert workflow(alone).all_targets() == [INDEX]


def test_neither_the_deal_to_parts_nor_copying_from_others_is_the_identity_of_latents():
    identity = workflow().latents_identity("stored")
    assert workflow(values(parts=3, threads=2)).latents_identity("stored") == identity
    reusing = values(reuse=["old"])
    reusing["latents"]["old"] = SMOKE["latents"]["stored"]
    assert workflow(reusing).latents_identity("stored") == identity
    assert workflow(values(set={"preencode.dtype": "bfloat16"})).latents_identity("stored") != identity


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "rooom"}, ["latents.stored.data", "rooom", "room"]),
        ({"windows": "cut"}, ["latents.stored: give exactly one of `data` and `windows`"]),
        ({"assets": "tinny"}, ["latents.stored.assets", "did you mean tiny"]),
        ({"reuse": ["storde"]}, ["latents.stored.reuse", "did you mean stored"]),
        ({"reuse": ["stored"]}, ["latents.stored.reuse: stored -> stored is a circle"]),
        ({"recipe": "wan22_ti2v_5b/preencode_81"}, ["latents.stored.recipe", "preencode_81f"]),
        ({"recipe": "wan22_ti2v_5b/train_stage0p5_fm_81f"}, ["latents.stored.recipe", "action train", "preencode"]),
        ({"parts": 0}, ["latents.stored.parts"]),
        ({"partz": 2}, ["unknown key latents.stored.partz (did you mean parts?)"]),
        ({"set": {"data.pixel_frames": 32}}, ["latents.stored", "29 or 33"]),
        ({"set": {"data.pixel_frames": 29}},
         ["runs.smoke.latents: stored is made with data.pixel_frames 29, but the run has 33"]),
        ({"set": {"data.fps": 8.0}}, ["runs.smoke.latents", "data.fps 8.0", "16.0"]),
        ({"set": {"data.transport.root": "http://b"}}, ["latents.stored", "data.transport.root", "s3://"]),
    ],
)  # fmt: skip
def test_refusals_of_latents_name_the_key_and_the_nearest_valid_value(change, words):
    message = refusal(values(**change))
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_refusals_of_windows_and_runs():
    assert "latents.stored.windows: 'cutt' is not defined" in refusal(windowed() | {
        "latents": {"stored": windowed()["latents"]["stored"] | {"windows": "cutt"}}})  # fmt: skip
    config = windowed()
    config["windows"]["cut"]["pixel_frames"] = 81
    message = refusal(config)
    assert (
        "cut has windows of 81 frames" in message
        and "is 33" in message
        and "windows.cut.pixel_frames" in message
    )
    config["windows"]["cut"]["profile"] = "wan_81f"
    assert "windows.cut.profile" in refusal(config) and "'wan_153f'" in refusal(config)
    config = values()
    config["windows"]["cut"]["data"] = "hall"
    assert "windows.cut.data: 'hall' is not defined" in refusal(config)
    config = values()
    config["runs"]["smoke"]["latents"] = "store"
    assert "runs.smoke.latents: 'store' is not defined (did you mean stored?)" in refusal(config)
    config = values()
    config["runs"]["latents_stored"] = config["runs"]["smoke"]
    assert "'latents_stored' names two targets" in refusal(config)


def test_a_circle_of_generations_that_copy_from_each_other_is_refused():
    config = values()
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        config["latents"][name] = {**SMOKE["latents"]["stored"], "reuse": [other]}
    assert "latents.a.reuse: a -> b -> c -> a is a circle" in refusal(config)


def test_data_that_exists_already_is_used_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "Zoé's data #1"
    config = values()
    config["data"]["room"] = {"kind": "published", "root": str(root)}
    assert f"data.room.root: no {root}/COMPLETE.json" in refusal(config)
    publish(root / "COMPLETE.json", {"name": "elsewhere"})
    chain = workflow(config)
    assert chain.data_marker("room") == f"{root}/COMPLETE.json"
    assert chain.resolved["smoke"].config.data.root == str(root)
    assert chain.names_pattern("data", "synthetic") == "(?!)"
    config["data"]["room"]["root"] = "Zoé's data #1/"
    relative = workflow(config)
    assert relative.data_marker("room") == "Zoé's data #1/COMPLETE.json"
    assert relative.resolved["smoke"].config.data.root == str(root)
    config["data"]["room"]["rot"] = "x"
    assert "unknown key data.room" in refusal(config) and "root" in refusal(config)


def encoded(chain) -> None:
    """The markers of an encoded generation with its data set and base model."""
    publish(chain.data_marker("room"), json.loads(chain.data_spec("room")))
    publish(chain.assets_marker("tiny"), {})
    for part in chain.latents_parts("stored"):
        publish(part, {}, chain.latents_source("stored"), chain.assets_marker("tiny"))
    config = Path(chain.latents_config("stored"))
    config.write_text(json.dumps(chain.resolved_latents["stored"].values))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"set": {"preencode.dtype": "bfloat16"}}, 'preencode.dtype "float32" -> "bfloat16"'),
        ({"parts": 4}, "parts 2 -> 4"),
        ({"set": {"data.max_relative_translation": 5.0}}, "data.max_relative_translation 20.0 -> 5.0"),
    ],
)
def test_other_settings_of_an_existing_generation_are_refused_with_a_diff(
    tmp_path, monkeypatch, change, words
):
    monkeypatch.chdir(tmp_path)
    encoded(workflow())
    workflow(values(threads=2, set={"preencode.shard_max_samples": 1}))  # neither is part of the identity
    message = refusal(values(**change))
    assert f"latents stored exists with another identity: {words}" in message
    assert "reuse: [stored]" in message


def test_a_generation_keeps_the_data_and_the_base_model_it_was_made_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chain = workflow()
    encoded(chain)
    config = values(data="other")
    config["data"]["other"] = {**SMOKE["data"]["room"], "seed": 8}
    message = refusal(config)
    assert "latents.stored: data other (results/data/other) is not what" in message
    assert "results/data/room" in message and "part-000000" in message
    assets = Path(chain.assets_marker("tiny"))
    before = assets.read_text()
    assets.write_text(before + "\n")
    assert "latents.stored: assets tiny" in refusal(values())
    assets.unlink()
    workflow()  # it will be made again
    Path(PART_0).unlink()
    Path(PART_1).unlink()
    assets.write_text(before + "\n")
    workflow()  # nothing is made from it yet


def test_windows_keep_their_profile_and_their_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chain = workflow(windowed())
    publish(chain.data_marker("room"), json.loads(chain.data_spec("room")))
    publish(chain.windows_marker("cut"), json.loads(chain.windows_spec("cut")), chain.data_marker("room"))
    workflow(windowed())
    config = windowed()
    config["windows"]["cut"]["profile"] = "hashed"
    assert "windows.cut exists with another identity: profile 'spread' -> 'hashed'" in refusal(config)
    config = windowed()
    config["data"]["other"] = config["data"]["room"]
    config["windows"]["cut"]["data"] = "other"
    assert "windows.cut: data other (results/data/other) is not what" in refusal(config)


def test_snakemake_plans_each_part_as_a_job_and_windows_of_published_data_in_place(tmp_path):
    folder = make_folder(tmp_path / "Zoé's room #1")
    planned = jobs(folder.snakemake("-n"))
    assert (planned["resolve_latents"], planned["preencode_shard"], planned["merge_latent_index"]) == (
        1,
        2,
        1,
    )
    config = windowed(parts=5)
    data = folder.path / "data of others"
    publish(data / "COMPLETE.json", {})
    config["data"]["room"] = {"kind": "published", "root": "data of others"}
    folder.configure(config)
    planned = jobs(folder.snakemake("-n"))
    assert (planned["materialize_windows"], planned["preencode_shard"]) == (1, 5)
    assert not {"synthesize_clips", "index_clips"} & set(planned)
