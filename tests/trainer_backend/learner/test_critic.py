"""The critic on a real tiny model, a head of the policy or with layers of its own.

What it learns, what it leaves alone, what a checkpoint holds of it.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer_backend.learner.hand_made import are_equal, copy_tensors, make_learner, segment
from tests.trainer_backend.learner.test_optimizer import Shortage
from trainer_backend.core.critic import CriticTargets, explained_variance, firsts, make_targets
from trainer_backend.core.segments import Segment
from trainer_backend.errors import CheckpointError, NonFiniteLoss, OutOfMemory, SegmentError
from trainer_backend.job.training_table import TrainingTable
from trainer_backend.learner.device import place
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.memory import memory_needs
from trainer_backend.learner.memory_plan import memory_use
from trainer_backend.learner.ranks import ALONE
from trainer_backend.learner.scoring import Hidden
from trainer_backend.learner.shapes import model_shape
from trainer_backend.learner.value_head import ValueHead
from trainer_backend.models import load_model_folder
from trainer_backend.parts import CreditedEpisode, Progress
from trainer_backend.run.beginning import told_on_resume
from trainer_backend.rundir.checkpoint_paths import CRITIC_FILE, VALUE_HEAD_FILE

LEVELS = ["gae", "gae_token"]
TRUNK = {"training__value_trunk_gradient": True}
OWN = {"training__critic": "own", "training__entropy_coef": 0.0}
CRITICS = [pytest.param({}, id="head"), pytest.param(OWN, id="own layers")]


def make_critic(tokenizer, advantage="gae", **overrides) -> LocalLearner:
    return make_learner(tokenizer, **{"algorithm__advantage": advantage, **overrides})


def states(count: int) -> list[Segment]:
    """One decision each, of three tokens, with a prompt of its own."""
    return [segment(f"r{i}", [5, 6, 7 + i], [20, 21, 22], [-1.0] * 3) for i in range(count)]


def scored(learner: LocalLearner, parts: list[Segment]):
    return learner.values({part.rollout_id: [part] for part in parts})


def make_episodes(
    learner: LocalLearner, returns: list[float], advantage: float = 0.0
) -> list[CreditedEpisode]:
    """Episodes of one decision whose value is to become its return; the policy's advantage is given."""
    found = []
    for (name, values), part, target in zip(
        scored(learner, states(len(returns))).items(), states(len(returns)), returns, strict=True
    ):
        missed = (
            [target - v for v in values]
            if isinstance(values, list)
            else type(values)([[target - v for v in row] for row in values.rows_T])
        )
        found.append(CreditedEpisode(name, [part], [advantage], make_targets(values, missed)))
    return found


def test_an_input_whose_spread_is_rounding_alone_is_not_blown_up(tmp_path):
    # Of equal numbers, the mean of the squares and the square of the mean differ by their last bit.
    head = ValueHead(3, torch.device("cpu"), TrainingTable(), "token")
    inputs_ND = torch.tensor([[0.1, 1.0, 100.1], [0.1, 2.0, 100.1], [0.1, 3.0, 100.1]], dtype=torch.float64)
    rows: Any = SimpleNamespace(first_N=torch.ones(3, dtype=torch.bool))
    head.scored(Hidden(rows, inputs_ND))
    head.settle(ALONE)
    head.save(tmp_path, ALONE)
    assert load_file(tmp_path / VALUE_HEAD_FILE)["std"].tolist() == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("advantage", "settings"),
    [("gae", {}), ("gae_token", TRUNK), ("gae_token", {**OWN, "training__critic_batch_decisions": 8})],
    ids=["gae", "through the policy", "own layers"],
)
def test_a_critic_learns_a_simple_function_of_the_prompt(tokenizer, advantage, settings):
    learner = make_critic(tokenizer, advantage, **{"training__entropy_coef": 0.0, **settings})
    wanted = [1.0 if i % 2 else -1.0 + i / 4 for i in range(8)]
    losses = [learner.update(make_episodes(learner, wanted), iteration=1)["value/loss"] for _ in range(16)]
    found = [firsts(values)[0] for values in scored(learner, states(8)).values()]
    assert losses[-1] < 0.1 * losses[0]
    assert explained_variance(found, wanted) > 0.9


