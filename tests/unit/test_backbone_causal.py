"""Teacher forcing, windows and the second time on the Wan backbone: what each token depends on, and which paths agree."""

from copy import deepcopy

import pytest
import torch
from backbone_cases import ARCHITECTURE, backbone, double_precision, inputs, model_section, rigid
from safetensors.torch import load_file, save_file

from solarwm_lib.backbones import attention, prope, second_time
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.runtime.errors import ArtifactError

EXACT = {"rtol": 0, "atol": 1e-10}
LAYOUT = {"chunk": 2, "max_prior_clean_chunks": 2}


def clip(frames=8, dtype=torch.float64):
    """Inputs of a teacher-forced forward: clean and noisy latents, orthogonal cameras."""
    case = rigid(inputs(frames=frames, dtype=dtype))
    noisy = case.pop("latents")
    generator = torch.Generator().manual_seed(5)
    return case | {"clean": torch.randn(noisy.shape, generator=generator, dtype=dtype), "noisy": noisy}


def exact(model):
    return model.double().eval()


def window_of(case, start, stop, first=0):
    """Arguments of `window_velocity` for the frames start..stop after the clean frames first..start."""
    return {
        "history": case["clean"][:, first:start],
        "noisy": case["noisy"][:, start:stop],
        "history_timesteps": torch.zeros_like(case["timesteps"][:, first:start]),
        "timesteps": case["timesteps"][:, start:stop],
        "prompt_embeds": case["prompt_embeds"],
        "w2c": case["w2c"][:, first:stop],
        "intrinsics": case["intrinsics"],
        "chunk": 2,
    }


def test_a_noisy_chunk_depends_on_itself_and_its_prior_clean_chunks_alone():
    """The window of one layer; deeper layers reach further back through the clean half, never forward and never to a copy."""
    model, case = backbone(layers=1).eval(), clip(dtype=torch.float32)

    def changes(half, chunk):
        """Chunks of the output that move when one chunk of `half` moves."""
        other = case | {half: case[half].clone()}
        other[half][:, 2 * chunk : 2 * chunk + 2] += 1
        with torch.no_grad():
            a, b = (model.teacher_forced_velocity(**c, **LAYOUT) for c in (case, other))
        return {i for i in range(4) if not torch.equal(a[:, 2 * i : 2 * i + 2], b[:, 2 * i : 2 * i + 2])}

    assert [changes("noisy", chunk) for chunk in range(4)] == [{0}, {1}, {2}, {3}]
    assert [changes("clean", chunk) for chunk in range(4)] == [{1, 2}, {2, 3}, {3}, set()]


def test_teacher_forcing_equals_dense_masked_attention(monkeypatch):
    """The same forward and backward with the plan's dense mask in every layer."""

    def dense(query, key, value, plan, backend=None):
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        mask = plan.mask(query.shape[1])
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)

    model, case = exact(backbone()), clip(6)
    outputs, gradients = [], []
    with double_precision():
        for executor in (attention.attend, dense):
            monkeypatch.setattr(attention, "attend", executor)
            model.zero_grad()
            outputs.append(model.teacher_forced_velocity(**case, **LAYOUT))
            outputs[-1].square().sum().backward()
            gradients.append([parameter.grad for _, parameter in model.trainable()])
    torch.testing.assert_close(*outputs, **EXACT)
    for mine, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, wanted, **EXACT)


def test_each_noisy_chunk_equals_the_cache_free_window_over_the_whole_prefix():
    model, case = exact(backbone()), clip(6)
    with double_precision(), torch.no_grad():
        replay = model.teacher_forced_velocity(**case, **LAYOUT)
        for start in (0, 2, 4):
            found = model.window_velocity(**window_of(case, start, start + 2), rebase=False)
            torch.testing.assert_close(found, replay[:, start : start + 2], **EXACT)


@pytest.mark.parametrize("camera", [True, False])
def test_replay_equals_the_cached_rollout_where_window_and_prefix_agree(camera):
    """Window of three chunks. Under cameras the fourth chunk stands elsewhere in the window than in the clip."""
    model, case = exact(backbone()), clip(8)
    if not camera:
        case |= {"w2c": None, "intrinsics": None}
    state = model.rollout_state(case["prompt_embeds"], case["intrinsics"], chunk=2, window=6)
    with double_precision(), torch.no_grad():
        replay = model.teacher_forced_velocity(**case, **LAYOUT)
        for start in range(0, 8, 2):
            part = slice(start, start + 2)
            w2c = case["w2c"][:, part] if camera else None
            times = case["timesteps"][:, part]
            found = model.chunk_velocity(state, case["noisy"][:, part], times, w2c)
            if camera and start == 6:
                assert (found - replay[:, part]).abs().max() > 1e-4
            else:
                torch.testing.assert_close(found, replay[:, part], **EXACT)
            model.chunk_velocity(state, case["clean"][:, part], 0 * times, w2c, commit=True)


