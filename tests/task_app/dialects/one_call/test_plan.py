"""What POST /rollout makes of its request (what is ignored is a warning); stepwise rewards by hand."""

import hashlib

import pytest

from shared_schemas.trajectory import DecisionRewards, ObservationData, StepData, StepMetadata
from task_app.dialects.one_call.plan import correlation_id, plan_rollout
from task_app.dialects.one_call.reply import stepwise_blocks, stepwise_details
from task_app.dialects.one_call.request import LegacyRollout, read_stepwise
from task_app.errors import InvalidRequest
from task_app.plugins import default_plug_boards
from task_app.settings import Settings

URL = "http://127.0.0.1:1/v1"


def body(*, ops=4, env=None, policy=None, config=None, env_config=None, **rest):
    return LegacyRollout.model_validate(
        {
            "run_id": "run",
            "env": {"env_name": "crafter", "seed": 3, "config": env_config or {}, **(env or {})},
            "policy": {
                "policy_name": "crafter",
                "config": {"inference_url": URL, "model": "m", **(config or {})},
                **(policy or {}),
            },
            "ops": ["agent", "env"] * ops if isinstance(ops, int) else ops,
            **rest,
        }
    )


def planned(settings=None, **changes):
    return plan_rollout(body(**changes), default_plug_boards(), settings or Settings())


def test_a_plain_request_is_played_as_it_stands_without_a_warning():
    plan = planned(env_config={"text": "compact"}, config={"temperature": 0.5})
    assert (plan.env_name, plan.env_config, plan.seed) == ("crafter", {"text": "compact"}, 3)
    assert (plan.policy_name, plan.decisions, plan.body.safety.max_time_s) == ("openai", 4, 3_600.0)
    assert plan.policy_config == {
        "inference_url": URL, "model": "m", "temperature": 0.5,
        "max_tokens": 512, "tool_choice": "required", "ask_token_ids": False,
    }  # fmt: skip
    assert plan.warnings == ()
    plan = planned(env={"seed": None})
    assert plan.seed == int(hashlib.sha256(b"run").hexdigest()[:8], 16) % (2**31 - 1), "as it always was"
    assert str(plan.seed) in plan.warnings[0]


@pytest.mark.parametrize(
    ("changes", "decisions", "words"),
    [
        ({"ops": 30}, 20, "cut to 20 by env.config.env_params.max_steps_per_episode"),
        ({"ops": 30, "env_config": {"env_params": {"max_steps_per_episode": 25}}}, 25, "cut to 25"),
        ({"config": {"max_llm_calls": 3}}, 3, "cut to 3 by policy.config.max_llm_calls"),
        ({"safety": {"max_ops": 5}}, 2, "cut to 2 by safety.max_ops"),
        ({"ops": ["env", "agent", "agent", "env", "agent"]}, 1, "3 of 5 ops are not executed"),
    ],
)
def test_ops_that_are_not_played_are_told(changes, decisions, words):
    plan = planned(**changes)
    assert plan.decisions == decisions
    (warning,) = plan.warnings
    assert words in warning
    ops = [{"type": "policy"}, {"op": "environment"}, "MODEL", "step"]
    assert planned(ops=ops).decisions == 2, "they may be objects, and have several names"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env_config": {"difficulty": "hard"}}, "env.config.difficulty is ignored"),
        ({"env_config": {"zoo": 1}}, "env.config.zoo is ignored; known: history, length, max_actions, "),
        ({"config": {"use_vision": True}}, "policy.config.use_vision is ignored"),
        ({"config": {"use_tools": False}}, "policy.config.use_tools is ignored"),
        ({"branch": {"max_branches": 2}}, "branch is ignored; POST /branch"),
        ({"colour": 1}, "colour is ignored"),
        ({"safety": {"colour": 1}}, "safety.colour is ignored"),
        ({"mode": "rl"}, "no trace_correlation_id"),
    ],
)
def test_what_is_ignored_is_told(changes, words):
    assert [words in warning for warning in planned(**changes).warnings] == [True]


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"env_config": {"env_params": {"max_steps_per_episode": 0}}}, "env_params", "1 to 10000"),
        ({"env_config": {"env_params": {"max_steps": 5}}}, "env_params", "unknown key"),
        ({"env_config": {"max_action": 5}}, "env.config.max_action", "Did you mean 'max_actions'"),
        ({"config": {"temprature": 5}}, "policy.config.temprature", "Did you mean 'temperature'"),
        ({"config": {"max_llm_calls": "9"}}, "policy.config.max_llm_calls", "whole number"),
        ({"config": {"thinking_mode": "hard"}}, "policy.config.thinking_mode", "no_think, think"),
        ({"config": {"max_tokens": 1, "max_completion_tokens": 2}}, "max_completion_tokens", "differ"),
        ({"ops": ["agent", "dance"]}, "ops.1", "'dance'"),
        ({"ops": []}, "ops", "no decision"),
        ({"ops": ["env"]}, "ops", "no decision"),
        ({"safety": {"max_ops": 1}}, "safety.max_ops", "takes 2 ops"),
        ({"env": {"env_id": "e"}}, "env", "one of env_id"),
        ({"policy": {"policy_name": None}}, "policy", "one of policy_id"),
        ({"env": {"env_name": "Chess"}}, "env.env_name", "unknown environment"),
        ({"policy": {"policy_name": "craftr"}}, "policy.policy_name", "unknown policy"),
    ],
)
def test_what_cannot_be_played_as_it_was_meant_is_refused(changes, where, words):
    with pytest.raises(InvalidRequest) as found:
        planned(**changes)
    assert where in str(found.value.where)
    assert words in found.value.detail


