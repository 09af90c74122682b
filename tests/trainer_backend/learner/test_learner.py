"""The learner on a real tiny model: what an update does, what it refuses, and what a checkpoint holds."""

import json
import math
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tests.trainer_backend.learner.hand_made import (
    SIZE,
    are_equal,
    copy_tensors,
    make_config,
    make_episodes,
    make_learner,
    segment,
    tiny_tokenizer,
)
from trainer_backend.errors import (
    CheckpointError,
    ModelFolderError,
    NonFiniteLoss,
    SamplerMismatch,
)
from trainer_backend.learner.checkpoints import _put_in_place
from trainer_backend.learner.device import Placement
from trainer_backend.learner.learner import LocalLearner, frozen_scorer, select_segments, uncertain_segments
from trainer_backend.learner.policy_terms import DRIFT
from trainer_backend.learner.ranks import Ranks
from trainer_backend.learner.shares import checksum_model
from trainer_backend.learner.stepping import Scored, in_steps
from trainer_backend.learner.warmup import warm_up
from trainer_backend.models import build_preset, train_tokenizer
from trainer_backend.parts import CreditedEpisode, Progress


def sum_logprobs(learner: LocalLearner, episode: CreditedEpisode) -> float:
    return sum(learner.scorer.score(episode.segments, SIZE)[0])


def test_what_went_well_becomes_likelier_and_what_went_badly_less_so(tokenizer):
    learner = make_learner(tokenizer, training__entropy_coef=0.0)
    good, bad = make_episodes(learner, [1.0, -1.0])
    before = sum_logprobs(learner, good), sum_logprobs(learner, bad)
    metrics = learner.update([good, bad], iteration=1)
    assert sum_logprobs(learner, good) > before[0]
    assert sum_logprobs(learner, bad) < before[1]
    assert metrics["optim/steps"] == 2  # two passes of one step
    assert metrics["mismatch/logprob_max"] < 1e-6


@pytest.mark.parametrize(
    ("low", "limit", "off", "told"),
    [
        (None, None, 0.009, None),
        (None, None, 0.02, "0.01"),
        (None, 0.05, 0.02, None),
        (None, 0.05, -0.06, "0.05"),
        (torch.bfloat16, None, 0.5, None),
        (torch.bfloat16, None, -1.5, "1"),
    ],
)
def test_a_token_that_was_sampled_further_from_what_the_learner_finds_than_its_precision_allows_is_told(
    tokenizer, low, limit, off, told
):
    learner = make_learner(tokenizer, training__mismatch_limit=limit)
    learner.scorer = replace(learner.scorer, placement=Placement(torch.device("cpu"), low))
    good, bad = make_episodes(learner, [1.0, -1.0])
    (part,) = bad.segments
    episodes = [good, replace(bad, segments=[replace(part, logprobs=part.logprobs + np.array([0.0, off]))])]
    if told is None:
        found = learner.update(episodes, iteration=1)
        assert found["mismatch/logprob_max"] == pytest.approx(abs(off), abs=1e-5 if low is None else 0.1)
        return
    gap = f"{abs(off):.3g}" if low is None else ".*"
    message = (
        rf"^rollout r1, turn 1, token 4: token 31 was sampled with log-prob -.*: {gap} nats apart, "
        rf"more than {told} \(training\.mismatch_limit; beyond it: 1 of 4 tokens\)"
    )
    with pytest.raises(SamplerMismatch, match=message):
        learner.update(episodes, iteration=1)


def test_a_nan_stops_the_update_before_the_weights_and_names_the_token(tokenizer):
    learner = make_learner(tokenizer)
    episodes = make_episodes(learner, [1.0, -1.0])
    with torch.no_grad():
        learner.model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    before = learner.model.lm_head.weight.detach().clone()
    with pytest.raises(NonFiniteLoss, match=r"r0.*turn 1.*token 3.*nan"):
        learner.update(episodes, iteration=1)
    assert torch.equal(learner.model.lm_head.weight, before)


