"""The learner on a CUDA device, with fixed policies too: what a CPU computes, up to bfloat16."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from shared_schemas.trajectory import Sampling
from tests.conftest import policy_server, tiny_job
from tests.trainer_backend.learner.hand_made import SIZE, make_learner, segment, tiny_tokenizer
from tests.trainer_backend.learner.test_mixture_update import CASES, MIXED, make_episodes, mixed_learner
from trainer_backend.core.collate import pack_segments
from trainer_backend.core.segments import Segment
from trainer_backend.errors import OutOfMemory
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.attention import BlockMask, OneRow, varlen_is_here, varlen_kernel
from trainer_backend.learner.checkpoints import restore_progress
from trainer_backend.learner.device import place
from trainer_backend.learner.joined import Flash
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.operators import by_kernels
from trainer_backend.learner.optimizer import OffloadedAdamW, make_adamw
from trainer_backend.learner.scoring import Scorer, cut_pieces
from trainer_backend.models import build_preset, save_model_folder
from trainer_backend.models.folder import fingerprint
from trainer_backend.parts import CreditedEpisode, Progress
from trainer_backend.run.fixed_policies import FixedPolicies

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="no CUDA device with bfloat16 here",
)
# Of a log-prob: two or three digits of bfloat16 in the logits of a small model.
ROUNDED = 0.05


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def on_gpu(tokenizer, **overrides) -> LocalLearner:
    return make_learner(tokenizer, model__device=DEVICE, **overrides)


def segments(count: int = 12) -> list[Segment]:
    """Of 9 to 119 tokens, the last five sampled."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        ids = torch.randint(5, 250, (9 + 10 * number,), generator=draw).tolist()
        made.append(segment(f"r{number}", ids[:-5], ids[-5:], [-5.5] * 5))
    return made


def episodes() -> list[CreditedEpisode]:
    return [CreditedEpisode(s.rollout_id, [s], [(-1.0) ** k]) for k, s in enumerate(segments())]


def flat_scores(learner: LocalLearner, parts: list[Segment]) -> torch.Tensor:
    return torch.tensor([value for row in learner.scorer.score(parts, SIZE) for value in row])


def gradient(learner: LocalLearner) -> torch.Tensor:
    """What the last optimizer step has left."""
    grads = [weight.grad for weight in learner.model.parameters() if weight.grad is not None]
    return torch.cat([grad.flatten().float().cpu() for grad in grads])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_products_are_bfloat16_and_weights_gradients_and_moments_float32(tokenizer):
    learner = on_gpu(tokenizer)
    learner.update(episodes(), iteration=1)
    assert learner.scorer.placement.low is torch.bfloat16
    state = learner._optimizer.state.values()
    moments = [values[name] for values in state for name in ("exp_avg", "exp_avg_sq")]
    weights = list(learner.model.parameters())
    for tensor in (*weights, *(weight.grad for weight in weights), *moments):
        assert (tensor.dtype, tensor.device.type) == (torch.float32, DEVICE)
    seen = []
    learner.model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda *all_: seen.append(all_[2].dtype)
    )
    learner.scorer.score(segments(2), SIZE)
    assert set(seen) == {torch.bfloat16}


def test_an_update_is_that_of_a_cpu(tokenizer):
    gpu, cpu = on_gpu(tokenizer), make_learner(tokenizer)
    torch.testing.assert_close(
        flat_scores(gpu, segments()), flat_scores(cpu, segments()), rtol=0, atol=ROUNDED
    )
    found, expected = (learner.update(episodes(), iteration=1) for learner in (gpu, cpu))
    assert relative(gradient(gpu), gradient(cpu)) < 0.1
    assert found["loss/policy"] == pytest.approx(expected["loss/policy"], abs=0.02)
    assert found["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=0.05)


@pytest.mark.skipif(not varlen_is_here(), reason="this torch has no varlen_attn")
@pytest.mark.parametrize("row_tokens", [128, 2048])
def test_packed_segments_are_scored_by_the_kernel_as_each_alone(tokenizer, row_tokens: int):
    learner, parts = on_gpu(tokenizer), segments()
    assert isinstance(learner.scorer.attention, OneRow)
    packed = learner.scorer.score(parts, LoopKeys(row_tokens=row_tokens, micro_batch_tokens=2048))
    for part, found in zip(parts, packed, strict=True):
        (alone,) = learner.scorer.score([part], SIZE)
        assert found == pytest.approx(alone, abs=ROUNDED)


def test_checkpointed_layers_give_the_same_gradient(tokenizer):
    kept, again = on_gpu(tokenizer), on_gpu(tokenizer, training__gradient_checkpointing=True)
    for learner in (kept, again):
        learner.update(episodes(), iteration=1)
    assert relative(gradient(again), gradient(kept)) < 0.02


def test_real_memory_that_runs_out_names_the_knobs_and_the_learner_goes_on(tokenizer):
    learner = on_gpu(tokenizer)
    hook = learner.model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda *_: torch.empty(2**50, device=DEVICE) if torch.is_grad_enabled() else None
    )
    with pytest.raises(OutOfMemory, match="the update ran out of memory") as caught:
        learner.update(episodes(), iteration=1)
    for knob in (
        "micro_batch_tokens",
        "gradient_checkpointing",
        "[lora]",
        "optimizer_offload",
        "max_running",
    ):
        assert knob in str(caught.value)
    hook.remove()
    assert learner.update(episodes(), iteration=1)["optim/steps"] == 2  # a step for each pass


