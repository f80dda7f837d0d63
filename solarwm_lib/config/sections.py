"""The sections of a run configuration: every field with its default, unit, range and meaning.

Defaults are the released Wan 2.2 TI2V-5B Stage0.5 numbers; what differs per family or stage stands in `defaults.py`.
The reference page is generated from these descriptions (`schema.reference_markdown`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Weights = Literal["live", "ema"]
Stage = Literal["", "stage0p5", "stage1", "stage2"]


def knob(default: Any, text: str, unit: str = "", **limits: Any) -> Any:
    """A field: default (`...` = required), description, unit and pydantic's range arguments."""
    return Field(default, description=text, json_schema_extra={"unit": unit}, **limits)


class Section(BaseModel):
    """Unknown keys and silent conversions ("8" for 8, 1 for true) are errors; configurations are immutable."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class Causal(Section):
    """Chunks and windows of the causal stages; not used by Stage0.5."""

    chunk_latent_frames: int = knob(
        3, "Latent frames generated together (5 for MiniMax-H3).", "latent frames", ge=1
    )
    max_prior_clean_chunks: int = knob(
        5, "Clean chunks before its own that a noisy chunk attends to.", "chunks", ge=0
    )
    local_attention_latent_frames: int = knob(
        21, "Attention window, the current chunk included (18 in Stage2).", "latent frames", ge=1
    )
    sink_latent_frames: int = knob(
        0, "First latent frames that stay visible outside the window.", "latent frames", ge=0
    )


class Adapter(Section):
    """LoRA on the linear layers of every block (LTX-2.5 and MiniMax-H3)."""

    rank: int = knob(384, "Rank of the low-rank update.", ge=1)
    alpha: float = knob(384.0, "The update is scaled by alpha / rank.", gt=0)
    dropout: float = knob(0.0, "Dropout on the adapter's input.", "probability", ge=0, lt=1)
    target: Literal["block_qkvo_ffn"] = knob("block_qkvo_ffn", "Which linear layers are adapted.")


class Ltx25(Section):
    """Leaves only LTX-2.5 has."""

    model_fps: float = knob(
        24.0, "Divides the rotary time positions; never resamples frames.", "frames/s", gt=0
    )
    timestep_std: float = knob(1.0, "Standard deviation of the shifted logit-normal draw.", gt=0)
    timestep_epsilon: float = knob(1e-3, "Smallest sigma of the draw.", "sigma", gt=0, lt=1)
    timestep_uniform_probability: float = knob(
        0.1, "Share of samples drawn uniformly.", "probability", ge=0, le=1
    )


class MiniMaxH3(Section):
    """Leaves only MiniMax-H3 has."""

    audio_timestep_shift: float = knob(3.0, "Timestep shift of the audio rows.", gt=0)
    anchor_time: float = knob(0.999, "Data-ward time of the anchor frame (1 = clean).", ge=0, le=1)
    target_latent_frames: int = knob(
        47, "Latent frames the loss supervises (45 in Stage1).", "latent frames", ge=1
    )


class Model(Section):
    """Which network, from where, and how it sees cameras."""

    family: Literal["wan22_ti2v_5b", "wan22_i2v_a14b", "ltx25_video", "minimax_h3"] = knob(
        ..., "Model family."
    )
    architecture: str = knob(..., "Name of a file in `config/models/` (without `.yaml`).", min_length=1)
    base_path: str = knob(..., "Base weights: a folder in diffusers pipeline layout.", "path", min_length=1)
    timestep_shift: float = knob(
        5.0, "s in sigma = s u / (1 + (s-1) u); the same in training and sampling. A14B 3, H3 12.", gt=0
    )
    camera_attention_mode: Literal["fused_prope"] = knob(
        "fused_prope", "Projective camera transform inside attention."
    )
    camera_translation_transform: Literal["linear", "logd4"] = knob(
        "linear", "linear: translations as they are; logd4: t ln(1+|t|) / (4 |t|). H3: logd4."
    )
    camera_intrinsics_mode: Literal["wan_fixed", "per_clip"] = knob(
        "wan_fixed",
        "wan_fixed: one pinhole for every clip, as released; per_clip: `intrinsics` of the camera file.",
    )
    text_length: int = knob(
        512,
        "Text tokens after padding; from the architecture if absent; 0: as long as the text.",
        "tokens",
        ge=0,
    )
    causal: Causal = knob(Causal(), "Chunks and windows (Stage1, Stage2).")
    adapter: Adapter | None = knob(None, "LoRA; null trains all parameters.")
    ltx25: Ltx25 | None = knob(None, "Only for family ltx25_video.")
    minimax_h3: MiniMaxH3 | None = knob(None, "Only for family minimax_h3.")


class Transport(Section):
    """Where shards are, if not beside their index. The order of samples never depends on it."""

    root: str = knob(
        "",
        "What the shard keys of `data.root` are relative to: a folder or an s3://, gs:// or memory:// address; empty: "
        "`data.root`.",
        "path",
    )
    latents_root: str = knob("", "The same for stored latents; empty: `data.latents_root`.", "path")
    cache_dir: str = knob(
        "",
        "Folder for shards staged from a bucket, shared by processes; empty: members are read by byte range.",
        "path",
    )
    cache_max_gib: float = knob(256.0, "Size the shard cache never exceeds.", "GiB", gt=0)
    prefetch_shards: int = knob(2, "Shards staged ahead of the step, per process.", "shards", ge=0)
    attempts: int = knob(8, "Tries of one transfer, with growing pauses, before it is an error.", ge=1)
    timeout_seconds: float = knob(
        1800.0, "Longest wait for one shard: transfer, another process's transfer, room.", "s", gt=0
    )


class Data(Section):
    """Clips, their geometry and their order."""

    root: str = knob(
        ..., "Folder with the indexes and, for local transport, the shards.", "path", min_length=1
    )
    encoding: Literal["online", "preencoded"] = knob(
        "online", "Pixels encoded while training, or stored latents."
    )
    latents_root: str = knob(
        "",
        "Folder of a latent generation; required when preencoded, `data.root` stays the raw clips.",
        "path",
    )
    latent_schema: str | None = knob(
        None, "Layout of the stored latents; if absent it follows from family and geometry."
    )
    train_index: str = knob("train-index.jsonl", "Training index, relative to `data.root`.", min_length=1)
    test_index: str = knob("test-index.jsonl", "Held-out index, relative to `data.root`.", min_length=1)
    pixel_frames: int = knob(
        ...,
        "Frames of a clip; the family's law decides which counts are legal.",
        "pixel frames",
        ge=1,
        le=1_000_000,
    )
    latent_frames: int = knob(
        0, "Follows from `data.pixel_frames`; if given it must agree.", "latent frames", ge=0
    )
    height: int = knob(..., "Frame height; multiple of codec stride x patch.", "pixels", ge=1)
    width: int = knob(..., "Frame width; multiple of codec stride x patch.", "pixels", ge=1)
    fps: float = knob(
        16.0, "Frame rate of a clip; sources are resampled to it by time. LTX and H3 24.", "frames/s", gt=0
    )
    seed: int = knob(42, "Every draw of the run is keyed by it.", ge=0, lt=2**63)
    random_start: bool = knob(True, "Draw the first frame of a clip; false takes it from the index.")
    camera_array_key: Literal["c2w", "w2c", "vipe_c2w", "vipe_w2c", "relative_w2c"] = knob(
        "c2w", "Array of the camera file; its name states the direction, nothing is guessed."
    )
    camera_axes: Literal["opencv", "opengl"] = knob(
        "opencv",
        "Camera axes of the stored array: opencv (x right, y down, z forward) or opengl (y up, z back).",
    )
    camera_scale: float = knob(
        1.0, "Stored translations are multiplied by it; 1 leaves them as they are.", "per unit", gt=0
    )
    intrinsics_array_key: str = knob(
        "intrinsics", "Normalised pinhole of a clip, [3,3] or [4]; read only in mode per_clip.", min_length=1
    )
    max_relative_translation: float | None = knob(
        20.0, "Refuse clips that move further from their first frame; null: no limit.", "camera units", gt=0
    )
    max_camera_absolute: float | None = knob(
        20.0, "Refuse clips with a larger entry in a relative pose; null: no limit.", "camera units", gt=0
    )
    decoded_cache_gib: float = knob(
        2.0, "Decoded frames and encoded clips kept in memory per process, half for each.", "GiB", ge=0
    )
    num_workers: int = knob(2, "Threads that prepare clips ahead of the step.", "threads", ge=0)
    mixed_shards: int = knob(
        1,
        "Shards whose clips are shuffled together; more mix better, and more lie open at once.",
        "shards",
        ge=1,
    )
    failure_budget: int = knob(
        0, "Unreadable clips a run may replace by others before it stops; 0: the first one is an error.", ge=0
    )
    transport: Transport = knob(Transport(), "Where shards come from.")


class Distributed(Section):
    """Processes; may change between attempts of the same run."""

    world_size: int = knob(1, "Processes in total, over all nodes.", "processes", ge=1, le=1_000_000)
    sequence_parallel_size: int = knob(1, "Processes that share one sample.", "processes", ge=1)


class Optimizer(Section):
    """AdamW with linear warm-up and cosine decay, a pure function of the step."""

    learning_rate: float = knob(5e-5, "Peak learning rate.", gt=0)
    betas: list[float] = knob([0.9, 0.95], "AdamW averaging coefficients.", min_length=2, max_length=2)
    eps: float = knob(1e-8, "AdamW epsilon.", gt=0)
    weight_decay: float = knob(0.01, "Decoupled weight decay.", ge=0)
    gradient_clip: float = knob(1.0, "Largest global gradient norm.", gt=0)
    warmup_steps: int = knob(1000, "Steps from rate 0 to the peak.", "steps", ge=0)
    min_learning_rate_ratio: float = knob(
        0.1, "Rate at `train.max_steps` as a share of the peak.", ge=0, le=1
    )


class Ema(Section):
    """Exponential moving average of the weights."""

    decay: float = knob(0.9999, "Share of the old average kept per update.", ge=0, lt=1)
    start_step: int = knob(0, "First step (Stage2: student update) that updates it.", "steps", ge=0)
    update_every: int = knob(1, "Steps between updates.", "steps", ge=1)
    warmup_steps: int = knob(0, "Before this step the average copies the live weights.", "steps", ge=0)


class AnyFlow(Section):
    """Stage1 forward-map objective v1.5."""

    gate: float = knob(0.25, "Weight of the second time embedding.", ge=0, le=1)
    delta_time: Literal["r"] = knob("r", "What the second embedding encodes.")
    epsilon: float = knob(5.0, "Half width of the finite difference.", "raw timestep", gt=0)
    diffusion_ratio: float = knob(0.5, "Share of a global batch trained with r = t.", ge=0, le=1)
    consistency_ratio: float = knob(0.25, "Share of a global batch trained with r = 0.", ge=0, le=1)
    guidance_scale: float = knob(3.0, "Guidance fused into the target; 1 turns it off.", gt=0)
    negative_prompt: str = knob("", "Text the guidance leads away from; empty takes the released one.")
    negative_embedding: str = knob(
        "",
        "Its embedding as a file relative to `model.base_path` (released: `conditioning/wan_negemb_cn.pth`); empty: from the "
        "text encoder.",
    )
    weight_type: Literal["gaussian"] = knob("gaussian", "Weight over timesteps.")


class SelfGradientForcing(Section):
    """Stage2 distillation: student, frozen teacher and critic."""

    critic_updates_per_student: int = knob(5, "Critic updates for each student update.", "updates", ge=1)
    denoising_timesteps: list[int] = knob(
        [1000, 750, 500, 250], "Steps the student is trained for.", min_length=1
    )
    score_min_timestep: int = knob(20, "Smallest timestep of the score loss.", "raw timestep", ge=0, le=1000)
    score_max_timestep: int = knob(980, "Largest timestep of the score loss.", "raw timestep", ge=0, le=1000)
    real_guidance_scale: float = knob(3.0, "Guidance of the teacher: c + g (c - u).", ge=0)
    fake_guidance_scale: float = knob(0.0, "Guidance of the critic.", ge=0)
    negative_prompt: str = knob("", "Text of the unconditional branch; empty takes the released one.")
    rollout_latent_frames: int | None = knob(
        None, "Latent frames of a training rollout; null: `data.latent_frames`.", "latent frames", ge=1
    )
    context_timestep: int = knob(0, "Timestep of the committed context.", "raw timestep", ge=0, le=1000)
    critic_optimizer: Optimizer = knob(
        Optimizer(learning_rate=4e-7, betas=[0.0, 0.999], weight_decay=0.0, gradient_clip=10.0, warmup_steps=0,
                  min_learning_rate_ratio=1.0), "AdamW of the critic.")  # fmt: skip


class Train(Section):
    """Route, batch, schedule and objective."""

    stage: Stage = knob("", "Training stage; also names the route of an inference.")
    causal_mode: Literal["", "bidirectional", "teacher_forcing", "self_gradient_forcing"] = knob(
        "", "Part of the route."
    )
    objective: Literal["", "flow_matching", "anyflow_forward_map", "native_rectified_flow"] = knob(
        "", "Part of the route."
    )
    objective_variant: Literal["", "v1_5"] = knob("", "Part of the route (AnyFlow: v1_5).")
    micro_batch_size: int = knob(1, "Clips per process and forward pass.", "clips", ge=1, le=1_000_000)
    gradient_accumulation_steps: int = knob(1, "Forward passes per optimizer step.", ge=1)
    global_batch_size: int = knob(
        0,
        "Clips per optimizer step = world / SP x micro x accumulation; if absent it follows from them.",
        "clips",
        ge=0,
        le=10_000_000,
    )
    max_steps: int = knob(30000, "Length of the learning-rate schedule.", "steps", ge=1)
    timestep_mode: Literal["uniform_per_video", "per_block", "shifted_logit_normal"] = knob(
        "uniform_per_video", "How training timesteps are drawn."
    )
    num_train_timesteps: int = knob(1000, "N; raw timesteps lie in [0, N].", ge=2)
    image_condition_dropout: float = knob(
        0.1, "Share of clips trained without the first image.", "probability", ge=0, le=1
    )
    precision: Literal["float32", "bfloat16"] = knob(
        "bfloat16", "Arithmetic of forward and backward; masters are float32."
    )
    activation_checkpointing: bool = knob(False, "Recompute activations in the backward pass to save memory.")
    attention_executor: Literal["segments", "flex"] = knob(
        "segments",
        "What runs the visibility plans of Stage1 and Stage2: slices of plain attention, or FlexAttention's compiled kernels "
        "(CUDA only). Equal up to rounding.",
    )
    strategy: Literal["replicate", "full_shard", "hybrid_shard"] = knob(
        "replicate", "How parameters lie over processes; may change between attempts."
    )
    shard_teacher: bool = knob(True, "Stage2: the frozen teacher lies in parts where the student does.")
    optimizer: Optimizer = knob(Optimizer(), "Optimizer and learning-rate schedule.")
    ema: Ema = knob(Ema(), "Moving average of the weights.")
    anyflow: AnyFlow | None = knob(None, "Only for objective anyflow_forward_map.")
    self_gradient_forcing: SelfGradientForcing | None = knob(None, "Only for Stage2.")


class Pass(Section):
    """One way of sampling every validation or inference case."""

    name: str = knob(
        ..., "Unique; becomes a folder name.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80
    )
    weights: Weights = knob("live", "Which weights sample.")
    mode: Literal["bidirectional", "autoregressive"] = knob("bidirectional", "Fixed by the stage.")
    solver: Literal["unipc", "flowmap", "self_forcing", "euler", "stg_euler"] = knob(
        "unipc", "Fixed by the route."
    )
    num_inference_steps: int = knob(50, "Sampling steps (per chunk when autoregressive).", "steps", ge=1)
    rollout_latent_frames: int = knob(
        0, "Latent frames to generate; if absent `data.latent_frames`.", "latent frames", ge=0
    )
    camera: Literal["recorded", "shuffled"] = knob(
        "recorded", "shuffled gives each case another case's camera."
    )


class Validation(Section):
    """Held-out cases and the passes over them; the same for every checkpoint of a run."""

    sample_count: int = knob(256, "Cases.", "clips", ge=1)
    selection_seed: int = knob(42, "Chooses the cases.", ge=0, lt=2**63)
    noise_seed: int = knob(42, "Initial noise of the cases.", ge=0, lt=2**63)
    max_relative_translation: float | None = knob(
        20.0, "As in `data`, for the cases; null: no limit.", "camera units", gt=0
    )
    max_camera_absolute: float | None = knob(
        20.0, "As in `data`, for the cases; null: no limit.", "camera units", gt=0
    )
    variable_rollout_by_source: bool = knob(
        False,
        "Causal stages: each case is as long as its source allows, at most `rollout_latent_frames` of its passes.",
    )
    min_rollout_latent_frames: int = knob(
        21,
        "Shortest case with variable_rollout_by_source; a shorter source is an error.",
        "latent frames",
        ge=1,
    )
    passes: list[Pass] = knob([], "What is sampled; empty: no validation.")


class RoleSource(Section):
    """Weights one role of a distillation starts from."""

    path: str = knob(..., "Checkpoint artifact.", "path", min_length=1)
    weights: Weights = knob("ema", "Which of its weights.")
    source_step: int | None = knob(None, "Step the artifact must be of.", "steps", ge=1)


class Initialization(Section):
    """Roles of Stage2."""

    student: RoleSource | None = knob(None, "Stage1 weights.")
    teacher: RoleSource | None = knob(None, "Stage0.5 weights, frozen.")
    critic: RoleSource | None = knob(None, "Stage0.5 weights, trained.")


class Checkpoint(Section):
    """Where weights come from, and how often they are saved."""

    mode: Literal["none", "weights_only", "full_resume", "roles"] = knob(
        "none",
        "none: base weights; weights_only: a checkpoint's weights; full_resume: its whole state; roles: Stage2.",
    )
    path: str = knob("", "Checkpoint artifact to read.", "path")
    weights: Weights | list[Weights] | None = knob(
        None, "Which weights; training takes one for both or a pair, [source of live, source of EMA]."
    )
    source_step: int | None = knob(None, "Step the artifact must be of.", "steps", ge=1)
    initialization: Initialization | None = knob(None, "Roles of Stage2.")
    save_every_steps: int = knob(
        500, "Steps between published checkpoints; the granularity of the graph.", "steps", ge=1
    )
    rolling_save_every_steps: int = knob(
        100, "Steps between rolling saves inside a segment; 0: only on a signal.", "steps", ge=0
    )
    keep_rolling: int = knob(1, "Verified rolling saves kept.", ge=1)
    asynchronous: bool = knob(
        True,
        "Rolling saves are written by a thread while training goes on; takes host memory for a copy of the state.",
    )
    keep_full: int = knob(
        0,
        "Newest published checkpoints that keep their optimizer state; older ones keep only weights. 0: all keep it.",
        "checkpoints",
        ge=0,
    )
    keep_full_steps: list[int] = knob(
        [], "Steps whose published checkpoints keep their optimizer state in any case.", "steps"
    )


class Inference(Section):
    """Standalone sampling from a checkpoint."""

    source: Literal["validation"] = knob("validation", "Cases are chosen as in validation.")
    length: Literal["fixed", "camera"] = knob(
        "fixed", "fixed: the pass's rollout; camera: as long as the track (Stage2)."
    )
    horizon_rounding: Literal["documented", "covering"] = knob(
        "documented",
        "Camera length in whole chunks: documented ends inside the track and repeats the last frame, covering goes past its "
        "end and is trimmed.",
    )
    output_layout: Literal["transaction_v1", "dataset_triplet_v1"] | None = knob(
        None, "dataset_triplet_v1 also publishes by data set and clip; absent: that for camera length only."
    )
    sample_count: int = knob(0, "Cases; if absent `validation.sample_count`.", "clips", ge=0)
    preview: bool | None = knob(
        None,
        "Decode every chunk while sampling goes on, to `<output>.PASS.latents/preview/slot-NNNNNN.mp4`; takes memory for the "
        "codec beside the network. Absent: at camera length only.",
    )


class Preencode(Section):
    """Turning raw clips into stored latents."""

    generation_id: str = knob(
        ..., "Name of the latent generation.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80
    )
    latent_schema: str | None = knob(None, "Layout to write; if absent it follows from family and geometry.")
    dtype: Literal["bfloat16", "float32"] = knob("bfloat16", "Type of stored latents and prompt embeddings.")
    parts: int = knob(1, "Jobs the rows are dealt to; each makes one complete artifact.", ge=1, le=1_000_000)
    shard_max_samples: int = knob(64, "Samples per shard at most.", "clips", ge=1)
    shard_max_bytes: int = knob(2147483648, "Bytes per shard at most.", "bytes", ge=1)
    reuse: list[str] = knob(
        [], "Latent generations whose samples of equal content are copied instead of encoded again.", "path"
    )


class Runtime(Section):
    """What never changes a result."""

    output_dir: str = knob(..., "Run directory.", "path", min_length=1)
    image: str = knob("", "Container image the run is meant for; recorded.")
    require_clean_source: bool = knob(False, "Refuse to start from a modified source checkout.")
    log_every_steps: int = knob(1, "Steps between metric records.", "steps", ge=1)
    progress: bool = knob(True, "Show a progress bar.")
    hang_timeout_seconds: float = knob(
        1800.0, "End with exit code 7 if no process got on for so long; 0: never.", "seconds", ge=0
    )
    tensorboard: bool = knob(True, "Write TensorBoard event files under output_dir/tensorboard.")