@pytest.mark.parametrize(("transform", "invariant"), [("linear", True), ("logd4", False)])
def test_a_common_rigid_motion_of_all_cameras_changes_nothing_under_linear(transform, invariant):
    model, case = exact(backbone(transform)), clip(6)
    moved = case | {"w2c": case["w2c"] @ prope.invert_rigid(case["w2c"][:, 3:4])}
    with double_precision(), torch.no_grad():
        pairs = [
            [model.velocity(c["noisy"], c["timesteps"], c["prompt_embeds"], c["w2c"], c["intrinsics"]) for c in (case, moved)],
            [model.teacher_forced_velocity(**c, **LAYOUT) for c in (case, moved)],
            [model.window_velocity(**window_of(c, 4, 6), rebase=False) for c in (case, moved)],
        ]  # fmt: skip
        rollouts = []
        for c in (case, moved):
            state = model.rollout_state(c["prompt_embeds"], c["intrinsics"], chunk=2, window=4)
            for start in (0, 2):
                part = slice(start, start + 2)
                model.chunk_velocity(
                    state, c["clean"][:, part], 0 * c["timesteps"][:, part], c["w2c"][:, part], commit=True
                )
            rollouts.append(
                model.chunk_velocity(state, c["noisy"][:, 4:], c["timesteps"][:, 4:], c["w2c"][:, 4:])
            )
        for a, b in [*pairs, rollouts]:
            assert torch.allclose(a, b, **EXACT) == invariant
        rebased = [model.window_velocity(**window_of(c, 4, 6, 2)) for c in (case, moved)]
        torch.testing.assert_close(
            *rebased, **EXACT
        )  # windows are relative to themselves, whatever the transform


def test_rebasing_makes_the_first_camera_the_identity():
    w2c = clip(4)["w2c"]
    rebased = prope.rebase(w2c[:, 1:])
    assert torch.equal(rebased[:, 0], torch.eye(4, dtype=torch.float64).expand(2, 4, 4))
    torch.testing.assert_close(rebased @ w2c[:, 1:2], w2c[:, 1:], **EXACT)


def test_clean_times_reach_the_clean_half():
    model, case = backbone(anyflow=True).eval(), clip(dtype=torch.float32)
    perturb(model)
    with torch.no_grad():
        base = model.teacher_forced_velocity(**case, **LAYOUT)
        noised = torch.full_like(case["timesteps"], 100.0)
        by_time = model.teacher_forced_velocity(**case, **LAYOUT, clean_timesteps=noised)
        by_r = model.teacher_forced_velocity(**case, **LAYOUT, clean_r=noised)
        zeros = torch.zeros_like(noised)
        explicit = model.teacher_forced_velocity(
            **case, **LAYOUT, clean_timesteps=zeros, clean_r=zeros, r=case["timesteps"]
        )
    assert torch.equal(base, explicit)
    for other in (by_time, by_r):  # the first chunk has no clean context
        assert torch.equal(base[:, :2], other[:, :2]) and not torch.allclose(base[:, 2:], other[:, 2:])


