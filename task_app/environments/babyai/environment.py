"""BabyAI as an `Environment`.

The agent reads a mission in words, sees a part of the grid, and gets one reward, at the end of the mission.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from shared_schemas.base import Body
from shared_schemas.messages import Message
from task_app.complaints import state_in
from task_app.environments.babyai.level import NOOP, ActionName, Level, level_id
from task_app.environments.babyai.text import SYSTEM, compact_text, full_text
from task_app.episode.state_keys import StateKey
from task_app.errors import started
from task_app.past import state_alone
from task_app.plugins import EnvironmentPlugin
from task_app.protocols import Observation, PastDecision
from task_app.tools import OneCallEnvironment

MAX_ACTIONS, MAX_STEPS = 5, 1_000
_LAST_SHOWN = 4


class BabyAIConfig(Body):
    """Settings of one BabyAI environment."""

    level: str = Field(
        default="GoToLocal",
        max_length=60,
        validate_default=True,
        description="as minigrid names it, without BabyAI- and -v0",
    )
    text: Literal["full", "compact"] = Field(
        default="full", description="full: sentences; compact: some 30 words for the smallest models"
    )
    length: int = Field(default=64, ge=1, le=MAX_STEPS, description="env steps before truncation")

    @field_validator("level")
    @classmethod
    def _is_known(cls, level: str) -> str:
        level_id(level)
        return level


class BabyAIMoment(Body, allow_inf_nan=False):
    """The content of a snapshot: level, seed, all actions so far, and facts about the last observation.

    `restore` replays the actions, which leads to the same state.
    """

    level: str
    seed: int = Field(ge=0, lt=2**31)
    actions: list[ActionName | Literal["done"]] = Field(max_length=MAX_STEPS)
    reward: float
    no_effect: bool
    invalid: bool


class BabyAIEnvironment(OneCallEnvironment):
    """Runs one episode of a BabyAI level.

    The same seed and calls give the same episode in every process. Only `reset` draws random numbers.
    """

    name = "babyai"
    quick_step = True
    outcome_definition = "success: 1 when the mission is accomplished"
    _called = "the tool"  # recorded episodes contain these words, so replays need them

    def __init__(self, config: BabyAIConfig | None = None) -> None:
        self.config = config or BabyAIConfig()
        super().__init__([self.act])
        self._level: Level | None = None
        self._seed = 0
        self._actions: list[str] = []
        self._state: list[Any] = []
        self._success = self._ended = False

    def act(self, actions: Annotated[list[ActionName], Field(min_length=1, max_length=MAX_ACTIONS)]) -> str:
        """Carry out actions in order."""
        for action in actions:
            if self.over() or self._is_cut():
                break
            self._do(action)
        return "accomplished" if self._success else "not accomplished yet"

    def reset(self, seed: int) -> Observation:
        if self._level is None:
            self._level = Level(self.config.level, max_steps=self.config.length)
        self._level.reset(seed)
        self._seed, self._actions, self._success, self._ended = seed, [], False, False
        return self._observe(0.0)

    def over(self) -> bool:
        return self._ended

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        return state_alone(observation, past, system=None if self.config.text == "compact" else SYSTEM)

    def outcome_reward(self) -> float:
        return float(self._success)

    def frame(self, width: int, height: int) -> npt.NDArray[np.uint8]:
        """Draw the grid as an RGB picture [height, width, 3] with the agent's view highlighted.

        Raises EpisodeOver before the first reset.
        """
        env = started(self._level).env
        pixels = env.get_frame(highlight=True, tile_size=max(4, min(width, height) // env.width))
        rows = np.arange(height) * len(pixels) // height
        picture: npt.NDArray[np.uint8] = pixels[rows[:, None], np.arange(width) * pixels.shape[1] // width]
        return picture

    def snapshot(self) -> bytes:
        """Return the episode as JSON. Raises EpisodeOver before the first reset."""
        started(self._level)
        moment = {"level": self.config.level, "seed": self._seed, "actions": self._actions, **self._last}
        return BabyAIMoment.model_validate(moment).model_dump_json().encode()

    def restore(self, state: bytes) -> Observation:
        moment = state_in(BabyAIMoment, state)
        if moment.level != self.config.level or len(moment.actions) > self.config.length:
            raise ValueError(
                f"the snapshot is of level {moment.level} after {len(moment.actions)} steps; this "
                f"environment's config has level {self.config.level} and length {self.config.length}"
            )
        self.reset(moment.seed)
        for action in moment.actions:
            if self.over() or self._is_cut():
                raise ValueError("the snapshot has actions after the end of the episode")
            self._do(action)
        return self._observe(moment.reward, no_effect=moment.no_effect, invalid=moment.invalid)

    def _do(self, action: str) -> None:
        reward, self._ended = started(self._level).act(action)
        self._success = reward > 0.0
        self._actions.append(action)
        self._ran.append(("noop" if action == NOOP else action, reward))

    def _is_cut(self) -> bool:
        return len(self._actions) >= self.config.length

    def _state_before(self) -> list[Any]:
        started(self._level)
        return self._state

    def _run_nothing(self, action: str, before: list[Any]) -> None:
        self._do(NOOP)

    def _observe_after(self, before: list[Any], *, is_refused: bool) -> Observation:
        return self._observe(self._ran[-1][1], before=before, invalid=is_refused)

    def _observe(
        self,
        reward: float,
        *,
        before: list[Any] | None = None,
        no_effect: bool = False,
        invalid: bool = False,
    ) -> Observation:
        """Make the observation of the current state.

        `before` is the state at the last observation. If it is given, the argument `no_effect` is ignored,
        and the observation says `no_effect` if the state has not changed.
        """
        level = started(self._level)
        self._state = level.state()
        no_effect = self._state == before if before is not None else no_effect
        self._last: dict[str, Any] = {"reward": reward, "no_effect": no_effect, "invalid": invalid}
        data = {
            "mission": level.mission,
            "objects": level.objects(),
            "room": level.room(),
            "carrying": level.carrying,
            "last": self._actions[-_LAST_SHOWN:],
            "step": len(self._actions),
            "max_steps": self.config.length,
            "no_effect": no_effect,
            "invalid": invalid,
            "state": self._state,
            # The teacher replays the episode from these values.
            "episode": {"level": self.config.level, "seed": self._seed, "actions": list(self._actions)},
        }
        text = compact_text(data) if self.config.text == "compact" else full_text(data)
        return Observation(text, data, {"success": int(self._success)}, reward)


_SEEN = itemgetter("mission", "objects", "room", "carrying")
BABYAI_STATE_KEYS: Mapping[str, StateKey] = {
    # The grid, the agent, the carried object and the mission's progress, but not the number of steps left.
    "grid": StateKey(lambda observation: observation.data["state"]),
    # Everything that the policy sees in this observation, except its last actions.
    "view": StateKey(lambda observation: _SEEN(observation.data)),
}
PLUGIN = EnvironmentPlugin(BabyAIConfig, BabyAIEnvironment, BABYAI_STATE_KEYS, needs="minigrid")