def test_an_infinite_gradient_is_not_stepped(tokenizer):
    learner = make_learner(tokenizer)
    episodes = make_episodes(learner, [1e38, -1e38])
    before = copy_tensors(learner)
    with pytest.raises(NonFiniteLoss) as caught:
        learner.update(episodes, iteration=1)
    assert caught.value.steps_taken == 0
    assert are_equal(learner.model.state_dict(), before)


@pytest.mark.parametrize(
    ("units", "batch", "steps"),
    [
        ([1] * 10, 4, [5, 5]),
        ([1] * 9, 3, [3, 3, 3]),
        ([1] * 3, 8, [3]),
        ([10] + [1] * 10, 4, [10, 3, 3, 2, 2]),
        ([1] * 10 + [10], 4, [4, 4, 12]),
    ],
)
def test_steps_are_about_equal_whatever_is_left_over_and_however_large_an_episode_is(
    units: list[int], batch: int, steps: list[int]
):
    one = Scored(segment("r", [1], [2], [0.0]), [0.0], [1.0])
    assert [len(step) for step in in_steps([[one] * size for size in units], batch)] == steps


def test_a_full_disk_leaves_the_earlier_checkpoint_whole_and_no_half_one(tokenizer, tmp_path: Path):
    learner = make_learner(tokenizer)
    folder = tmp_path / "iteration_1"
    for updates in (1, 2):  # the second replaces the first
        learner.save(folder, Progress(iteration=1, updates=updates))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a write past it fails, as on a full disk
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            learner.save(folder, Progress(iteration=9))
        with pytest.raises(CheckpointError, match="could not be written"):
            learner.publish(tmp_path / "version_1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads((folder / "state.json").read_text())["updates"] == 2
    assert load_file(folder / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_1"]


def test_an_optimizer_of_another_model_is_refused(tokenizer, tmp_path: Path):
    small, large = make_learner(tokenizer), make_learner(tokenizer)
    small.update(make_episodes(small, [1.0, -1.0]), iteration=1)
    small.save(tmp_path / "iteration_1", Progress(iteration=1))
    large.model = build_preset("tiny-0.8m", tokenizer)
    large.save(tmp_path / "iteration_2", Progress(iteration=2))
    optimizer = "training_state/optimizer.safetensors"
    (tmp_path / "iteration_1" / optimizer).replace(tmp_path / "iteration_2" / optimizer)
    with pytest.raises(CheckpointError, match="another model"):
        LocalLearner.resumed(make_config(model__preset="tiny-0.8m"), tmp_path / "iteration_2")


def test_models_that_cannot_be_scored_exactly_are_refused(tokenizer):
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with pytest.raises(ModelFolderError, match="no `model` and `lm_head`"):
        LocalLearner(
            make_config(),
            GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=300, **size)),
            tokenizer,
        )


def warm(learner: LocalLearner, tell=lambda done, total: None) -> None:
    config, parts = learner.config, [segment("r", [5, 6], [7, 8], [0.0, 0.0])]
    warm_up(learner.scorer, parts, config.warmup, config.training, seed=1, tell=tell)


def test_a_warm_up_whose_gradient_is_not_finite_says_so_and_takes_no_step(tokenizer):
    learner = make_learner(tokenizer)
    # The loss stays finite, its gradient does not.
    learner.model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    before = copy_tensors(learner)
    with pytest.raises(NonFiniteLoss, match="norm of the gradient"):
        warm(learner)
    assert are_equal(learner.model.state_dict(), before)


def test_what_tell_raises_ends_the_warm_up_after_one_step(tokenizer):
    class Enough(Exception):
        pass

    told = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        if done:
            raise Enough

    learner = make_learner(tokenizer)
    with pytest.raises(Enough):
        warm(learner, tell)
    epochs = learner.config.warmup.epochs  # of one step each
    assert told == [(0, epochs), (1, epochs)]


def test_what_cannot_be_put_in_place_leaves_what_was_there(tmp_path: Path):
    folder = tmp_path / "iteration_1"
    folder.mkdir()
    (folder / "state.json").write_text("old")
    with pytest.raises(OSError):
        _put_in_place(tmp_path / "not there", folder)
    assert (folder / "state.json").read_text() == "old"


