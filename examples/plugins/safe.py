"""safe.py: an environment with a dial to turn and a handle that opens the safe at one number of the dial."""

import random

from shared_schemas.base import Body
from task_app.plugins import EnvironmentPlugin
from task_app.tools import ToolEnvironment


class Dial(Body):
    number: int
    shown: int = 0
    open: bool = False


class Safe(ToolEnvironment[Dial]):
    name, outcome_definition, state_model = "safe", "1 when it is open", Dial

    def __init__(self):
        super().__init__([self.turn, self.pull])

    def begin(self, seed):
        return Dial(number=random.Random(seed).randint(1, 9))

    def turn(self, by: int) -> str:
        """Turn the dial."""
        shown = (self.state.shown + by) % 10
        self.run("turn", self.state.model_copy(update={"shown": shown}))
        return f"it shows {shown}"

    def pull(self) -> str:
        """Pull the handle."""
        opens = self.state.shown == self.state.number
        self.run("pull", self.state.model_copy(update={"open": opens}), reward=float(opens))
        return "it opens" if opens else "it stays shut"

    def over(self):
        return self.state.open

    def counts(self):
        return {"open_it": int(self.state.open)}

    def show(self):
        return f"dial: {self.state.shown}", {}


ENVIRONMENTS = {"safe": EnvironmentPlugin(Body, lambda config: Safe())}