@pytest.mark.parametrize("part_numbers", [OffloadedAdamW.part_numbers, 1000], ids=["whole", "in parts"])
def test_moments_in_main_memory_take_the_same_steps(tokenizer, part_numbers: int):
    kept, moved = on_gpu(tokenizer), on_gpu(tokenizer)
    settings = {"learning_rate": 0.01, "weight_decay": 0.1}
    here = make_adamw(kept.model, **settings)
    there = make_adamw(moved.model, **settings, offload=True)
    there.part_numbers = part_numbers
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        for one, other in zip(kept.model.parameters(), moved.model.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=draw).to(DEVICE)
            other.grad = one.grad.clone()
        here.step()
        there.step()
    assert {values["exp_avg"].device.type for values in there.state.values()} == {"cpu"}
    for one, other in zip(kept.model.parameters(), moved.model.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_adapters_are_trained_over_a_base_of_bfloat16_that_stays_as_it_is(tokenizer):
    lora = {"lora__rank": 4, "lora__alpha": 8}
    learner, cpu = on_gpu(tokenizer, **lora), make_learner(tokenizer, **lora)
    before = {name: weight.clone() for name, weight in learner.model.named_parameters()}
    for one in (learner, cpu):
        one.update(episodes(), iteration=1)
    for name, weight in learner.model.named_parameters():
        is_adapter = ".lora_" in name
        assert weight.dtype == (torch.float32 if is_adapter or weight.dim() == 1 else torch.bfloat16)
        assert is_adapter or torch.equal(weight, before[name])
    assert any(not torch.equal(weight, before[name]) for name, weight in learner.model.named_parameters())
    assert relative(gradient(learner), gradient(cpu)) < 0.1


@pytest.mark.parametrize("overrides", [{}, {"lora__rank": 4}], ids=["all weights", "adapters"])
def test_far_positions_are_where_they_are_on_a_cpu(tokenizer, overrides):
    """Frequencies of rotary positions that were rounded to bfloat16 would move them."""
    assert all(buffer.dtype == torch.float32 for buffer in on_gpu(tokenizer, **overrides).model.buffers())
    far = [segment("far", [5 + i % 200 for i in range(1500)], [7, 8, 9], [0.0] * 3)]
    job = {"inference__max_model_len": 2048, **overrides}
    found, expected = (flat_scores(one(tokenizer, **job), far) for one in (on_gpu, make_learner))
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDED)