def test_what_the_kl_term_pulls_towards_is_held_where_and_in_what_the_learner_computes(tokenizer):
    learner = make_learner(tokenizer)
    meta = replace(learner.scorer, placement=Placement(torch.device("meta"), torch.bfloat16))
    held = frozen_scorer(meta, learner.model)
    for weight in held.model.parameters():
        dtype = torch.bfloat16 if weight.dim() > 1 else torch.float32
        assert (weight.device.type, weight.dtype, weight.requires_grad) == ("meta", dtype, False)
    assert held.model.config._attn_implementation == learner.scorer.attention.implementation
    assert all(weight.requires_grad for weight in learner.model.parameters()), "it is a copy"


@pytest.mark.parametrize("lora", [{}, {"lora__rank": 4, "lora__alpha": 8}], ids=["all weights", "adapters"])
def test_policy_and_reference_are_scored_for_rewards_and_the_update_scores_nothing_again(tokenizer, lora):
    learner = make_learner(tokenizer, training__kl_reward_coef=0.1, training__learning_rate=0.01, **lora)
    episodes = make_episodes(learner, [1.0, -1.0])
    parts = {item.rollout_id: item.segments for item in episodes}
    first = learner.score(parts)
    for item in episodes:
        (own,) = learner.scorer.score(item.segments, SIZE)
        assert first[item.rollout_id].policy_T == [pytest.approx(own, abs=1e-5)]
        assert first[item.rollout_id].reference_T == [pytest.approx(own, abs=1e-5)]
    assert "loss/kl" not in learner.update(episodes, iteration=1), "the loss has no term of it"
    trained = copy_tensors(learner)
    second = learner.score(parts)
    assert are_equal(learner.model.state_dict(), trained)
    for name, scored in second.items():
        assert scored.reference_T == first[name].reference_T, "the reference is held"
        assert scored.policy_T != first[name].policy_T, "what was scored before the update is forgotten"


def test_a_resumed_run_pulls_towards_where_rl_started_as_the_run_itself_did(tokenizer, tmp_path: Path):
    learner = make_learner(tokenizer, training__kl_coef=0.1, training__learning_rate=0.01)
    learner.save(tmp_path / "iteration_0", Progress())
    learner.update(make_episodes(learner, [1.0, -1.0]), iteration=1)
    learner.save(tmp_path / "iteration_1", Progress(1, 1, 2))
    again, progress = LocalLearner.resumed(learner.config, tmp_path / "iteration_1")
    assert progress == Progress(1, 1, 2)
    episodes = make_episodes(learner, [0.5, -1.0])
    found = again.update(episodes, iteration=2)
    assert found == learner.update(episodes, iteration=2)
    assert found["loss/kl"] > 0.01
    assert are_equal(learner.weights(), again.weights())


def test_what_the_policy_was_sure_of_is_left_out_of_its_update():
    sure, unsure = math.log(0.995), math.log(0.9)
    first = [segment("a", [5], [20, 21], [sure, sure], t=0), segment("a", [6], [20, 21], [sure, unsure], t=1)]
    second = [segment("b", [5], [20, 21], [sure, sure])]
    episodes = [CreditedEpisode("a", first, [1.0, 2.0]), CreditedEpisode("b", second, [3.0])]
    numbers = uncertain_segments(episodes, 0.99)
    assert numbers == {"a": [1], "b": []}
    assert [(item.rollout_id, item.segments) for item in select_segments(episodes, numbers)] == [
        ("a", first[1:])
    ]
    assert uncertain_segments(episodes, 0.999) == {"a": [0, 1], "b": [0]}
    of_another = [replace(item, policy="teacher") for item in episodes]
    assert select_segments(of_another, uncertain_segments(of_another, 0.99)) == of_another


# One decision of two tokens, whose sampler gave them a probability of 0.999.
CERTAIN = CreditedEpisode("certain", [segment("certain", [5, 6, 9], [20, 21], [-1e-3, -1e-3])], [5.0])


