"""`system_apply_gigpo_to_batch_steps`, the door that source 2 publishes, by hand."""

import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shared_schemas.messages import Message
from shared_schemas.trajectory import ObservationData, StepData
from trainer_backend.core.advantages.gigpo import system_apply_gigpo_to_batch_steps
from trainer_backend.errors import AdvantageError


class Bare:
    """Has no place for an advantage."""

    __slots__ = ("observation_data",)

    def __init__(self, seen):
        self.observation_data = seen


class Unhashable:
    __hash__ = None


def step(turn, state, base_reward=None, value=None):
    return StepData(
        turn=turn,
        observation_data=ObservationData(messages=(Message(role="user", content=state),)),
        action_taken={"type": "text", "content": ""},
        base_reward=base_reward,
        policy_value_estimate=value,
    )


def rollout(states, rewards=None, values=None):
    count = len(states)
    rewards, values = rewards or [None] * count, values or [None] * count
    return [step(t + 1, *row) for t, row in enumerate(zip(states, rewards, values, strict=True))]


def read_text(observation):
    return observation.messages[-1].content


def applied(rollouts, scores, *, omega=0.5, gamma=0.5, default=0.0, key=read_text, **keys):
    return system_apply_gigpo_to_batch_steps(rollouts, scores, omega, gamma, key, default, **keys)


def columns(rollouts, name):
    return [[getattr(item, name) for item in steps] for steps in rollouts]


def test_scores_and_returns_from_equal_states_are_standardised_and_joined():
    # Scores 1 and 0: A_E = +-1/sqrt(2) * ... = (1 - .5) / sqrt(.5) = .7071. State "a": G = 2 + .5 * 4 = 4 and
    # 0 + .5 * 0 = 0, so A_S = +-.7071 too; "b" and "c" are met once: 0.
    done = applied([rollout("ab", [2.0, 4.0]), rollout("ac", [0.0, 0.0])], [1.0, 0.0])
    half = 0.5**0.5
    assert columns(done, "advantage")[0] == pytest.approx([half, half / 2])
    assert columns(done, "advantage")[1] == pytest.approx([-half, -half / 2])
    assert columns(done, "return_to_go") == [[4.0, 4.0], [0.0, 0.0]]


def test_without_step_rewards_the_final_score_comes_at_the_end_after_a_cost_of_time():
    (done, _) = applied([rollout("abc"), rollout("xyz")], [8.0, 0.0], default=-1.0)
    # G_2 = -1 + 8, G_1 = -1 + 7 / 2, G_0 = -1 + 2.5 / 2
    assert [item.return_to_go for item in done] == [0.25, 2.5, 7.0]


def test_one_missing_step_reward_adds_the_final_score_of_every_sibling():
    # The case of the issue: equal scores of 5, one reward of 0.1 more. G = (5, 5) and (5.1, 5).
    given = [rollout("ss"), rollout("ss", [0.1, None])]
    low, high = applied(given, [5.0, 5.0], omega=0.0, gamma=1.0)
    assert columns([low, high], "return_to_go") == [[5.0, 5.0], [5.1, 5.0]]
    # One state, returns 5, 5, 5.1, 5: mean 5.025, sample std 0.05
    assert columns([low, high], "advantage") == [pytest.approx([-0.5, -0.5]), pytest.approx([1.5, -0.5])]
    # A sibling that lacks none has its score added too: 2 + 8 and 1 + 8; -1 stands for what is missing.
    complete, sparse = applied(
        [rollout("ab", [1.0, 1.0]), rollout("xy", [None, 1.0])], [8.0, 8.0], default=-1.0, gamma=1.0
    )
    assert columns([complete, sparse], "return_to_go") == [[10.0, 9.0], [8.0, 9.0]]


REWARDS = st.lists(st.one_of(st.none(), st.integers(-4, 4).map(float)), min_size=1, max_size=3)
ROLLOUTS = st.lists(st.tuples(st.sampled_from("gh"), REWARDS, st.integers(-4, 4).map(float)), max_size=6)


@settings(max_examples=60)
@given_by(drawn=ROLLOUTS, seed=st.integers(0, 99))
def test_the_rule_of_a_group_depends_on_all_its_siblings_and_on_nothing_else(drawn, seed):
    order = list(range(len(drawn)))
    random.Random(seed).shuffle(order)
    batch = [rollout("a" * len(rewards), rewards) for _, rewards, _ in drawn]
    done = applied(batch, [score for *_, score in drawn], default=-1.0, group_keys=[key for key, *_ in drawn])
    shuffled = applied(
        [batch[i] for i in order],
        [drawn[i][2] for i in order],
        default=-1.0,
        group_keys=[drawn[i][0] for i in order],
    )
    assert shuffled == [done[i] for i in order], "neither the order of siblings nor other groups matter"
    for key in "gh":
        members = [i for i, (group, *_) in enumerate(drawn) if group == key]
        alone = applied([batch[i] for i in members], [drawn[i][2] for i in members], default=-1.0)
        assert alone == [done[i] for i in members]
        is_sparse = any(None in drawn[i][1] for i in members)
        for i in members:
            last = drawn[i][1][-1]
            reward = -1.0 if last is None else last
            assert done[i][-1].return_to_go == reward + (drawn[i][2] if is_sparse else 0.0)