def test_a_checkpoint_takes_the_optimizer_and_the_generator_back_to_the_device(tokenizer, tmp_path: Path):
    first = on_gpu(tokenizer)
    first.update(episodes(), iteration=1)
    first.save(tmp_path / "iteration_1", Progress(1, 1, 2))
    drawn = torch.rand(1, device=DEVICE)
    second = on_gpu(tokenizer)
    second.model.load_state_dict(first.model.state_dict())
    assert restore_progress(tmp_path / "iteration_1", second._optimizer) == Progress(1, 1, 2)
    assert torch.equal(torch.rand(1, device=DEVICE), drawn)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        mine, theirs = second._optimizer.state[other], first._optimizer.state[one]
        assert {name: value.device for name, value in mine.items()} == {
            name: value.device for name, value in theirs.items()
        }
        assert all(torch.equal(mine[name], theirs[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    second.update(episodes(), iteration=2)


@pytest.fixture
def served(tokenizer) -> Iterator[tuple[LocalLearner, LocalEngine]]:
    learner = on_gpu(tokenizer)
    learner.update(episodes(), iteration=1)
    engine = LocalEngine(learner.copy_to_serve(), stop_ids=[])
    engine.start()
    yield learner, engine
    engine.stop()


async def test_what_the_engine_sampled_the_learner_finds_about_as_likely(served):
    learner, engine = served
    prompt = [5 + i % 200 for i in range(100)]
    calls = (engine.generate(prompt, Sampling(seed=i, max_tokens=12), request_id=str(i)) for i in range(8))
    results = await asyncio.gather(*calls)
    parts = [segment(f"r{i}", prompt, r.token_ids, r.logprobs) for i, r in enumerate(results)]
    sampled = torch.tensor([value for result in results for value in result.logprobs])
    torch.testing.assert_close(flat_scores(learner, parts), sampled, rtol=0, atol=2 * ROUNDED)


@pytest.mark.skipif(not varlen_is_here(), reason="this torch has no varlen_attn")
@pytest.mark.parametrize(("kv_heads", "is_shared"), [(2, False), (2, True), (8, True)])
def test_grouped_heads_and_what_segments_share_score_and_learn_as_by_torch_under_a_mask(kv_heads, is_shared):
    config = Qwen3Config(
        vocab_size=300, hidden_size=128, intermediate_size=320, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=kv_heads, head_dim=64, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(DEVICE).eval()
    placement = place(DEVICE)
    if is_shared:
        rules = list(range(20, 60))
        prompts = [[*rules[: 10 + 15 * (n % 3)], 100 + n] for n in range(9)]
        parts = [segment(f"r{n}", prompt, [7, 8, 9], [-1.0] * 3) for n, prompt in enumerate(prompts)]
        by_kernel = Scorer(model, placement, OneRow(varlen_kernel, Flash()), 64, share_from=4)
    else:
        parts = segments()
        by_kernel = Scorer(model, placement, OneRow(varlen_kernel), 64, operators=by_kernels())
    by_torch = Scorer(model, placement, BlockMask(), 64)
    exact = replace(by_torch, placement=replace(placement, low=None))
    found = []
    for scorer in (by_kernel, by_torch, exact):
        model.set_attn_implementation(scorer.attention.implementation)
        model.zero_grad()
        piece, order = pack_segments(parts, row_tokens=256), slice(None)
        if is_shared:
            (piece,) = cut_pieces(parts, LoopKeys(row_tokens=400, micro_batch_tokens=400), scorer)[1]
            order = torch.argsort(piece.segment_N, stable=True)
        logprobs_N = scorer.logprobs(piece)
        logprobs_N.sum().backward()
        grads = torch.cat([weight.grad.flatten().cpu() for weight in model.parameters()])
        # rows of the packed batch follow one another in the one row
        found.append((logprobs_N.detach().cpu()[order], grads))
    (kernel_N, kernel_grad), (torch_N, torch_grad), (exact_N, exact_grad) = found
    assert relative(kernel_N, exact_N) < 1.5 * relative(torch_N, exact_N) + 1e-4
    assert relative(kernel_grad, exact_grad) < 1.5 * relative(torch_grad, exact_grad) + 1e-3


@pytest.mark.parametrize(("kind", "level"), CASES)
def test_a_mixed_step_with_a_critic_is_that_of_a_cpu(tokenizer, kind, level):
    fixed = {"objective": kind, "behaviour_weight_level": level, "train_value_head": True}
    gpu, cpu = (
        mixed_learner(tokenizer, fixed=fixed, model__device=device, algorithm__advantage="gae")
        for device in (DEVICE, "cpu")
    )
    episodes = make_episodes(cpu, MIXED, shift=0.1, values=[0.5, -0.5])
    found, expected = (learner.update(episodes, iteration=1) for learner in (gpu, cpu))
    assert relative(gradient(gpu), gradient(cpu)) < 0.15
    for name in ("mixture/fixed/weight_mean", "mixture/fixed/ratio_mean", "mixture/ess", "value/loss"):
        assert found[name] == pytest.approx(expected[name], abs=5 * ROUNDED), name


async def test_a_fixed_policy_is_rounded_once_served_next_to_the_actor_and_never_touched(
    tokenizer, tmp_path: Path
):
    model = build_preset("tiny-0.3m", tokenizer, seed=8)
    save_model_folder(tmp_path, model, tokenizer)
    learner = make_learner(tokenizer, model__device="cuda")
    with policy_server(tiny_job()) as gateway:
        fixed = FixedPolicies.of((), {"fixed": tmp_path}, learner.facts(), gateway.table)
        assert fixed.weights["fixed"].sha256 == fingerprint(model), "known again on any device"
        prompt = list(range(5, 40))
        async with gateway.serving(learner, fixed) as server:
            engine = fixed.policies["fixed"].engine
            sampling = Sampling(seed=1, max_tokens=20)
            before = await engine.generate(prompt, sampling, request_id="a")
            await server.publish(1)
            after = await engine.generate(prompt, sampling, request_id="b")
        assert (before.token_ids, before.versions) == (after.token_ids, ((0, 0),))
        assert len(fixed.verify()) == 1
    owner = make_learner(tokenizer, model__device="cuda")
    owner.model.load_state_dict({name: tensor.cuda() for name, tensor in model.state_dict().items()})
    sampled = segment("r", prompt, before.token_ids, before.logprobs)
    (found,) = owner.scorer.score([sampled], LoopKeys(row_tokens=64, micro_batch_tokens=64))
    assert list(before.logprobs) == pytest.approx(found, abs=0.05), "bfloat16 against bfloat16"
