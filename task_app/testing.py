"""Tests that every environment must pass. To run them on your environment, subclass `EnvironmentContract`:

    class TestMaze(EnvironmentContract):
        def make(self) -> Environment:
            return MazeEnvironment()

pytest then runs every test of `EnvironmentContract` on the environment that `make` returns. This module
itself does not import pytest. The idea is from dm_env's EnvironmentTestMixin.
"""

import json
import math
import random
from collections.abc import Callable, Sequence

from task_app.errors import EpisodeOver
from task_app.policies.random_calls import random_call
from task_app.protocols import (
    AnsweredEnvironment,
    ConversationalEnvironment,
    DecisionOutcome,
    Environment,
    Observation,
    PastDecision,
    ReseedableEnvironment,
    RestorableEnvironment,
    ToolRequest,
    takes_answers,
)

Calls = tuple[ToolRequest, ...]

# Numbers of decisions after which a test takes and restores a snapshot, if the environment supports this.
RESTORE_AFTER = (0, 1, 7, 30)


class EnvironmentContract:
    """Base class of tests: checks the requirements of task_app.protocols.Environment and its extensions."""

    seed = 3
    """Seed of the episodes."""
    decisions = 200
    """The tests play at most this many decisions of an episode."""
    words = "words without a call"
    """The text that the tests give to `answer` of an AnsweredEnvironment."""

    def make(self) -> Environment:
        """Return a new environment with the config to test."""
        raise NotImplementedError("subclass EnvironmentContract and return an environment from make()")

    def test_it_has_a_name_tools_and_says_what_its_outcome_is(self) -> None:
        environment = self.make()
        check(bool(environment.name), "name is empty")
        # A conversational environment may leave its tools and its score to an interaction.
        talks = isinstance(environment, ConversationalEnvironment)
        check(talks or bool(environment.outcome_definition), "outcome_definition is empty")
        tools = environment.tools()
        takes_words = isinstance(environment, AnsweredEnvironment)
        check(takes_words or len(tools) > 0, "tools() offers nothing to call, and no answer is taken")
        names = [tool.function.name for tool in tools]
        check(len(set(names)) == len(names), f"tools() offers a name twice: {names}")
        json.dumps([tool.model_dump(mode="json") for tool in tools])
        environment.reset(self.seed)
        check(environment.tools() == tools, "tools() changed with reset(): a model sees them only once")

    def test_a_step_before_the_first_reset_is_refused(self) -> None:
        raises_episode_over(self.make(), self._calls(self.make(), random.Random(0)))

    def test_a_reset_shows_a_world_in_which_nothing_has_happened(self) -> None:
        environment = self.make()
        observation = environment.reset(self.seed)
        check_observation(observation)
        check(observation.reward_last_step == 0.0, "reset() reports a reward, but no env step has run")
        check(math.isfinite(environment.outcome_reward()), "outcome_reward() is not finite after reset()")

    def test_equal_seeds_and_calls_give_equal_episodes_also_after_a_reset(self) -> None:
        used, fresh = self.make(), self.make()
        first = self._play(used)
        check(self._play(used) == first, "the same seed and calls gave another episode after a reset()")
        check(
            self._play(fresh) == first, "the same seed and calls gave another episode in a fresh environment"
        )

    def test_every_decision_says_what_ran_and_what_it_earned(self) -> None:
        before = None
        for _, outcome in self._play(self.make()):
            check_outcome(outcome)
            reason = outcome.invalid_reason
            check(reason is None, f"a call of its own schema is refused: {reason}")
            after = outcome.observation.achievements_counts
            if before is not None:
                is_same = before.keys() == after.keys()
                check(is_same, "achievements_counts names other achievements than before")
                fell = [name for name in after if after[name] < before[name]]
                check(not fell, f"achievements_counts fell: {fell}; a counter only grows")
            before = after

    def test_what_cannot_be_carried_out_runs_one_env_step_and_says_why(self) -> None:
        tool = next((tool.function.name for tool in self.make().tools()), "no_tools_at_all")
        for calls in (
            (),
            (ToolRequest("no_such_tool", {}, "{}"),),
            (ToolRequest(tool, None, "{oops"),),
            (ToolRequest(tool, {"no_such_argument": 1}, '{"no_such_argument": 1}'),),
        ):
            self._refuse(calls, None)
        earlier = "an earlier reason, from reading the reply"
        later = self._refuse(self._calls(self.make(), random.Random(0)), earlier).invalid_reason
        check(later == earlier, f"invalid_reason was {earlier!r} and became {later!r}")

    def test_after_the_end_nothing_runs(self) -> None:
        environment = self.make()
        outcome = self._play(environment)[-1][1]
        if outcome.terminated or outcome.truncated:
            raises_episode_over(environment, self._calls(environment, random.Random(0)))

    def test_the_prompt_is_a_pure_function_of_what_was_seen_and_done(self) -> None:
        environment = self.make()
        first = environment.reset(self.seed)
        calls = self._calls(environment, random.Random(0))
        past = [PastDecision(calls, self._decide(environment, calls))]
        bad_calls = (ToolRequest("no_such_tool", None, "{oops"),)
        if not (past[0].outcome.terminated or past[0].outcome.truncated):
            past.append(PastDecision(bad_calls, environment.step(bad_calls)))
        for observation, history in ((first, []), (past[-1].outcome.observation, past)):
            messages = environment.messages(observation, history)
            check(len(messages) > 0, "messages() is empty: a model needs a prompt")
            check(any(message.content for message in messages), "messages() holds no text")
            is_same = self.make().messages(observation, list(history)) == messages
            check(is_same, "messages() reads more than its arguments: another instance says another prompt")

    def test_a_conversation_opens_alike_for_equal_seeds_and_stays_as_it_opened(self) -> None:
        environment, other = self.make(), self.make()
        if not isinstance(environment, ConversationalEnvironment):
            return  # other environments write a whole prompt for each decision
        assert isinstance(other, ConversationalEnvironment), "make() makes one kind of environment"
        sentence = "opening() worked before the first reset(); raise EpisodeOver"
        check_raises(EpisodeOver, environment.opening, sentence=sentence)
        for one in (environment, other):
            one.reset(self.seed)
        opening = environment.opening()
        check(other.opening() == opening, "opening() differs between two episodes of one seed")
        roles = [message.role for message in opening]
        check(roles[-1:] == ["user"], f"opening() has the roles {roles}; the last one must be 'user'")
        check("system" not in roles[1:], f"opening() has the roles {roles}; 'system' may only be the first")
        self._decide(environment, self._calls(environment, random.Random(0)))
        check(environment.opening() == opening, "opening() changed with a step")

    def test_every_call_of_a_conversation_has_its_text(self) -> None:
        environment = self.make()
        if not isinstance(environment, ConversationalEnvironment):
            return
        environment.reset(self.seed)
        good = self._calls(environment, random.Random(0))
        bad = (ToolRequest("no_such_tool", {}, "{}"),)
        calls = (*bad, *good)
        outcome = environment.step(calls)
        check(len(outcome.results) == len(calls), f"{len(calls)} calls have {len(outcome.results)} results")
        check(all(outcome.results), "a result is empty: a model would wonder what came of its call")
        is_error = outcome.results[0].startswith("error: ")
        check(is_error, "the text of a refused call does not begin with 'error: '")
        for bad_calls, reason in (((), None), (calls, "found earlier")):
            environment.reset(self.seed)
            count = len(environment.step(bad_calls, invalid_reason=reason).results)
            check(count == len(bad_calls), f"{len(bad_calls)} refused calls have {count} results")
        environment.reset(self.seed)
        outcome = environment.answer(self.words)
        check_outcome(outcome)
        counts = takes_answers(environment) or outcome.invalid_reason is not None
        check(counts, "takes_answers is False, but answer() is valid: why is an interaction refused?")

    def test_a_restored_moment_goes_on_like_the_original(self) -> None:
        environment, other = self.make(), self.make()
        if not isinstance(environment, RestorableEnvironment):
            return  # snapshots are optional
        assert isinstance(other, RestorableEnvironment), "make() makes one kind of environment"
        source = random.Random(self.seed)
        observation = environment.reset(self.seed)
        for decision in range(RESTORE_AFTER[-1] + 1):
            if decision in RESTORE_AFTER:
                is_same = other.restore(environment.snapshot()) == observation
                check(is_same, f"restore() shows another observation after {decision} decisions")
            calls = self._calls(environment, source)
            outcome = self._decide(environment, calls)
            is_same = self._decide(other, calls) == outcome
            check(is_same, "the restored moment continued differently for the same calls")
            check(other.outcome_reward() == environment.outcome_reward(), "outcome_reward() was not restored")
            observation = outcome.observation
            if outcome.terminated or outcome.truncated:
                other.restore(environment.snapshot())
                raises_episode_over(other, calls)
                return

    def test_equal_draws_from_a_moment_on_give_equal_episodes(self) -> None:
        environment, other = self.make(), self.make()
        if not isinstance(environment, ReseedableEnvironment):
            return  # snapshots and draws are optional
        assert isinstance(other, ReseedableEnvironment), "make() makes one kind of environment"
        environment.reset(self.seed)
        state = environment.snapshot()
        source = random.Random(self.seed)
        for one in (environment, other):
            one.restore(state)
            one.reseed(self.seed + 1)
        for _ in range(self.decisions):
            calls = self._calls(environment, source)
            outcome = self._decide(environment, calls)
            check(self._decide(other, calls) == outcome, "equal reseed() and calls gave different episodes")
            if outcome.terminated or outcome.truncated:
                return

    def test_what_is_no_moment_of_it_is_refused(self) -> None:
        environment = self.make()
        if not isinstance(environment, RestorableEnvironment):
            return
        sentence = "snapshot() worked before the first reset(); raise EpisodeOver"
        check_raises(EpisodeOver, environment.snapshot, sentence=sentence)
        environment.reset(self.seed)
        whole = environment.snapshot()
        for data in (b"", b"{}", b"null", b"\xff" * 100, whole[: len(whole) // 2]):
            sentence = f"restore() took {data[:20]!r}... for a moment of its own"
            check_raises(ValueError, environment.restore, data, sentence=sentence)

    def _refuse(self, calls: Calls, reason: str | None) -> DecisionOutcome:
        environment = self.make()
        environment.reset(self.seed)
        outcome = environment.step(calls, invalid_reason=reason)
        check_outcome(outcome)
        sent = f"{[call.name for call in calls]} with arguments {[call.raw_arguments for call in calls]}"
        check(bool(outcome.invalid_reason), f"{sent} is carried out as if it were valid")
        count = len(outcome.env_rewards)
        check(count == 1, f"{sent} ran {count} env steps; one no-op is due")
        return outcome

    def _play(self, environment: Environment) -> list[tuple[Calls, DecisionOutcome]]:
        """Play one episode with random tool calls, which `seed` determines; return the calls and outcomes."""
        source = random.Random(self.seed)
        environment.reset(self.seed)
        decisions = []
        for _ in range(self.decisions):
            calls = self._calls(environment, source)
            outcome = self._decide(environment, calls)
            decisions.append((calls, outcome))
            if outcome.terminated or outcome.truncated:
                break
        check(math.isfinite(environment.outcome_reward()), "outcome_reward() is not finite")
        return decisions

    def _decide(self, environment: Environment, calls: Calls) -> DecisionOutcome:
        """Carry out the calls. If there are none and the environment has `answer`, answer with `words`."""
        if not calls and isinstance(environment, AnsweredEnvironment):
            return environment.answer(self.words)
        return environment.step(calls)

    def _calls(self, environment: Environment, source: random.Random) -> Calls:
        """Return a tuple with one random tool call; an empty tuple if the environment has no tools."""
        if not environment.tools():
            return ()
        tools = [tool.model_dump(mode="json") for tool in environment.tools()]
        name, arguments = random_call(tools, source, longest=4)
        return (ToolRequest(name, arguments, json.dumps(arguments)),)


def check(holds: bool, sentence: str) -> None:
    """Raise AssertionError(sentence) if `holds` is false. Pytest would not explain a failed `assert` here."""
    if not holds:
        raise AssertionError(sentence)


def check_observation(observation: Observation) -> None:
    check(bool(observation.text), "Observation.text is empty")
    observation.text.encode("utf-8")
    data = dict(observation.data)
    is_plain = json.loads(json.dumps(data)) == data
    check(is_plain, "Observation.data is not what JSON makes of it: use plain values")
    counts = observation.achievements_counts.items()
    wrong = [name for name, count in counts if type(count) is not int or count < 0]
    check(not wrong, f"achievements_counts holds no counter from 0 on: {wrong}")


def check_outcome(outcome: DecisionOutcome) -> None:
    check_observation(outcome.observation)
    rewards = outcome.env_rewards
    check(len(rewards) > 0, "env_rewards is empty: every decision runs at least one env step")
    names = outcome.executed_actions
    check(len(names) == len(rewards), f"{len(names)} executed_actions, but {len(rewards)} env_rewards")
    last = outcome.observation.reward_last_step
    check(last == rewards[-1], f"reward_last_step is {last}, but the last env step earned {rewards[-1]}")
    is_both = outcome.terminated and outcome.truncated
    check(not is_both, "terminated and truncated at once: a limit is no end")


def raises_episode_over(environment: Environment, calls: Sequence[ToolRequest]) -> None:
    sentence = "step() ran although no episode is under way; raise task_app.errors.EpisodeOver"
    check_raises(EpisodeOver, environment.step, calls, sentence=sentence)


def check_raises(error: type[Exception], call: Callable[..., object], *given: object, sentence: str) -> None:
    try:
        call(*given)
    except error:
        return
    raise AssertionError(sentence)