def test_the_policy_is_what_it_would_be_without_a_critic(tokenizer):
    plain = make_learner(tokenizer, training__entropy_coef=0.0)
    plain.update([CreditedEpisode(part.rollout_id, [part], [1.0]) for part in states(2)], iteration=1)
    for settings in ({}, OWN, TRUNK):
        learner = make_critic(tokenizer, **{"training__entropy_coef": 0.0, **settings})
        learner.update(make_episodes(learner, [5.0, -3.0], advantage=1.0), iteration=1)
        assert are_equal(learner.model.state_dict(), plain.model.state_dict()) == (settings is not TRUNK)


@pytest.mark.parametrize("overrides", [*CRITICS, pytest.param({"lora__rank": 4}, id="adapters")])
@pytest.mark.parametrize("advantage", LEVELS)
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(
    tokenizer, tmp_path: Path, overrides, advantage
):
    whole = make_critic(tokenizer, advantage, **overrides)
    whole.save(tmp_path / "iteration_0", Progress())
    whole.update(make_episodes(whole, [1.0, -2.0]), iteration=1)
    whole.save(tmp_path / "iteration_1", Progress(1, 1, 2))
    again, _ = LocalLearner.resumed(whole.config, tmp_path / "iteration_1")
    assert scored(again, states(4)) == scored(whole, states(4))
    assert scored(again, states(2))["r0"] != [0.0]
    for learner in (whole, again):
        learner.update(make_episodes(learner, [0.5, -1.0], advantage=1.0), iteration=2)
    assert scored(again, states(4)) == scored(whole, states(4))
    assert are_equal(whole.model.state_dict(), again.model.state_dict())


def test_a_run_that_was_interrupted_before_anything_was_scored_begins_with_the_same_inputs(
    tokenizer, tmp_path: Path
):
    whole = make_critic(tokenizer)
    whole.save(tmp_path / "iteration_0", Progress())
    again, _ = LocalLearner.resumed(whole.config, tmp_path / "iteration_0")
    for learner in (whole, again):
        learner.update(make_episodes(learner, [1.0, -2.0]), iteration=1)
    assert scored(again, states(4)) == scored(whole, states(4))
    assert told_on_resume("gae", tmp_path / "iteration_0", critic="own") is None, "no critic has learned"


def test_the_model_folder_of_a_checkpoint_is_a_plain_one_and_the_head_has_its_own_file(
    tokenizer, tmp_path: Path
):
    learner = make_critic(tokenizer)
    learner.update(make_episodes(learner, [1.0, -2.0]), iteration=1)
    learner.save(tmp_path / "iteration_1", Progress(1, 1, 2))
    model, _ = load_model_folder(tmp_path / "iteration_1")
    assert model.state_dict().keys() == make_learner(tokenizer).model.state_dict().keys()
    stored = load_file(tmp_path / "iteration_1/training_state" / VALUE_HEAD_FILE)
    assert set(stored) == {"weight", "bias", "mean", "std"} | {
        f"{name}.{part}" for name in ("weight", "bias") for part in ("step", "exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            {"algorithm__advantage": "stepwise"},
            {},
            "iteration_1 has no value head, which algorithm.advantage = 'gae' needs: a fresh one begins, all "
            "values 0",
        ),
        (
            {},
            OWN,
            "iteration_1 has no critic with layers of its own, which training.critic = 'own' needs: a fresh "
            "one begins, all values 0",
        ),
        (
            OWN,
            {},
            "the critic of iteration_1 has layers of its own and is left behind: training.critic = 'head' "
            "reads the policy's; a fresh one begins, all values 0",
        ),
        (
            {},
            {"algorithm__advantage": "stepwise"},
            "the value head of iteration_1 is left behind: algorithm.advantage = 'stepwise' needs none",
        ),
    ],
    ids=["none to head", "head to own", "own to head", "head to none"],
)
def test_a_run_that_changes_its_critic_begins_with_a_fresh_one_or_with_none_and_says_so(
    tokenizer, tmp_path: Path, before, after, told
):
    learner, folder = make_critic(tokenizer, **before), tmp_path / "iteration_1"
    if learner.config.value_level is not None:
        learner.update(make_episodes(learner, [1.0, -2.0]), iteration=1)
    learner.save(folder, Progress(1, 1, 2))
    advantage, critic = after.get("algorithm__advantage", "gae"), after.get("training__critic", "head")
    assert told_on_resume(advantage, folder, critic=critic) == told
    assert (told_on_resume("gae", folder, critic="own") is None) == (before is OWN)
    assert (told_on_resume("gae", folder) is None) == (before == {})
    again, progress = LocalLearner.resumed(make_critic(tokenizer, **after).config, folder)
    assert progress.iteration == 1
    if advantage == "gae":
        assert scored(again, states(1)) == {"r0": [0.0]}
    else:
        again.save(tmp_path / "iteration_2", Progress(2, 2, 3))
        assert not (tmp_path / "iteration_2/training_state" / VALUE_HEAD_FILE).exists()


