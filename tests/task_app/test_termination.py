"""Why an episode ends (DESIGN.md 4.5, worked by hand), its limits as a task, and the pattern that ends it."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared_schemas.patterns import MAX_EXPANSION, SEARCH_BYTES, LinearPattern
from shared_schemas.rollouts import RolloutLimits, RolloutRequest
from shared_schemas.task_definition import OTHER_PLACES, TaskDefinitionModel
from shared_schemas.trajectory import StopReason
from task_app.episode.termination import EpisodeFacts, ends_by_a_limit, stop_reason, termination_signal
from task_app.episode.worker import RLRolloutWorker
from tests.task_app.counting import CountingEnvironment, PlannedPolicy, add, rollout, running_app
from tests.task_app.fake_inference import calling, completion, fake_inference
from tests.task_app.rollout_client import play
from tests.task_app.test_episode_worker import task

LIMITS = RolloutLimits(max_decisions=3, max_invalid_decisions=2, timeout_s=10.0)

# Each fact alone, in the order in which the reasons are tested.
ALONE = {
    StopReason.CRITICAL_ERROR: {"critical_error": True},
    StopReason.ENVIRONMENT_DONE: {"environment_done": True},
    StopReason.INTERACTION_DONE: {"interaction_done": True},
    StopReason.TERMINATE_ACTION: {"terminate_action": True},
    StopReason.TERMINATION_REGEX: {"signal": True},
    StopReason.INVALID_ACTION: {"invalid_decisions": 2},
    StopReason.CONTEXT_LENGTH: {"context_exceeded": True},
    StopReason.DEADLINE: {"elapsed_s": 10.0},
    StopReason.EPISODE_TOKENS: {"sampled_tokens": 50},
    StopReason.MAX_USER_TURNS: {"user_is_silent": True},
    StopReason.MAX_DECISIONS: {"decisions_done": 3},
}


def reason_for(**facts: object) -> StopReason | None:
    return stop_reason(EpisodeFacts(**{"decisions_done": 1, **facts}), LIMITS, max_episode_tokens=50)


def test_an_episode_goes_on_while_no_reason_holds():
    assert reason_for(decisions_done=2, invalid_decisions=1, elapsed_s=9.9, sampled_tokens=49) is None


@pytest.mark.parametrize("reason", ALONE)
def test_each_reason_ends_an_episode_alone(reason):
    assert reason_for(**ALONE[reason]) is reason


def test_of_two_reasons_the_earlier_one_in_the_published_order_is_given():
    order = (
        "critical_error environment_done interaction_done terminate_action termination_regex invalid_action "
        "context_length deadline episode_tokens max_user_turns max_decisions"
    )
    assert " ".join(StopReason) == order
    assert list(ALONE) == list(StopReason)
    for first, second in pairwise(ALONE):
        assert reason_for(**ALONE[first], **ALONE[second]) is first


def test_only_limits_cut_an_episode_off():
    limits = "invalid_action context_length deadline episode_tokens max_user_turns max_decisions"
    assert " ".join(reason for reason in StopReason if ends_by_a_limit(reason)) == limits


async def test_the_pattern_ends_the_episode_and_the_task_with_it_once_its_decision_is_carried_out():
    one = RLRolloutWorker(
        task_definition=task(termination_regex=r"FINAL ANSWER:\s*\d+"),
        environment=CountingEnvironment(),
        agent_policy=PlannedPolicy(add("a"), add("b") | {"content": "FINAL ANSWER: 7"}),
        seed=7,
    )
    await one.run_episode()
    ended = one.trajectory()
    assert (ended.stop_reason, len(ended.steps)) == (StopReason.TERMINATION_REGEX, 2)
    assert (ended.terminated, ended.truncated, ended.outcome_reward) == (True, False, 2.0)


@pytest.mark.parametrize(
    ("pattern", "target", "raw", "content", "found"),
    [
        (None, "raw", "stop", "stop", False),
        ("stop", "raw", "<call>stop</call>", "go", True),
        ("stop", "raw", "go", "stop", False),
        ("stop", "text", "go", "stop", True),
        ("stop", "text", "<call>stop</call>", "go", False),
        (".*", "raw", None, "x", False),
        (".*", "text", "raw", None, False),
        (".*", "raw", "", None, True),  # the empty answer is one that was written
        ("(?m)^done$", "raw", "so\ndone\nnow", None, True),
        ("so.*now", "raw", "so\ndone\nnow", None, False),
        ("(?s)so.*now", "raw", "so\ndone\nnow", None, True),
        ("done", "raw", "\ud83d done", None, True),
    ],
)
def test_a_signal_is_what_the_pattern_finds_in_the_text_of_the_target(pattern, target, raw, content, found):
    said = {} if content is None else {"content": content}
    limits = RolloutLimits(termination_regex=pattern, termination_target=target)
    assert termination_signal(limits)(raw, said) == found


# Each takes Python's `re` longer than the universe has: it tries all ways to cut the a's into parts.
@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+$", r"(a*)*b", r"(.*a){12}c", r"(?:a?){60}aaac"])
def test_no_text_makes_a_pattern_backtrack(pattern):
    assert not LinearPattern(pattern).matches("a" * 99_999 + "!")


@pytest.mark.parametrize("letter", ["x", "é", "𐐀"])  # of 1, 2 and 4 bytes in UTF-8
def test_of_a_longer_text_the_last_bytes_are_searched(letter):
    pattern = LinearPattern("done")
    fit = (SEARCH_BYTES - len("done")) // len(letter.encode())
    assert pattern.matches(letter * 100_000 + "done")
    assert pattern.matches("done" + letter * fit)
    assert not pattern.matches("done" + letter * (fit + 1))


def test_a_letter_that_the_bound_cuts_is_left_out():
    # two bytes each from the end: the cut goes through the first of them that is not whole
    text = "é" * SEARCH_BYTES + "x"
    assert LinearPattern(r"^é+x$").matches(text)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(done", "unclosed group"),
        ("(?=done)", "look-ahead and look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        ("a{3,2}", "the start must be <= the end"),
        ("*", "repetition operator missing expression"),
        (r"\w" * 240, "exceeds size limit"),
        ("a{400}", "is 2400, and may be 2000 at most"),
        ("(a{20}){20}", "is 4400, and may be 2000 at most"),
        ("(a{20}){1,20}", "and may be 2000 at most"),
        ("a{ 2 }", "position 1 begins no {n}, {n,} or {n,m}"),
        ("a{,2}", "position 1 begins no"),
        ("[{]", "position 1 begins no"),
        ("(?:.?.?.?){#}\n900}", "position 10 begins no"),
        # Comments within counts: 900 and 999 repetitions, which a text of 100,000 letters met for seconds.
        ("(?x)(?:.?.?.?){#}\n900}\\#", "the flag x"),
        ("(?x)(?:.?.?){#}\n999}\\!", "the flag x"),
        ("(?is-mx:a)", "the flag x"),
        (r"\\x{2028}", "and may be 2000 at most"),  # a backslash, then 2028 times x
        ("", "at least 1 character"),
        ("\ud83d", "unicode"),
    ],
)
def test_a_pattern_that_cannot_be_searched_in_bounded_time_is_refused(pattern, words):
    with pytest.raises(ValidationError, match=re.escape(words)):
        RolloutLimits(termination_regex=pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\x{2028}", r"\p{Greek}", r"a\{2500\}", r"\d{1,30}\s*$", "a{0}", "a{2,}", r"\b{start}done", r"[\{x]",
        r"(\(?x)", "(?P<x>a)", "(?i)x",
    ],
)  # fmt: skip
def test_what_only_looks_like_a_repetition_or_the_flag_x_is_allowed(pattern):
    assert RolloutLimits(termination_regex=pattern).termination_regex == pattern


@given(st.integers(0, 400), st.integers(0, 400))
def test_nested_counts_never_unfold_past_the_bound(inner, outer):
    pattern = f"(?:a{{{inner}}}){{{outer}}}"
    unfolded = len(pattern) * max(inner, 1) * max(outer, 1)
    try:
        LinearPattern(pattern)
    except ValueError:
        assert unfolded > MAX_EXPANSION
    else:
        assert unfolded <= MAX_EXPANSION


@pytest.mark.parametrize(("target", "decisions"), [("raw", 1), ("text", 2)])
async def test_what_the_model_wrote_is_searched_or_its_words_alone(target, decisions):
    called = calling("a", choice={"raw_text": "<call>done a</call>"})
    limits = {"max_decisions": 9, "termination_regex": "done", "termination_target": target}
    async with fake_inference(called, completion({"content": "done."})) as fake, running_app() as client:
        policy = {"policy_name": "openai", **fake.asked_by()}
        ended = (await play(client, rollout("a", policy=policy, limits=limits)))["a"].trajectory
    assert (ended.stop_reason, len(ended.steps)) == (StopReason.TERMINATION_REGEX, decisions)


TASK_LIMITS = {
    "max_decisions": 4, "max_invalid_decisions": 2, "invalid_action_penalty": -0.5, "timeout_s": 9.5,
    "termination_regex": "done", "termination_target": "text",
}  # fmt: skip
TRUTH = {"answer": [1, None, "x"]}
NO_TRUTHS = (float("nan"), "x" * 100_000, object(), b"x")


def test_a_request_and_its_task_say_the_same():
    env = {"env_name": "counting", "config": {"length": 3}}
    request = RolloutRequest(**rollout("a", env=env, limits=TASK_LIMITS, ground_truth=TRUTH))
    task = TaskDefinitionModel.of_request(request)
    assert (task.resource_type, task.base_resource_config) == ("counting", {"length": 3})
    assert (task.max_episode_steps, task.limits) == (4, request.limits)
    assert task.ground_truth == TRUTH
    assert TaskDefinitionModel(resource_type="counting").limits == RolloutLimits()
    hidden = RolloutRequest(**rollout("a", ground_truth="forty-two"))
    assert "forty-two" not in repr(hidden) + repr(TaskDefinitionModel.of_request(hidden)), "no log shows it"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        *(
            ({word: "x"}, f"{word!r} of a published task definition is not read here; ")
            for word in OTHER_PLACES
        ),
        ({"max_episode_step": 3}, r"unknown key 'max_episode_step'\. Did you mean 'max_episode"),
        ({"max_episode_steps": 0}, "max_episode_steps"),
        ({"termination_regex": "("}, "termination_regex"),
        ({"timeout_s": 0}, "timeout_s"),
        *(({"ground_truth": value}, "ground_truth") for value in NO_TRUTHS),
    ],
)
def test_a_fact_of_another_name_or_bound_is_refused(facts, words):
    with pytest.raises(ValidationError, match=words):
        TaskDefinitionModel(resource_type="counting", **facts)
