"""guess.py: an environment that hides a number and answers each guess with higher, lower or found."""

import random

from shared_schemas.base import Body
from shared_schemas.messages import FunctionSpec, Message, ToolSpec
from task_app.errors import EpisodeOver
from task_app.plugins import EnvironmentPlugin
from task_app.protocols import DecisionOutcome, Observation


class GuessConfig(Body):
    highest: int = 100


class Guess:
    name, outcome_definition = "guess", "success: 1 when the number was found"

    def __init__(self, config):
        self._highest, self._number, self._found = config.highest, None, 0

    def reset(self, seed):
        self._number, self._found = random.Random(seed).randint(1, self._highest), 0
        return self._show(f"A number from 1 to {self._highest}.", 0.0)

    def step(self, calls, *, invalid_reason=None):
        if self._number is None or self._found:
            raise EpisodeOver()
        given = calls[0].arguments if [call.name for call in calls] == ["guess"] else None
        if invalid_reason or not given or set(given) != {"number"} or type(given["number"]) is not int:
            why = invalid_reason or "call guess once, with a whole number"
            return DecisionOutcome(self._show(why, 0.0), (0.0,), False, False, ("noop",), why)
        found = given["number"] == self._number
        self._found += found
        hint = "found" if found else "higher" if given["number"] < self._number else "lower"
        return DecisionOutcome(
            self._show(hint, float(found)), (float(found),), found, executed_actions=("guess",), result=hint
        )

    def tools(self):
        number = {"type": "integer", "minimum": 1, "maximum": self._highest}
        schema = {"type": "object", "properties": {"number": number}}
        return (ToolSpec(function=FunctionSpec(name="guess", description="Guess it.", parameters=schema)),)

    def messages(self, observation, past):
        return (Message(role="user", content=observation.text),)

    def outcome_reward(self):
        return float(self._found)

    def _show(self, text, reward):
        return Observation(text, {"hint": text, "highest": self._highest}, {"find_it": self._found}, reward)


ENVIRONMENTS = {"guess": EnvironmentPlugin(GuessConfig, Guess)}