@pytest.mark.parametrize(
    ("critic", "file"), [({}, "optimizer.safetensors"), ({}, VALUE_HEAD_FILE), (OWN, CRITIC_FILE)]
)
def test_a_broken_file_is_refused_with_its_path(tokenizer, tmp_path: Path, critic, file: str):
    learner = make_critic(tokenizer, **critic)
    scored(learner, states(1))
    learner.save(tmp_path / "iteration_1", Progress())
    (tmp_path / "iteration_1/training_state" / file).write_bytes(b"half")
    with pytest.raises(CheckpointError, match=f"iteration_1(: the checkpoint|.*{file}: the .*) cannot"):
        LocalLearner.resumed(learner.config, tmp_path / "iteration_1")


@pytest.mark.parametrize(
    ("critic", "advantage", "told"),
    [({}, 1.0, None), (OWN, 0.0, r"critic.*Lower training\.critic_learning_rate")],
    ids=["head", "own layers"],
)
def test_a_value_loss_that_is_not_finite_touches_neither_policy_nor_critic(
    tokenizer, critic, advantage: float, told: str | None
):
    learner = make_critic(tokenizer, **critic)
    episodes = make_episodes(learner, [1.0, 1.0], advantage=advantage)
    broken = [replace(episode, critic=CriticTargets([0.0], [3e38])) for episode in episodes]
    before = copy_tensors(learner)
    with pytest.raises(NonFiniteLoss, match=told):
        learner.update(broken, iteration=1)
    assert are_equal(learner.model.state_dict(), before)
    assert scored(learner, states(1)) == {"r0": [0.0]}


def test_the_head_s_rate_falls_as_the_policy_s_does(tokenizer):
    learner = make_critic(tokenizer, training__iterations=10, training__update_passes=1)
    update, rates = make_episodes(learner, [1.0, -2.0]), []
    for iteration in (1, 6):
        learner.update(update, iteration=iteration)
        rates.append([group["lr"] for group in learner._head._optimizer.param_groups])
    # linear from 1 to 0.1 of the highest: half way 0.55; a width of 96
    assert rates[0] == pytest.approx([0.5 / 96, 0.05])
    assert rates[1] == pytest.approx([0.55 * 0.5 / 96, 0.55 * 0.05])


def test_the_plan_of_memory_counts_it(tokenizer):
    learner = make_critic(tokenizer, "gae_token")
    config = learner.model.config
    plain, head, own = (model_shape(config, None, critic=critic) for critic in (None, "head", "own"))
    assert own.critic == plain.parameters + 97 and plain.critic == 0
    use = memory_use(learner.config, place("cpu"), plain)
    few, more = (memory_needs(shape, use, is_gpu=False).device for shape in (plain, head))
    # 96 weights and a bias, in float32, with a gradient and two moments
    assert {kind: more[kind] - few[kind] for kind in ("weights", "gradients", "optimizer")} == {
        "weights": 4 * 97, "gradients": 4 * 97, "optimizer": 8 * 97,
    }  # fmt: skip
    assert more["values"] == learner.config.training.micro_batch * 96 * 8
    assert not memory_use(make_learner(tokenizer).config, place("cpu"), plain).values_by_token


