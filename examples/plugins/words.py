"""words.py: the environment `lake`: FrozenLake in a wrapper that writes the position in words."""

import gymnasium

from task_app.environments.foreign.configs import GymnasiumConfig
from task_app.environments.foreign.gymnasium_peer import gymnasium_environment
from task_app.environments.foreign.peer import LOCAL
from task_app.plugins import EnvironmentPlugin


class Words(gymnasium.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Text(40)

    def observation(self, observation):
        return f"row {observation // 4}, column {observation % 4}"


def build(config):
    return gymnasium_environment("FrozenLake-v1", config, LOCAL, wrapper=Words)


ENVIRONMENTS = {"lake": EnvironmentPlugin(GymnasiumConfig, build)}
