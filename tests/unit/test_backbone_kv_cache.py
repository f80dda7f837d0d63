"""The cache of a rollout: ring against a plain list, and cached velocities against recomputation without a cache.

Float64 within 1e-10. RoPE and PRoPE share channels and do not commute, so under cameras a frame's place in the window
counts, not only distances: once frames have left the window, one pass over the whole clip is no reference any more. There,
the references are the visible frames alone for one layer, and per-token dense matrices over plain lists for two.
"""

import math

import pytest
import torch
from backbone_cases import backbone, cos_sin, double_precision, inputs, rigid

from solarwm_lib.backbones import attention, prope, rope
from solarwm_lib.backbones.kv_cache import LayerCache, RolloutState

EXACT = {"rtol": 0, "atol": 1e-10}
CHUNK = 2


@pytest.mark.parametrize(("window", "sink"), [(6, 0), (8, 2), (12, 4), (4, 2), (2, 0), (6, 4)])
def test_the_ring_keeps_the_sink_and_the_latest_frames_in_order(window, sink):
    state = RolloutState(torch.zeros(1, 1, 1), None, CHUNK, window, sink)
    frames, tokens = torch.arange(1.0, 21), 3
    rows = frames.repeat_interleave(tokens).view(1, -1, 1, 1)
    cameras = frames.view(1, -1, 1, 1).expand(1, -1, 4, 4)
    cache = LayerCache(rows[:, : CHUNK * tokens], rows[:, : CHUNK * tokens], CHUNK, state.capacity)
    buffer = cache.key.data_ptr()
    for start in range(0, 20, CHUNK):
        history = frames[:start]
        if start > state.capacity:
            history = torch.cat((history[:sink], history[start - (state.capacity - sink) :]))
        assert state.visible == len(history)
        key, value = cache.read(state)
        assert torch.equal(key.flatten(), history.repeat_interleave(tokens)) and torch.equal(key, -value)
        if start and len(history):
            assert torch.equal(state.w2c[0, :, 0, 0], history)
        chunk = rows[:, start * tokens : (start + CHUNK) * tokens]
        cache.write(state, chunk, -chunk)
        state.advance(cameras[:, start : start + CHUNK])
    assert cache.key.data_ptr() == buffer and cache.key.shape[1] == (window - CHUNK) * tokens


@pytest.mark.parametrize(
    ("window", "sink", "message"),
    [(5, 0, "window has 5"), (6, 1, "sink has 1"), (2, 2, "room for a sink of 2 and a chunk of 2")],
)
def test_windows_that_do_not_fit_are_refused(window, sink, message):
    with pytest.raises(ValueError, match=message):
        backbone().rollout_state(torch.zeros(1, 5, 12), chunk=CHUNK, window=window, sink=sink)


def recompute(model, case, start, window=None, sink=0, r=None):
    """The chunk at `start` after the clean latents before it, from the latents alone; positions count from the first frame."""
    stop = start + CHUNK
    zeros = torch.zeros_like(case["timesteps"][:, :start])
    return model.window_velocity(
        case["clean"][:, :start],
        case["latents"][:, start:stop],
        zeros,
        case["timesteps"][:, start:stop],
        case["prompt_embeds"],
        None if case["w2c"] is None else case["w2c"][:, :stop],
        case["intrinsics"],
        chunk=CHUNK,
        window=window,
        sink=sink,
        r=r,
        rebase=False,
    )


def rollout_case(frames, dtype=torch.float64):
    case = rigid(inputs(frames=frames, dtype=dtype))
    generator = torch.Generator().manual_seed(7)
    return case | {"clean": torch.randn(case["latents"].shape, generator=generator, dtype=dtype)}


def camera_of(case, start):
    return None if case["w2c"] is None else case["w2c"][:, start : start + CHUNK]


def commit(model, state, case, start):
    clean = case["clean"][:, start : start + CHUNK]
    model.chunk_velocity(
        state, clean, torch.zeros(clean.shape[:2], dtype=clean.dtype), camera_of(case, start), commit=True
    )


