"""lexicon.py: a dialogue in which the policy can look words up. An interaction answers plain text."""

from dataclasses import replace

from task_app.environments.dialogue import DialogueConfig, DialogueEnvironment
from task_app.plugins import EnvironmentPlugin
from task_app.tools import Toolbox, function_tool

WORDS = {"gross": "144", "score": "20"}


class Lexicon(DialogueEnvironment):
    name = "lexicon"

    def __init__(self, config):
        super().__init__(config)
        self._toolbox = Toolbox([function_tool(self.look_up)])

    def look_up(self, word: str) -> str:
        """Look a word up."""
        return WORDS.get(word, "not found")

    def tools(self):
        return self._toolbox.specs()

    def step(self, calls, *, invalid_reason=None):
        refused = super().step(calls, invalid_reason=invalid_reason)
        if invalid_reason or not calls:
            return refused
        answers = [self._toolbox.answer(call) for call in calls]
        texts = tuple(answer.text for answer in answers)
        return replace(
            refused,
            env_rewards=(0.0,) * len(calls),
            executed_actions=tuple("noop" if answer.refused else "look_up" for answer in answers),
            invalid_reason=next((answer.refused for answer in answers if answer.refused), None),
            result="\n".join(texts),
            results=texts,
        )


ENVIRONMENTS = {"lexicon": EnvironmentPlugin(DialogueConfig, Lexicon)}
