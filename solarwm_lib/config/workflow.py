"""The schema of the workflow config (`config/config.yaml`): data sets, windows, latents, base models, runs and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from solarwm_lib.config.architectures import did_you_mean
from solarwm_lib.data.pack_options import PackOptions
from solarwm_lib.runtime.errors import ConfigError

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
Name = Annotated[str, Field(pattern=f"^{NAME}$")]
# One name or several, as a list.
Scale = Annotated[
    list[str],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else [] if value is None else value),
    Field(description="files under config/scales, without .yaml, merged over the recipe; later ones win"),
]
Role = Literal["live", "ema"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SyntheticData(Strict):
    """Rooms rendered along random camera paths; the fields are those of `solarwm_lib.data.synthetic.SynthSpec`."""

    kind: Literal["synthetic"]
    rooms: int = Field(1, ge=1, description="number of different rooms")
    train_clips: int = Field(96, ge=1)
    test_clips: int = Field(8, ge=1, description="clips on held-out camera paths")
    frames: int = Field(33, ge=1, description="pixel frames per clip")
    height: int = Field(64, ge=16)
    width: int = Field(96, ge=16)
    fps: float = Field(16.0, gt=0)
    seed: int = Field(7, ge=0)
    clips_per_shard: int = Field(32, ge=1)


class FolderData(Strict):
    """A folder of videos with sidecars, packed by `solarwm data pack`."""

    kind: Literal["folder"]
    source: str = Field(description="folder of videos")
    options: dict[str, Any] = Field(default_factory=dict, description="options of `solarwm data pack`")

    def pack_options(self) -> PackOptions:
        """Raises ConfigError for an unknown option or a value out of range."""
        known = [field.name for field in fields(PackOptions)]
        for name in self.options:
            if name not in known:
                raise ConfigError(f"unknown pack option {name}{did_you_mean(name, known)}; known are {known}")
        options = PackOptions(**self.options)
        options.check()
        return options


class PublishedData(Strict):
    """A raw data set that exists already, used where it is: an artifact that some other workflow or command made."""

    kind: Literal["published"]
    root: str = Field(min_length=1, description="its folder, relative to the working directory")


class WindowsSpec(Strict):
    """Which clips of fixed length are cut from every video of a data set (spec operations 6.6)."""

    data: Name
    profile: Literal["spread", "hashed", "wan_153f"] = Field(description="how window starts are laid")
    pixel_frames: int = Field(ge=1, description="frames of a window")
    fps: float | None = Field(
        None, gt=0, description="rate that clips are resampled to; default: windows count source frames"
    )


class LatentsSpec(Strict):
    """A generation of stored latents: what the frozen encoders of a recipe make of a data set."""

    data: Name | None = Field(None, description="clips whose start the index states, or that have one start")
    windows: Name | None = Field(None, description="windows of a data set, in place of `data`")
    assets: Name
    recipe: str = Field(description="preencode recipe: file under config/recipes, without .yaml")
    scale: Scale = []
    parts: int = Field(1, ge=1, le=1_000_000, description="jobs the rows are dealt to")
    threads: int = Field(1, ge=1, description="CPU threads per job")
    set: dict[str, Any] = Field(default_factory=dict, description="overrides by dotted key")
    reuse: list[Name] = Field(
        default_factory=list,
        description="generations whose samples of equal content are copied instead of encoded again",
    )


class TinyAssets(Strict):
    """Random base weights of a tiny architecture, with a codec fitted in closed form."""

    kind: Literal["tiny"]
    architecture: Name = "wan22-tiny"
    seed: int = Field(0, ge=0)


class ImportedAssets(Strict):
    """Weights that somebody else made, turned into an artifact by `solarwm weights import`.

    Base weights are named as `assets` of runs and latents. Trained weights name the `base` they belong to; they are the
    `assets` that a run, a role or an inference starts from.
    """

    kind: Literal["imported"]
    source: str = Field(min_length=1, description="file or folder, relative to the working directory")
    architecture: Name | None = Field(
        None, description="a file of config/models; default: found from the tensors"
    )
    base: Name | None = Field(None, description="base weights that trained weights belong to")


class Start(Strict):
    """Trained weights that a run or a role starts from: a checkpoint of another run, or imported weights."""

    run: Name | None = None
    assets: Name | None = Field(None, description="imported trained weights, in place of `run`")
    step: int | None = Field(
        None, ge=1, description="checkpoint step; default: the last one of the run; imported weights need it"
    )
    weights: Role | Annotated[list[Role], Field(min_length=2, max_length=2)] | None = Field(
        None,
        description="which of its weights; default: those of the recipe. Stage0.5 takes also a pair, [source of the live "
        "weights, source of the average]",
    )


class Roles(Strict):
    """The roles of Stage2: a student of Stage1, a frozen teacher and a trained critic of Stage0.5."""

    student: Start
    teacher: Start
    critic: Start | None = Field(None, description="default: the weights of the teacher, as in the release")


class RunSpec(Strict):
    """One training run: a recipe, its overlays and how far it goes."""

    recipe: str = Field(description="file under config/recipes, without .yaml")
    scale: Scale = []
    data: Name
    latents: Name | None = Field(
        None,
        description="train from this generation; `data` stays the clips that are validated. Default: encode online",
    )
    assets: Name
    initial: Start | None = Field(None, description="weights it starts from; default: those of `assets`")
    roles: Roles | None = Field(None, description="weights of the three roles of a Stage2 run")
    steps: int = Field(
        ge=1,
        le=999_999,
        description="completed steps of the last checkpoint; raising it extends the chain",
    )
    checkpoint_every: int = Field(ge=1, description="steps per segment; one checkpoint each")
    validate_steps: list[int] | None = Field(None, description="checkpoints to validate; default: all")
    processes: int = Field(1, ge=1, description="data-parallel processes on this machine (torchrun)")
    threads: int = Field(1, ge=1, description="CPU threads per process")
    set: dict[str, Any] = Field(default_factory=dict, description="overrides by dotted key")


class InferenceSpec(Strict):
    """Standalone inference from a checkpoint of a run, or from imported trained weights."""

    run: Name | None = None
    step: int | None = Field(None, description="checkpoint step; default: the last one of the run")
    assets: Name | None = Field(None, description="imported trained weights, in place of `run`")
    data: Name | None = Field(None, description="data set of the cases; default: that of the run")
    recipe: str
    scale: Scale = []
    threads: int = Field(1, ge=1)
    set: dict[str, Any] = Field(default_factory=dict)


class ExportSpec(Strict):
    """A checkpoint's weights, written for other programs by `solarwm weights export`."""

    run: Name
    step: int | None = Field(None, description="checkpoint step; default: the last one")
    form: Literal["diffusers", "official", "released"] = Field(description="layout and key names")
    weights: Role | None = Field(
        None, description="which weights, default ema; a released package holds both and takes none"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="cast to this type; default: as stored"
    )

    @property
    def role(self) -> str | None:
        return None if self.form == "released" else self.weights or "ema"