def perturb(model):
    """Move the second time MLP off its copy, as training does."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.transformer.condition_embedder.delta_embedder.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_r_equal_t_an_untrained_second_time_is_the_flow_matching_model_to_the_bit(dtype):
    plain, flow_map, case = backbone().to(dtype), backbone(anyflow=True).to(dtype), inputs(frames=4)
    case |= {name: case[name].to(dtype) for name in ("latents", "prompt_embeds")}
    with torch.no_grad():
        expected = plain.velocity(**case)
        assert torch.equal(flow_map.velocity(**case, r=case["timesteps"]), expected)
        assert torch.equal(flow_map.velocity(**case), expected)
        assert not torch.equal(flow_map.velocity(**case, r=case["timesteps"] / 2), expected)


def test_the_second_time_is_a_gated_sum_of_embeddings():
    model, case = backbone(anyflow=True), inputs(frames=2)
    perturb(model)
    embedder = model.transformer.condition_embedder
    t, r = torch.tensor([900.0, 300.0]), torch.tensor([100.0, 300.0])
    waves = [embedder.timesteps_proj(x) for x in (t, r)]
    expected = 0.75 * embedder.time_embedder(waves[0]) + 0.25 * embedder.delta_embedder(waves[1])
    seen = []
    embedder.register_forward_hook(lambda module, arguments, output: seen.append(output))
    times = t.expand(2, 2)
    model.velocity(case["latents"], times, case["prompt_embeds"], r=r.expand(2, 2))
    time, projection = seen[0][:2]
    torch.testing.assert_close(time, expected.repeat_interleave(6, 0).expand(2, -1, -1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(projection, embedder.time_proj(embedder.act_fn(time)))


def test_only_the_four_tensors_are_new_and_they_train():
    plain, flow_map = backbone(), backbone(anyflow=True)
    names = {name for name, _ in flow_map.trainable()}
    assert (
        names - {name for name, _ in plain.trainable()} == second_time.TENSORS
        and len(second_time.TENSORS) == 4
    )
    case = inputs(frames=2)
    flow_map.velocity(**case, r=case["timesteps"] / 2).square().sum().backward()
    assert all(dict(flow_map.trainable())[name].grad.abs().max() > 0 for name in second_time.TENSORS)


def test_a_copy_of_the_backbone_has_its_own_second_time():
    model, case = backbone(anyflow=True), inputs(frames=2)
    copy = deepcopy(model)
    perturb(copy)
    r = case["timesteps"] / 2
    with torch.no_grad():
        assert not torch.equal(copy.velocity(**case, r=r), model.velocity(**case, r=r))
        second_time.copy_time(copy.transformer)
        assert torch.equal(copy.velocity(**case, r=r), model.velocity(**case, r=r))
        perturb(copy)
        again = Wan22(
            copy.transformer, copy.geometry, anyflow=True
        )  # wrapping once more keeps what was learned
        assert torch.equal(again.velocity(**case, r=r), copy.velocity(**case, r=r))


def test_r_needs_a_second_time():
    case = inputs(frames=2)
    with pytest.raises(ValueError, match="anyflow=True"):
        backbone().velocity(**case, r=case["timesteps"])
    with pytest.raises(ValueError, match=r"r \(2,\); expected one per latent frame \(2, 2\)"):
        backbone(anyflow=True).velocity(**case, r=torch.zeros(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, c: m.teacher_forced_velocity(**c, chunk=3, max_prior_clean_chunks=5), "whole chunks of 3"),
        (lambda m, c: m.teacher_forced_velocity(**(c | {"clean": c["clean"][:, :2]}), **LAYOUT), "expected one shape"),
        (lambda m, c: m.window_velocity(**window_of(c, 3, 4)), "history has 3 latent frames"),
        (lambda m, c: m.window_velocity(**(window_of(c, 2, 4) | {"w2c": c["w2c"][:, 2:4]})), "one camera per latent frame"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(backbone(), clip(4, torch.float32))


@pytest.fixture()
def flow_map_folder(tmp_path):
    model = backbone(anyflow=True)
    perturb(model)
    model.transformer.save_pretrained(tmp_path / "transformer")
    return tmp_path, model.transformer.state_dict()


def test_a_flow_map_model_survives_the_folder(flow_map_folder):
    folder, expected = flow_map_folder
    loaded = Wan22.from_pretrained(folder, ARCHITECTURE, model_section(), anyflow=True)
    assert loaded.anyflow and loaded.transformer.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.transformer.state_dict().items())


def test_a_flow_matching_folder_gives_a_copied_second_time(tmp_path):
    backbone().transformer.save_pretrained(tmp_path / "transformer")
    state = Wan22.from_pretrained(
        tmp_path, ARCHITECTURE, model_section(), anyflow=True
    ).transformer.state_dict()
    for name in second_time.TENSORS:
        assert torch.equal(state[name], state[name.replace("delta_embedder", "time_embedder")])


def test_a_second_time_is_neither_dropped_nor_halved_in_silence(flow_map_folder):
    folder, _ = flow_map_folder
    with pytest.raises(ArtifactError, match=r"4 unexpected keys: condition_embedder\.delta_embedder"):
        Wan22.from_pretrained(folder, ARCHITECTURE, model_section())
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors[min(second_time.TENSORS)]
    save_file(tensors, file)
    with pytest.raises(ArtifactError, match="3 unexpected keys"):
        Wan22.from_pretrained(folder, ARCHITECTURE, model_section(), anyflow=True)
