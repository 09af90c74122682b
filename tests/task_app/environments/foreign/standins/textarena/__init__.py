"""Stands for the package `textarena`: two games, with the classes and the state that a child reads."""

import random
from enum import Enum

GAME_ID = -1
ObservationType = Enum("ObservationType", ["PROMPT", "PLAYER_ACTION", "GAME_MESSAGE"])


class SinglePlayerState:
    role_mapping = {0: "Player", GAME_ID: "GAME"}  # noqa: RUF012

    def __init__(self):
        self.error_count = 0
        self.news = []

    def get_current_player_observation(self):
        news, self.news = self.news, []
        return news


class Guess:
    """Guess a number below 10; a word that is none is refused once, and then the end."""

    def __init__(self, tries=3):
        self.state = SinglePlayerState()
        self._tries = tries

    def reset(self, num_players, seed):
        self._number = random.randrange(10)
        self._tell("Guess a number below 10.", ObservationType.PROMPT)

    def step(self, action):
        state = self.state
        state.news.append((0, action, ObservationType.PLAYER_ACTION))
        if not action.isdigit():
            state.error_count += 1
            self._tell(f"{action!r} is no number.")
            self._reward, self._reason = "no number", "Invalid Move: -0.5"  # as some games of the package do
            return state.error_count > 1, {}
        state.error_count = 0
        self._tries -= 1
        is_right = int(action) == self._number
        self._tell("right" if is_right else "wrong")
        self._reward, self._reason = (1.0 if is_right else -1.0), "over"
        return is_right or not self._tries, {}

    def close(self):
        return {0: self._reward}, {0: {"reason": self._reason}}

    def _tell(self, text, kind=ObservationType.GAME_MESSAGE):
        self.state.news.append((GAME_ID, text, kind))


class Duel:
    def reset(self, num_players, seed):
        assert num_players == 2, f"The number of players has to be 2, received {num_players}"


class RenderWrapper:
    pass


class ObservationWrapper:
    """Would tell the whole story again with every observation."""

    def __init__(self, env):
        self.env = env

    def reset(self, num_players, seed):
        self.env.reset(num_players, seed)


def make(game, **config):
    return ObservationWrapper(Guess(**config)) if game == "Guess-v0" else Duel()