class Side(Strict):
    """One column of a comparison: a validation pass of a run, or an inference artifact."""

    run: Name | None = None
    step: int | None = Field(None, description="checkpoint step; default: the last one")
    passes: list[Name] = Field(default_factory=list, description="validation passes; default: all of the run")
    inference: Name | None = None


class WorkflowConfig(Strict):
    """The whole workflow: `config/config.yaml`."""

    results: str = Field("results", description="results root, relative to the working directory")
    title: str = "SolarWM results"
    data: dict[Name, Annotated[SyntheticData | FolderData | PublishedData, Field(discriminator="kind")]]
    windows: dict[Name, WindowsSpec] = Field(default_factory=dict)
    assets: dict[Name, Annotated[TinyAssets | ImportedAssets, Field(discriminator="kind")]]
    latents: dict[Name, LatentsSpec] = Field(default_factory=dict)
    runs: dict[Name, RunSpec]
    inference: dict[Name, InferenceSpec] = Field(default_factory=dict)
    exports: dict[Name, ExportSpec] = Field(default_factory=dict)
    comparisons: dict[Name, list[Side]] = Field(default_factory=dict)


def parse_config(values: Mapping[str, Any]) -> WorkflowConfig:
    """Validate the workflow config. Raises ConfigError naming the key and the nearest valid one."""
    try:
        return WorkflowConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(
            "workflow config: " + "; ".join(_problem(item) for item in error.errors())
        ) from None


def _problem(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        names = {name for model in _MODELS for name in model.model_fields}
        return f"unknown key {key}{did_you_mean(str(item['loc'][-1]), names)}"
    return (
        f"{key}: {item['msg']} (found {item['input']!r})"
        if item["type"] != "missing"
        else f"{key} is missing"
    )


_MODELS = (
    SyntheticData,
    FolderData,
    PublishedData,
    WindowsSpec,
    TinyAssets,
    ImportedAssets,
    LatentsSpec,
    Start,
    Roles,
    RunSpec,
    InferenceSpec,
    ExportSpec,
    Side,
    WorkflowConfig,
)