def test_with_a_critic_the_return_to_go_is_advantage_plus_value():
    done, _ = applied([rollout("a", [1.0], [0.25]), rollout("b", [0.0], [0.25])], [1.0, 0.0], omega=1.0)
    assert done[0].return_to_go == pytest.approx(0.5**0.5 + 0.25)


@dataclass(frozen=True)
class Frozen:
    observation_data: object
    base_reward: float | None = None
    advantage: float | None = None
    return_to_go: float | None = None


def published(state, reward=None):
    """As a user makes one who only has the source, with a Message class of their own."""
    return StepData(
        system_step_index=0,
        observation_data=[SimpleNamespace(role="user", content=state)],
        action_taken={"type": "text", "content": "4"},
        raw_policy_output="4",
        resulting_messages_history=[SimpleNamespace(role="assistant", content="4")],
        policy_logprobs={"token_logprobs": [-0.5]},
        policy_value_estimate=None,
        is_done=True,
        step_info={"tool_success": True},
        base_reward=reward,
    )


KINDS = {
    "published": (published, lambda messages: messages[-1].content),
    "namespace": (lambda s, r: SimpleNamespace(observation_data=s, base_reward=r), lambda seen: seen),
    "frozen": (Frozen, lambda seen: seen),
    "list": (Frozen, lambda seen: [seen, {"of": {seen}}]),
    "array": (Frozen, lambda seen: numpy.array([ord(seen), 0])),
    "model": (Frozen, lambda seen: [Message(role="user", content=seen)]),
    "ours": (lambda s, r: step(1, s, r), lambda seen: seen),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_objects_with_the_published_attributes_and_any_keys_give_the_same(kind):
    make, key = KINDS[kind]
    given = [[make("a", 2.0), make("b", 4.0)], [make("a", 0.0), make("c", 0.0)]]
    done = applied(given, [1.0, 0.0], key=key)
    expected = applied([rollout("ab", [2.0, 4.0]), rollout("ac", [0.0, 0.0])], [1.0, 0.0])
    for name in ("advantage", "return_to_go"):
        assert columns(done, name) == columns(expected, name)
    assert getattr(given[0][0], "advantage", None) is None, "the steps given stay as they were"
    assert type(done[0][0]) is type(given[0][0])


def test_a_published_step_has_what_it_was_given():
    one = published("2 + 2?")
    assert (one.system_step_index, one.is_done, one.policy_value_estimate) == (0, True, None)
    assert one.observation_data[0].content == "2 + 2?"
    assert [message.content for message in one.resulting_messages_history] == ["4"]
    assert (one.policy_logprobs, one.step_info) == ({"token_logprobs": [-0.5]}, {"tool_success": True})
    with pytest.raises(ValueError, match="turn is 3 and system_step_index 0; give one of them"):
        StepData(system_step_index=0, turn=3, observation_data=[], action_taken={})
    with pytest.raises(ValidationError, match=r"action_taken\n  Field required"):
        StepData(system_step_index=0, observation_data=[])


def test_a_published_step_tells_its_states_as_of_a_fresh_view():
    assert published("2 + 2?").states == ("PENDING", "GENERATING", "INTERACTING", "COMPLETED")
    opened = StepData(turn=1, observation_data=[], action_taken={"type": "terminate"})
    assert opened.states == ("PENDING", "GENERATING")


def test_what_comes_out_is_plain_floats_whatever_goes_in():
    scores = numpy.array([1, 0], dtype=numpy.float32)
    given = [[SimpleNamespace(observation_data="a", base_reward=numpy.float32(score))] for score in scores]
    done = applied(given, scores, omega=numpy.float64(0.5), gamma=1, key=str)
    assert {type(getattr(one, name)) for (one,) in done for name in ("advantage", "return_to_go")} == {float}


@pytest.mark.parametrize(
    ("steps", "score", "keys", "told"),
    [
        ([object()], 1.0, {}, "rollout number 0, turn 1: a object has no observation_data"),
        ([Bare("a")], 1.0, {}, "rollout number 0, turn 1: a Bare takes no attribute"),
        ([Frozen("a")], 1.0, {"key": lambda seen: [Unhashable()]}, "a list cannot be compared"),
        ([Frozen("a")], 1.0, {"group_keys": [1, 2]}, "2 group keys for 1 rollouts"),
        ([Frozen("a")], float("nan"), {}, "rollout number 0, turn 1: the reward is nan"),
        ([], 1.0, {}, "rollout number 0: no decision"),
    ],
)
def test_what_cannot_be_read_keyed_credited_or_populated_is_refused(steps, score, keys, told):
    with pytest.raises(AdvantageError, match=told):
        applied([steps], [score], **{"key": str} | keys)
    with pytest.raises(AdvantageError, match="0 final scores for 1 rollouts"):
        applied([[Frozen("a")]], [])
