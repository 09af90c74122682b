"""Plays a game of the package `textarena` for one player: a move is an answer in words.

The text of an outcome contains the game's messages since the last move. It omits the player's own words and
the earlier messages that the package's observation wrappers repeat, because the conversation already contains
them. The only reward comes at the end of the game. An invalid move is refused with the game's reason; after
too many invalid moves the game ends.
"""

import random
import sys
from typing import Any

try:
    import numpy as np
    import textarena as ta
    from textarena.envs.registration import ENV_REGISTRY
except ImportError as exc:
    sys.exit(f"{sys.executable} has no textarena ({exc}): pip install textarena")

NAMES, KIND = ENV_REGISTRY, "games of textarena"


class World:
    """Plays one game. `reset` makes a new game object, because some games draw their board in `__init__`."""

    tools: tuple[Any, ...] = ()

    def __init__(self, game: str, config: dict[str, Any]) -> None:
        self._game = game
        self._config = config

    def reset(self, seed: int) -> dict[str, Any]:
        # Games draw from the global random generators of this process.
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            self._env = ta.make(self._game, **self._config)
            self._env.reset(num_players=1, seed=seed)
        except Exception as exc:
            self._refuse(f"{type(exc).__name__}: {exc}")
        while isinstance(self._env, ta.ObservationWrapper | ta.RenderWrapper):
            self._env = self._env.env
        self._state = self._env.state
        if not isinstance(self._state, ta.SinglePlayerState):
            self._refuse("it has several players")
        return {"prompt": self._news()}

    def say(self, text: str) -> list[dict[str, Any]]:
        errors = self._state.error_count
        done, _ = self._env.step(text)
        news = self._news()
        if not done:
            return [{"refused" if self._state.error_count > errors else "text": news}]
        rewards, about = self._env.close()
        reward, reason = (rewards or {}).get(0, 0.0), str(about[0].get("reason") or "")
        if isinstance(reward, str):
            # Some games of textarena 0.7 swap the reward of an invalid move and its reason.
            reward, reason = reason.removeprefix("Invalid Move: "), reward
        end = {"reward": float(reward), "terminated": True, "data": {"reason": reason}}
        return [{"text": "\n".join(filter(None, (news, reason))), **end}]

    def _news(self) -> str:
        told = []
        for sender, text, kind in self._state.get_current_player_observation():
            # Some games of textarena 0.7 swap the kind and the sender of a message.
            if ta.ObservationType.PLAYER_ACTION not in (kind, sender):
                name = self._state.role_mapping.get(sender, "GAME")
                told.append(text if name == "GAME" else f"[{name}] {text}")
        return "\n".join(told)

    def _refuse(self, why: str) -> None:
        plain = " ".join(line.strip() for line in why.splitlines() if line.strip("* "))
        sys.exit(
            f"{self._game!r} does not start for one player ({plain[:300]}); games for one player can "
            "be played, such as FrozenLake-v0, Sudoku-v0 and Mastermind-v0"
        )


open_world = World