def test_a_step_is_the_same_however_it_is_cut_and_with_layers_computed_again(tokenizer):
    found, passes = [], []
    for tokens, checkpointed in ((4096, False), (64, False), (4096, 1)):
        learner = make_critic(
            tokenizer,
            **OWN,
            training__critic_passes=1,
            training__row_tokens=16,
            training__gradient_checkpointing=checkpointed,
        )
        given = make_episodes(learner, [1.0, -1.0] * 6)
        learner.update(given, iteration=1)  # so that the head's weights are not 0
        critic, calls = learner._critic, []
        weights = list(critic._scorer.model.parameters())
        before = [weight.clone() for weight in weights]
        learner.update(given, iteration=2)
        assert not any(map(torch.equal, weights, before)), "all its layers learn"
        episodes = make_episodes(learner, [2.0, -1.0, 0.5] * 4)
        critic._table = critic._table.model_copy(update={"micro_batch_tokens": tokens})
        for number, layer in enumerate(critic._scorer.model.model.layers):
            layer.mlp.register_forward_pre_hook(lambda *_, of=calls, number=number: of.append(number))
        loss = critic.gradient([part for item in episodes for part in item.segments], {
            item.rollout_id: item.critic for item in episodes
        })  # fmt: skip
        found.append((loss, torch.cat([weight.grad.flatten() for weight in weights])))
        passes.append((calls.count(0), calls.count(1)))
    assert (passes[0], passes[2]) == ((1, 1), (2, 1))
    (whole, gradient), *others = found
    assert gradient.norm() > 0.01
    for loss, other in others:
        assert loss == pytest.approx(whole, rel=1e-6)
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-6)


def test_while_one_warms_up_also_in_the_middle_of_a_run_the_policy_stays(tokenizer, tmp_path: Path):
    learner = make_critic(tokenizer, **OWN, training__critic_warmup=2)
    found = []
    for iteration in (50, 51, 52):
        before = copy_tensors(learner)
        metrics = learner.update(make_episodes(learner, [1.0, -2.0], advantage=1.0), iteration=iteration)
        assert metrics["value/loss"] > 0.0
        found.append((metrics["optim/steps"] > 0, not are_equal(learner.model.state_dict(), before)))
        learner.save(tmp_path / f"iteration_{iteration}", Progress(iteration, 1, 2))
        learner, _ = LocalLearner.resumed(learner.config, tmp_path / f"iteration_{iteration}")
    assert found == [(False, False), (False, False), (True, True)]


@pytest.mark.parametrize(("policy_learns", "steps"), [(False, 1), (True, 2)], ids=["critic alone", "both"])
def test_an_error_of_its_second_step_counts_its_first_one_and_the_policy_s(tokenizer, policy_learns, steps):
    learner = make_critic(
        tokenizer,
        **OWN,
        training__critic_batch_decisions=1,
        training__critic_passes=1,
        training__critic_warmup=0 if policy_learns else 1,
        training__update_passes=1,
    )
    episodes = make_episodes(learner, [1.0, 1.0], advantage=1.0)
    Shortage(learner._critic._scorer, 2)
    with pytest.raises(OutOfMemory, match="the critic ran out of memory") as caught:
        learner.update(episodes, iteration=1)
    assert caught.value.steps_taken == steps


def test_a_token_beyond_its_vocabulary_is_refused_with_its_place(tokenizer):
    foreign = segment("r0", [5, 6, 7], [20, 10**6], [-1.0, -1.0])
    with pytest.raises(SegmentError, match="rollout r0, turn 1, token 4: token id 1000000, but the actor"):
        scored(make_critic(tokenizer, **OWN), [foreign])
