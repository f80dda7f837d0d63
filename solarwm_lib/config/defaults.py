"""Released numbers that differ per family or per route; they fill what a configuration leaves out.

Facts: wan22.md 3.3, 4.2, 4.3, 5; ltx25.md 4, 9; minimax_h3.md 0, 4.3, 11.
"""

from __future__ import annotations

from typing import Any

_LORA: dict[str, Any] = {"rank": 384, "alpha": 384.0, "dropout": 0.0, "target": "block_qkvo_ffn"}

FAMILY: dict[str, dict[str, Any]] = {
    "wan22_ti2v_5b": {"model": {"timestep_shift": 5.0}, "data": {"fps": 16.0}},
    "wan22_i2v_a14b": {"model": {"timestep_shift": 3.0}, "data": {"fps": 16.0}},
    "ltx25_video": {
        "model": {"timestep_shift": 1.0, "adapter": _LORA, "ltx25": {}},
        "data": {"fps": 24.0, "random_start": False},
    },
    "minimax_h3": {
        "model": {
            "timestep_shift": 12.0,
            "camera_translation_transform": "logd4",
            "adapter": _LORA,
            "causal": {"chunk_latent_frames": 5, "local_attention_latent_frames": 30},
            "minimax_h3": {},
        },
        "data": {"encoding": "preencoded", "fps": 24.0, "random_start": False},
    },
}

_STAGE2_OPTIMIZER: dict[str, Any] = {
    "learning_rate": 2e-6,
    "betas": [0.0, 0.999],
    "weight_decay": 0.0,
    "gradient_clip": 10.0,
    "warmup_steps": 0,
    "min_learning_rate_ratio": 1.0,
}
_STAGE2: dict[str, Any] = {
    "max_steps": 4000,
    "timestep_mode": "per_block",
    "image_condition_dropout": 0.0,
    "optimizer": _STAGE2_OPTIMIZER,
    "ema": {"decay": 0.99, "start_step": 39},
    "self_gradient_forcing": {},
}

ROUTE: dict[str, dict[str, Any]] = {
    "wan22_ti2v_5b:stage1:teacher_forcing:flow_matching": {
        "train": {"max_steps": 20000, "timestep_mode": "per_block", "optimizer": {"warmup_steps": 500}}
    },
    "wan22_ti2v_5b:stage1:teacher_forcing:anyflow_forward_map:v1_5": {
        "train": {
            "max_steps": 20000,
            "timestep_mode": "per_block",
            "optimizer": {"warmup_steps": 500},
            "ema": {"decay": 0.999, "warmup_steps": 1000},
            "anyflow": {},
        }
    },
    "wan22_ti2v_5b:stage2:self_gradient_forcing:flow_matching": {
        "model": {"causal": {"local_attention_latent_frames": 18}},
        "train": _STAGE2,
        "checkpoint": {"mode": "roles"},
    },
    "ltx25_video:stage0p5:bidirectional:native_rectified_flow": {
        "train": {
            "timestep_mode": "shifted_logit_normal",
            "image_condition_dropout": 0.0,
            "activation_checkpointing": True,
            "optimizer": {"learning_rate": 1e-4, "warmup_steps": 500},
            "ema": {"decay": 0.999},
        }
    },
    "minimax_h3:stage0p5:bidirectional:flow_matching": {
        "train": {
            "image_condition_dropout": 0.0,
            "activation_checkpointing": True,
            "optimizer": {"learning_rate": 1e-4, "warmup_steps": 500},
            "ema": {"decay": 0.9999},
        }
    },
    "minimax_h3:stage1:teacher_forcing:anyflow_forward_map:v1_5": {
        "model": {"minimax_h3": {"target_latent_frames": 45}},
        "train": {
            "image_condition_dropout": 0.0,
            "activation_checkpointing": True,
            "timestep_mode": "per_block",
            "optimizer": {"learning_rate": 3e-5, "warmup_steps": 1000},
            "ema": {"decay": 0.999},
            "anyflow": {"guidance_scale": 1.0},
        },
    },
    "minimax_h3:stage2:self_gradient_forcing:flow_matching": {
        "train": {
            **_STAGE2,
            "activation_checkpointing": True,
            "self_gradient_forcing": {"rollout_latent_frames": 50},
        },
        "checkpoint": {"mode": "roles"},
    },
}

# Released spellings of one concept (operations.md 3.7.2) and what it is called here.
FORMER_NAMES: dict[str, str] = {
    "model.name": "model.architecture",
    "model.checkpoint_path": "model.base_path",
    "model.assets": "model.base_path",
    "model.num_frame_per_block": "model.causal.chunk_latent_frames",
    "model.num_frames_per_block": "model.causal.chunk_latent_frames",
    "model.max_prior_clean_chunks": "model.causal.max_prior_clean_chunks",
    "model.local_attn_size": "model.causal.local_attention_latent_frames",
    "model.sink_size": "model.causal.sink_latent_frames",
    "model.adapter_checkpoint_path": "checkpoint.path",
    "data.input_mode": "data.encoding",
    "data.index": "data.train_index",
    "data.index_root": "data.root",
    "data.encoded_latents": "data.latent_frames",
    "data.max_rel_translation": "data.max_relative_translation",
    "data.max_camera_abs": "data.max_camera_absolute",
    "data.max_camera_absolute_value": "data.max_camera_absolute",
    "train.grad_accum": "train.gradient_accumulation_steps",
    "train.i2v_image_condition_dropout": "train.image_condition_dropout",
    "train.first_frame_condition_dropout": "train.image_condition_dropout",
    "train.warmup_steps": "train.optimizer.warmup_steps",
    "train.learning_rate": "train.optimizer.learning_rate",
    "train.lr": "train.optimizer.learning_rate",
    "train.fsdp": "train.strategy",
    "train.optimizer.lr": "train.optimizer.learning_rate",
    "train.optimizer.epsilon": "train.optimizer.eps",
    "train.optimizer.grad_clip": "train.optimizer.gradient_clip",
    "train.optimizer.min_lr_ratio": "train.optimizer.min_learning_rate_ratio",
    "train.ema.update_every_steps": "train.ema.update_every",
    "validation.max_rel_translation": "validation.max_relative_translation",
    "validation.max_camera_abs": "validation.max_camera_absolute",
    "checkpoint.ema": "train.ema",
    "checkpoint.resume_from": "checkpoint.path",
    "checkpoint.resume_step": "checkpoint.source_step",
    "checkpoint.weight_source": "checkpoint.weights",
    "checkpoint.roles": "checkpoint.initialization",
    "runtime.save_every": "checkpoint.save_every_steps",
    "data.preencode_schema": "data.latent_schema",
    "data.preencode_version": "data.latent_schema",
    "data.transport.kind": "data.transport.root",
    "data.gcs_prefetch_shards": "data.transport.prefetch_shards",
    "data.shuffle_buffer": "data.mixed_shards",
    "preencode.schema": "preencode.latent_schema",
    "preencode.output_root": "runtime.output_dir",
}