@pytest.mark.parametrize(("frames", "transform"), [(6, "linear"), (6, "logd4"), (16, "no camera")])
def test_the_cached_rollout_equals_recomputation_under_the_same_window(frames, transform):
    """Through a window of three chunks, two denoising steps each, two layers deep; eight chunks where distances suffice."""
    window = 6
    model = backbone("logd4" if transform == "logd4" else "linear").double().eval()
    case = rollout_case(frames)
    if transform == "no camera":
        case |= {"w2c": None, "intrinsics": None}
    state = model.rollout_state(case["prompt_embeds"], case["intrinsics"], chunk=CHUNK, window=window)
    with double_precision(), torch.no_grad():
        for start in range(0, frames, CHUNK):
            assert state.frames == start
            chunk, times = (case[name][:, start : start + CHUNK] for name in ("latents", "timesteps"))
            for scale in (1.0, 0.5):
                expected = recompute(
                    model,
                    case | {"latents": scale * case["latents"], "timesteps": scale * case["timesteps"]},
                    start,
                    window,
                )
                found = model.chunk_velocity(state, scale * chunk, scale * times, camera_of(case, start))
                torch.testing.assert_close(found, expected, **EXACT)
            commit(model, state, case, start)


class PlainAttention:
    """One layer's cached self-attention as it reads in the specification: lists, a dense matrix per token, a softmax."""

    def __init__(self, case, window, sink):
        self.case, self.window, self.sink = case, window, sink
        self.keys, self.values = [], []  # raw, per committed frame
        self.start = 0
        self.keep = False

    def projections(self, frames, width):
        """P per token `[B,L,D,D]`: lift(K_n) V on every four channels."""
        lifted = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1)
        lifted[:, 0, 0], lifted[:, 1, 1] = self.case["intrinsics"][:, 0, 0], self.case["intrinsics"][:, 1, 1]
        small = lifted[:, None] @ self.case["w2c"][:, frames]
        return torch.kron(torch.eye(width // 4, dtype=torch.float64), small).repeat_interleave(6, dim=1)

    def rotate(self, x, positions):
        cos, sin = cos_sin(rope.frame_positions(positions, 2, 3), x.shape[-1])
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        return x * cos + turned * sin

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        query, key, value = (
            x.unflatten(2, (attn.heads, -1))
            for x in (
                attn.norm_q(attn.to_q(hidden_states)),
                attn.norm_k(attn.to_k(hidden_states)),
                attn.to_v(hidden_states),
            )
        )
        own = list(range(self.start, self.start + CHUNK))
        room = self.window - self.sink
        past = [f for f in range(self.start) if f < self.sink or f >= own[-1] + 1 - room]
        if self.start + CHUNK <= self.window:
            past = list(range(self.start))
        frames = past + own
        keys = torch.cat([*(self.keys[f] for f in past), key], dim=1)
        values = torch.cat([*(self.values[f] for f in past), value], dim=1)
        if self.keep:
            self.keys += key.split(6, dim=1)
            self.values += value.split(6, dim=1)
        query = self.rotate(query, range(len(past), len(frames)))
        keys = self.rotate(keys, range(len(frames)))
        matrix, inverse = self.projections(own, 24), torch.linalg.inv(self.projections(frames, 24))
        query = torch.einsum("blji,blnj->blni", matrix, query)
        keys, values = (torch.einsum("blij,blnj->blni", inverse, x) for x in (keys, values))
        weights = torch.softmax(torch.einsum("blnd,bmnd->bnlm", query, keys) / math.sqrt(24), dim=-1)
        output = torch.einsum("blij,blnj->blni", matrix, torch.einsum("bnlm,bmnd->blnd", weights, values))
        return attn.to_out[0](output.flatten(2))


@pytest.mark.parametrize(("window", "sink", "chunks"), [(6, 0, 20), (8, 2, 8)])
def test_two_layers_with_cameras_equal_plain_lists_far_beyond_the_window(window, sink, chunks):
    frames = chunks * CHUNK
    model, reference = (backbone().double().eval() for _ in range(2))
    case = rollout_case(frames)
    layers = [PlainAttention(case, window, sink) for _ in reference.transformer.blocks]
    for block, layer in zip(reference.transformer.blocks, layers, strict=True):
        block.attn1.set_processor(layer)
    state = model.rollout_state(
        case["prompt_embeds"], case["intrinsics"], chunk=CHUNK, window=window, sink=sink
    )

    def plain(latents, times, start, keep):
        for layer in layers:
            layer.start, layer.keep = start, keep
        return reference.transformer(
            latents.transpose(1, 2),
            times.repeat_interleave(6, dim=1),
            case["prompt_embeds"],
            return_dict=False,
        )[0].transpose(1, 2)

    with double_precision(), torch.no_grad():
        for start in range(0, frames, CHUNK):
            part = slice(start, start + CHUNK)
            clean, noisy, times = (case[name][:, part] for name in ("clean", "latents", "timesteps"))
            for scale in (1.0, 0.5):
                found = model.chunk_velocity(state, scale * noisy, scale * times, camera_of(case, start))
                torch.testing.assert_close(found, plain(scale * noisy, scale * times, start, False), **EXACT)
            plain(clean, 0 * times, start, True)
            commit(model, state, case, start)


def test_with_a_sink_the_cache_equals_the_visible_frames_put_side_by_side():
    """One layer deep, where a frame's keys depend on that frame alone, the visible frames are a clip of their own."""
    frames, window, sink = 14, 8, 2
    model = backbone(layers=1).double().eval()
    case = rollout_case(frames)
    state = model.rollout_state(
        case["prompt_embeds"], case["intrinsics"], chunk=CHUNK, window=window, sink=sink
    )
    with double_precision(), torch.no_grad():
        for start in range(0, frames, CHUNK):
            recent = max(sink, start - (window - CHUNK - sink)) if start > sink else start
            kept = [*range(min(sink, start)), *range(recent, start), *range(start, start + CHUNK)]
            small = {name: case[name][:, kept] for name in ("clean", "latents", "timesteps", "w2c")}
            expected = recompute(model, case | small, len(kept) - CHUNK)
            found = model.chunk_velocity(
                state,
                case["latents"][:, start : start + CHUNK],
                case["timesteps"][:, start : start + CHUNK],
                camera_of(case, start),
            )
            torch.testing.assert_close(found, expected, **EXACT)
            commit(model, state, case, start)


def test_a_flow_map_model_takes_its_second_time_in_a_rollout():
    model = backbone(anyflow=True).double().eval()
    with torch.no_grad():
        for parameter in model.transformer.condition_embedder.delta_embedder.parameters():
            parameter.add_(0.3)
    case = rollout_case(4)
    state = model.rollout_state(case["prompt_embeds"], case["intrinsics"], chunk=CHUNK, window=4)
    with double_precision(), torch.no_grad():
        commit(model, state, case, 0)
        r = case["timesteps"][:, CHUNK:] / 3
        found = model.chunk_velocity(
            state, case["latents"][:, CHUNK:], case["timesteps"][:, CHUNK:], camera_of(case, CHUNK), r=r
        )
        torch.testing.assert_close(found, recompute(model, case, CHUNK, r=r), **EXACT)
        assert (found - recompute(model, case, CHUNK)).abs().max() > 1e-4


def snapshot(state):
    return state.frames, [
        (cache.key.clone(), cache.value.clone()) for _, cache in sorted(state.layers.items())
    ]


def test_without_commit_nothing_is_written():
    model, case = backbone().eval(), rollout_case(4, torch.float32)
    state = model.rollout_state(case["prompt_embeds"], case["intrinsics"], chunk=CHUNK, window=4)
    commit(model, state, case, 0)
    frames, layers = snapshot(state)
    arguments = (state, case["latents"][:, CHUNK:], case["timesteps"][:, CHUNK:], camera_of(case, CHUNK))
    first = model.chunk_velocity(*arguments)
    assert torch.equal(model.chunk_velocity(*arguments), first)
    assert state.frames == frames and state.w2c.shape[1] == CHUNK
    for before, after in zip(layers, snapshot(state)[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not first.requires_grad


def test_the_window_is_placed_and_the_text_projected_once(monkeypatch):
    model, case = backbone().eval(), rollout_case(6, torch.float32)
    state = model.rollout_state(case["prompt_embeds"], case["intrinsics"], chunk=CHUNK, window=6)
    placed = []
    monkeypatch.setattr(
        LayerCache,
        "place",
        lambda self, *words, place=LayerCache.place: placed.append(1) or place(self, *words),
    )
    projected = []
    for block in model.transformer.blocks:
        block.attn2.to_k.register_forward_hook(lambda *_: projected.append(1))
    for start in range(0, 6, CHUNK):
        for _ in range(3):
            model.chunk_velocity(
                state, case["latents"][:, start : start + CHUNK], case["timesteps"][:, start : start + CHUNK],
                camera_of(case, start),
            )  # fmt: skip
        commit(model, state, case, start)
    layers = len(model.transformer.blocks)
    assert len(placed) == 3 * layers and len(projected) == layers


def test_a_commit_that_failed_half_way_can_be_repeated():
    """The ring is full, so the failed commit has already overwritten frames that the repetition still has to see."""
    model, case = backbone().eval(), rollout_case(8, torch.float32)
    states = [
        model.rollout_state(case["prompt_embeds"], case["intrinsics"], chunk=CHUNK, window=4)
        for _ in range(2)
    ]
    for start in (0, 2):
        for state in states:
            commit(model, state, case, start)

    def fail(*_):
        raise MemoryError

    hook = model.transformer.blocks[1].attn1.to_out[0].register_forward_hook(fail)
    with pytest.raises(MemoryError):
        commit(model, states[1], case, 4)
    hook.remove()
    velocities = []
    for state in states:
        commit(model, state, case, 4)
        velocities.append(
            model.chunk_velocity(state, case["latents"][:, 6:], case["timesteps"][:, 6:], camera_of(case, 6))
        )
    assert torch.equal(*velocities)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noisy_chunk": torch.zeros(2, 3, 8, 4, 6)}, "chunk of 3 latent frames in a batch of 2"),
        ({"noisy_chunk": torch.zeros(1, 2, 8, 4, 6)}, "in a batch of 1; the rollout takes 2 in a batch of 2"),
        ({"timesteps": torch.zeros(2, 3)}, "one per latent frame"),
        ({"w2c_chunk": None}, "camera missing at frame 2"),
        ({"w2c_chunk": torch.zeros(2, 3, 4, 4)}, "one camera per latent frame"),
        ({"r": torch.zeros(2, 2)}, "anyflow=True"),
        ({"noisy_chunk": torch.zeros(2, 2, 8, 4, 4)}, "chunk of 8 tokens; this rollout began with 12"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(change, message):
    model, case = backbone().eval(), rollout_case(4, torch.float32)
    state = model.rollout_state(case["prompt_embeds"], case["intrinsics"], chunk=CHUNK, window=4)
    commit(model, state, case, 0)
    words = {
        "noisy_chunk": case["latents"][:, CHUNK:],
        "timesteps": case["timesteps"][:, CHUNK:],
        "w2c_chunk": camera_of(case, CHUNK),
    }
    with pytest.raises(ValueError, match=message):
        model.chunk_velocity(state, **(words | change))
    model.chunk_velocity(state, **words)  # a refusal leaves the rollout usable


def test_a_camera_that_appears_in_the_middle_is_refused():
    model, case = backbone().eval(), rollout_case(4, torch.float32) | {"w2c": None}
    state = model.rollout_state(case["prompt_embeds"], chunk=CHUNK, window=4)
    commit(model, state, case, 0)
    with pytest.raises(ValueError, match="camera new at frame 2"):
        model.chunk_velocity(
            state,
            case["latents"][:, CHUNK:],
            case["timesteps"][:, CHUNK:],
            torch.eye(4).repeat(2, CHUNK, 1, 1),
        )


def test_cached_bfloat16_keeps_raw_keys_in_the_activations_type():
    model, case = backbone().bfloat16().eval(), rollout_case(4, torch.float32)
    state = model.rollout_state(case["prompt_embeds"].bfloat16(), case["intrinsics"], chunk=CHUNK, window=4)
    velocity = model.chunk_velocity(
        state,
        case["latents"][:, :CHUNK].bfloat16(),
        case["timesteps"][:, :CHUNK],
        camera_of(case, 0),
        commit=True,
    )
    cache = state.layers[0]
    assert velocity.dtype == cache.key.dtype == cache.value.dtype == torch.bfloat16
    assert state.w2c.dtype == torch.float32


def test_placing_keys_is_rotation_then_camera():
    case = inputs(frames=3)
    camera = prope.camera_transforms(case["w2c"], case["intrinsics"])
    key, value = torch.randn(2, 2, 18, 2, 24).unbind(0)
    rotation = backbone()._rotation(range(3), case["latents"])
    placed = attention.place_keys(key, value, rotation, camera)
    assert torch.equal(placed[0], prope.apply(attention.rope.apply(key, rotation), camera.key_value))
    assert torch.equal(placed[1], prope.apply(value, camera.key_value))
    assert attention.place_keys(key, value, rotation, None)[1] is value
