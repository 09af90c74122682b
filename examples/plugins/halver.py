"""halver.py: a policy that plays the environment of guess.py by halving the remaining range."""

from shared_schemas.base import Body
from task_app.plugins import PolicyPlugin


class HalverConfig(Body):
    pass


class Halver:
    name = "halver"

    def __init__(self):
        self._low, self._high, self._last = 1, None, None

    async def get_action(self, observation, available_tools_specs=None):
        hint = observation.data["hint"]
        self._high = self._high or observation.data["highest"]
        if hint == "higher":
            self._low = self._last + 1
        elif hint == "lower":
            self._high = self._last - 1
        self._last = (self._low + self._high) // 2
        return {"type": "tool_call", "name": "guess", "arguments": {"number": self._last}}, None, None, None


POLICIES = {"halver": PolicyPlugin(HalverConfig, lambda config, context: Halver())}