def test_of_the_two_homes_of_the_step_rewards_the_policys_holds():
    on = {"enabled": True, "mode": "decision_stepwise"}
    plan = planned(env_config={"step_rewards": on}, config={"step_rewards": {}})
    assert plan.stepwise.emits_decision_rewards
    plan = planned(env_config={"step_rewards": on}, config={"step_rewards": {**on, "step_beta": 1.0}})
    assert plan.stepwise.step_rewards_beta == 1.0
    assert plan.warnings == (
        "env.config.step_rewards differs from policy.config.step_rewards, which is used",
    )
    assert planned(env_config={"step_rewards": on}, config={"step_rewards": on}).warnings == ()


TABLE = {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"}


@pytest.mark.parametrize("name", ["training", "rollout"])
@pytest.mark.parametrize("part", ["config", "env_config"])
def test_a_table_of_a_config_is_a_home_of_the_switches_too(part, name):
    weighed = {"enabled": True, "mode": "decision_stepwise", "strategy": "complex"}
    assert planned(**{part: {name: TABLE}}).stepwise.emits_decision_rewards
    assert planned(**{part: {name: TABLE, "step_rewards": weighed}}).stepwise.strategy == "per_achievement"
    with pytest.raises(InvalidRequest, match=rf"config.{name} differs from .*config.step_rewards"):
        planned(**{part: {name: {**TABLE, "step_rewards_beta": 1}, "step_rewards": weighed}})
    with pytest.raises(InvalidRequest, match=rf"config.{name}.step_rewards_mode"):
        planned(**{part: {name: {"step_rewards_mode": "unique"}}})


@pytest.mark.parametrize("name", ["training", "rollout"])
def test_a_table_outside_the_configs_acts_where_they_have_no_switches(name):
    plan = planned(**{name: TABLE})
    assert (plan.stepwise.emits_decision_rewards, plan.warnings) == (True, ())
    weighed = {"enabled": True, "mode": "decision_stepwise", "step_beta": 1.0}
    plan = planned(**{name: TABLE}, env_config={"step_rewards": weighed})
    assert plan.stepwise.step_rewards_beta == 1.0
    assert plan.warnings == ("training differs from env.config.step_rewards, which is used",)
    with pytest.raises(InvalidRequest, match="rollout differs from training"):
        planned(training=TABLE, rollout={**TABLE, "step_rewards_beta": 1})


def test_the_operators_server_is_asked_where_the_request_names_none():
    settings = Settings(inference_url="http://vllm:8000/v1?route=7", inference_model="qwen")
    policy = {"policy_name": "crafter-react", "config": {"trace_correlation_id": "c1"}}
    plan = planned(settings, policy=policy, mode="rl")
    assert plan.policy_config["inference_url"] == "http://vllm:8000/v1?route=7&cid=c1"
    assert plan.policy_config["model"] == "qwen"
    assert "http://vllm:8000" not in str(planned(settings).policy_config), "its own goes first"


def test_the_key_of_the_models_server_may_stand_where_older_clients_put_it():
    headers = {"authorization": "Bearer of-the-model", "X-Trace": "1"}
    plan = planned(config={"extra_headers": headers})
    assert plan.inference_key.get_secret_value() == "of-the-model"
    assert "extra_headers" not in plan.policy_config and "of-the-model" not in str(plan)
    (warning,) = plan.warnings
    assert "extra_headers.X-Trace is ignored" in warning
    plan = planned(config={"api_key": "of-the-model", "extra_headers": headers})
    assert plan.inference_key.get_secret_value() == "of-the-model" and "of-the-model" not in str(plan)
    with pytest.raises(InvalidRequest, match="another key") as found:
        planned(config={"extra_headers": headers}, policy={"inference_key": "other"})
    assert "of-the-model" not in str(found.value)
    with pytest.raises(InvalidRequest, match="fits a header"):
        planned(config={"extra_headers": {"Authorization": "Bearer two\nlines"}})


def test_thinking_goes_where_chat_templates_read_it_and_the_newer_name_of_max_tokens_is_sent_as_such():
    config = {"thinking_mode": "no_think", "thinking_budget": 64, "max_completion_tokens": 9}
    found = planned(config=config).policy_config
    shown = {"enable_thinking": False, "thinking_budget": 64}
    assert found["extra_body"] == {"chat_template_kwargs": shown}
    assert (found["max_tokens"], found["max_tokens_name"]) == (9, "max_completion_tokens")


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"trace_correlation_id": "t"}, "t"),
        ({"trace": "t"}, "t"),
        ({"inference_url": URL + "?cid=u"}, "u"),
        ({"inference_url": URL + "?trace=u", "trace": "t"}, "t"),
        ({}, None),
    ],
)
def test_the_correlation_id_is_found_where_it_may_stand(config, found):
    assert correlation_id(body(config=config)) == found