def test_an_update_without_what_was_certain_is_that_of_the_rest(tokenizer):
    skipping, plain = make_learner(tokenizer, training__skip_certain_above=0.99), make_learner(tokenizer)
    rest = make_episodes(plain, [1.0, -1.0])
    metrics, of_rest = skipping.update([CERTAIN, *rest], iteration=1), plain.update(rest, iteration=1)
    assert metrics.pop("optim/certain_frac") == pytest.approx(1 / 3)
    # what is omitted counts as unmoved: the mean is over all six tokens, of which two are certain
    assert metrics.pop(DRIFT) == pytest.approx(of_rest.pop(DRIFT) * 2 / 3, rel=1e-6)
    assert metrics == of_rest
    assert are_equal(skipping.weights(), plain.weights())
    nothing = {"optim/steps": 0.0, "optim/steps_skipped": 0.0, "optim/certain_frac": 1.0}
    assert skipping.update([CERTAIN], iteration=2) == nothing


def test_log_probs_that_a_kl_in_the_reward_needed_are_those_of_what_is_left(tokenizer):
    settings = {"training__skip_certain_above": 0.99, "training__kl_coef": 0.1, "training__update_passes": 1}
    found = []
    for is_scored in (True, False):
        learner = make_learner(tokenizer, training__batch_decisions=1, **settings)
        first, second = (item.segments[0] for item in make_episodes(learner, [1.0, -1.0]))
        of_both = [
            replace(CERTAIN.segments[0], rollout_id="r1"),
            segment("r1", [5, 6, 8], [21, 31], second.logprobs, t=1),
        ]
        episodes = [CreditedEpisode("r0", [first], [1.0]), CreditedEpisode("r1", of_both, [5.0, -1.0])]
        if is_scored:
            # beside what is trained: a branch of it, say, or an episode of a flat group
            others = {"another": CERTAIN.segments}
            learner.score({item.rollout_id: item.segments for item in episodes} | others)
        calls: list[int] = []
        learner.model.model.layers[0].mlp.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        found.append((learner.update(episodes, iteration=1), len(calls)))
    (of_cache, steps), (scored_anew, passes) = found
    # float32 holds the norm of the gradient, 28, to 2e-6
    assert of_cache == pytest.approx(scored_anew, rel=1e-6, abs=1e-6)
    assert (steps, passes) == (2, 4)  # else policy and reference, a copy with its hook, score once more


def test_where_vllm_sleeps_meanwhile_an_update_leaves_no_gradient_behind(tokenizer):
    learner = make_learner(tokenizer)
    inference = learner.config.inference.model_copy(update={"sleep": True})
    learner.config = replace(learner.config, inference=inference)
    learner.update(make_episodes(learner, [1.0, -1.0]), iteration=1)
    assert all(weight.grad is None for weight in learner.model.parameters())


COUNTS = st.integers(1, 5)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), COUNTS)
def test_each_piece_counts_on_one_rank_and_all_ranks_make_as_many_passes(sizes: list[int], count: int):
    dealt = [list(Ranks(index, count).own_pieces(list(enumerate(sizes)))) for index in range(count)]
    counted = [[piece for piece, counts in of_rank if counts] for of_rank in dealt]
    assert sorted(piece for of_rank in counted for piece in of_rank) == list(enumerate(sizes))
    assert len({len(of_rank) for of_rank in dealt}) == 1
    assert Ranks(0, count).sums_by_rank(sizes) == [sum(size for _, size in of_rank) for of_rank in counted]


def test_ranks_that_have_found_other_models_would_show_it():
    tokenizer = tiny_tokenizer()
    models = [build_preset("tiny-0.3m", tokenizer, seed=seed) for seed in (3, 3, 4)]
    samples = [checksum_model(model, tokenizer) for model in models]
    assert samples[0] == samples[1] != samples[2]
    other = train_tokenizer(["another text altogether"] * 20, 300)
    assert checksum_model(models[0], other) != samples[0]