def test_a_training_client_finds_its_id_in_the_address():
    plan = planned(mode="rl", config={"trace_correlation_id": "a b", "inference_url": URL + "?x=1"})
    assert plan.policy_config["inference_url"] == URL + "?x=1&cid=a+b"
    assert "cid was added" in plan.warnings[0]
    assert planned(mode="eval", config={"trace_correlation_id": "t"}).policy_config["inference_url"] == URL


ON = {"enabled": True, "mode": "decision_stepwise"}


def steps(*achieved):
    """Decisions that achieved these: upper case for the first time, lower case again."""
    return [
        StepData(
            turn=turn,
            observation_data=ObservationData(),
            action_taken={"type": "text"},
            metadata=StepMetadata(
                decision_rewards=DecisionRewards(
                    turn=turn,
                    ach_delta=len(names),
                    unique_delta=sum(name.isupper() for name in names),
                    all=tuple(name.lower() for name in names),
                    unique=tuple(name.lower() for name in names if name.isupper()),
                )
            ),
        )
        for turn, names in enumerate(achieved, start=1)
    ]


WEIGHED = {"strategy": "per-achievement", "weights": {"a": 0.25}, "k_limits": {"a": 2, "b": 0}}


@pytest.mark.parametrize(
    ("rules", "achieved", "rewards"),
    [
        ({}, ["AB", "a", ""], [2.0, 0.0, 0.0]),
        ({"kind": "absolute"}, ["AB", "a", ""], [2.0, 1.0, 0.0]),
        # T = 3: r_0 = 1 + 0.5 + 0.1 * 3, r_1 = 0, r_2 = 1 + 0.5 + 0.1 * 1
        ({"indicator_lambda": 0.5, "step_beta": 0.1}, ["A", "a", "B"], [1.8, 0.0, 1.6]),
        # a: 0.25 twice, then no more; b: 1 each time, without limit; c: 1 once.
        (WEIGHED, ["ABC", "ab", "abc"], [2.25, 1.25, 1.0]),
        ({"enabled": False}, ["A"], []),
        ({"mode": "env_sparse"}, ["A"], []),
        ({"mode": "off"}, ["A"], []),
    ],
)
def test_a_block_has_the_reward_of_its_decision_by_the_rules(rules, achieved, rewards):
    found = stepwise_blocks(steps(*achieved), read_stepwise({**ON, **rules}, where="step_rewards"))
    assert [block["reward"] for block in found] == pytest.approx(rewards)


def test_the_sums_of_the_details_are_those_of_the_blocks():
    rules = read_stepwise({**ON, "indicator_lambda": 1.0}, where="")
    first = stepwise_blocks(steps("AB", "b"), rules)
    second = stepwise_blocks(steps("A"), rules)
    details = stepwise_details([first, second], rules, unlocked=["b", "a"])
    assert (details["indicator_sum"], details["reward_sum"], details["resource_reward"]) == (2, 5.0, 0.0)
    assert (details["new_achievements_total"], details["unique_achievements_total"]) == (3, 2)
    assert (details["unique_achievements"], details["final_achievements"]) == (["a", "b"], ["a", "b"])


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"strategy": "consistant"}, "Did you mean 'consistent'?"),
        ({"enabeld": True}, "Did you mean 'enabled'?"),
        ({"mode": "decision_step"}, "decision_stepwise"),
        ({"k_limits": {"a": "x"}}, "step_rewards.k_limits.a"),
        ([], "is no object"),
    ],
)
def test_a_misspelt_switch_is_told(raw, words):
    with pytest.raises(InvalidRequest, match=words.replace("?", r"\?").replace(".", r"\.")):
        read_stepwise(raw, where="step_rewards")
