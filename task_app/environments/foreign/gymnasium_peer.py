"""`gymnasium:ID`: plays an environment that is registered with gymnasium.

The model has one tool; each call of this tool is one `step`. If the environment's `info` has the key
"achievements", its value must be a dict of counts, which become the counters of achievements.

Source: gymnasium.Env and gymnasium.envs.registration.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from inspect import getdoc
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec, load_env_creator, registry
from pydantic import JsonValue

from shared_schemas.base import Body
from shared_schemas.messages import ToolSpec
from shared_schemas.prefixes import PREFIXES
from task_app.complaints import state_in
from task_app.environments.foreign import spaces
from task_app.environments.foreign.configs import SYSTEM, GymnasiumConfig
from task_app.environments.foreign.environment import ForeignEnvironment
from task_app.environments.foreign.peer import Call, ForeignFailed, Shown
from task_app.environments.foreign.schemas import tool
from task_app.environments.foreign.words import render_text
from task_app.errors import EpisodeOver, InvalidRequest, clipped, started
from task_app.protocols import Observation
from task_app.settings import Reach

Wrapper = Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]

TOOL, ARGUMENT = "act", "action"
# Environments of gymnasium itself that would import any module that a request's keywords name.
_IMPORTERS = ("GymV21Environment", "GymV26Environment")
# Only this many characters of a name are compared with the registered ids, because the time of a comparison
# grows with the square of the length.
_LONGEST_ID = 200


def gymnasium_environment(
    argument: str, config: GymnasiumConfig, reach: Reach, *, wrapper: Wrapper | None = None
) -> ForeignEnvironment:
    """Return the environment that `argument` names: ID, or MODULE:ID with a module that the operator allows.

    `wrapper`, a class or function of the operator, wraps the environment and may change its spaces.
    """
    if "render_mode" in config.kwargs:
        raise InvalidRequest(
            "config.kwargs may not set render_mode, which follows from config.text", where="config.kwargs"
        )
    spec = _find_spec(argument, reach)
    creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))
    modes = getattr(creator, "metadata", {}).get("render_modes", ())
    mode = "ansi" if config.text == "ansi" else "rgb_array"
    if config.text == "ansi" and mode not in modes:
        raise InvalidRequest(
            f"{spec.id!r} has no render mode 'ansi'; it has {list(modes)}", where="config.text"
        )
    peer = GymnasiumPeer(spec, config, render_mode=mode if mode in modes else None, wrapper=wrapper)
    restores = all(hasattr(wrapper or creator, name) for name in ("get_state", "set_state"))
    kind = _CLASSES[mode in modes and mode == "rgb_array"][restores]
    instructions = config.instructions
    if instructions is None:  # use the first paragraph of the docstring's description, in one line
        doc = getdoc(creator) or ""
        text = doc.partition("## Description")[2].strip() or doc.strip()
        instructions = " ".join(text.partition("\n\n")[0].split())[:2_000] or SYSTEM
    return kind(f"gymnasium:{spec.id}", peer, instructions=instructions)


class GymnasiumPeer:
    """Plays one gymnasium environment.

    It applies the time limit itself, and not with gymnasium's TimeLimit wrapper, so that a snapshot can
    store the number of steps so far.
    """

    def __init__(
        self, spec: EnvSpec, config: GymnasiumConfig, *, render_mode: str | None, wrapper: Wrapper | None
    ) -> None:
        self._spec = spec
        self._config = config
        self._render_mode = render_mode
        self._wrapper = wrapper
        self._limit = config.max_episode_steps or spec.max_episode_steps
        self._names = config.action_names
        self._env: gymnasium.Env[Any, Any] | None = None
        self.elapsed = 0

    @property
    def env(self) -> gymnasium.Env[Any, Any]:
        if self._env is None:  # closed after a failure
            raise EpisodeOver()
        return self._env

    def open(self) -> tuple[ToolSpec, ...]:
        self._env = self._make()
        space = self.env.action_space
        # By default, take the names from an enum `actions` of the environment, such as that of minigrid.
        enum = tuple(getattr(getattr(self.env.unwrapped, "actions", None), "__members__", ()))
        self._names = self._config.action_names or (enum if len(enum) == getattr(space, "n", None) else ())
        if self._config.action_names and len(self._names) != getattr(space, "n", None):
            raise InvalidRequest(
                f"{len(self._names)} names for {space}; each value of a Discrete space needs one",
                where="config.action_names",
            )
        try:
            schema = spaces.action_schema(space, self._names)
        except spaces.Wordless as exc:
            raise self._wordless(exc) from exc
        parameters = {"properties": {ARGUMENT: schema}, "required": [ARGUMENT]}
        return (tool(TOOL, "Take one step.", parameters, of=self._spec.id),)

    def reset(self, seed: int) -> Shown:
        self.elapsed = 0
        observation, info = self.env.reset(seed=seed)
        return self._shown(observation, info)

    def carry_out(self, calls: Sequence[Call]) -> Iterator[Shown]:
        return (self._step(call.arguments[ARGUMENT]) for call in calls)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def frame(self) -> npt.NDArray[np.uint8]:
        picture: npt.NDArray[np.uint8] = np.asarray(self.env.render(), np.uint8)
        return picture

    def state(self) -> Any:
        return self.env.get_wrapper_attr("get_state")()

    def set_state(self, state: Any, *, elapsed: int) -> None:
        """Restore the state and the step count. Raises ValueError if the environment refuses the state."""
        self.env.reset(seed=0)  # wrappers require a reset before a step
        self.elapsed = elapsed
        try:
            self.env.get_wrapper_attr("set_state")(state)
        except Exception as exc:
            raise ValueError(f"snapshot.world: set_state() refuses it: {exc}") from exc

    def _step(self, argument: Any) -> Shown:
        try:
            action = spaces.parse_action(self.env.action_space, argument, self._names)
        except ValueError as exc:
            return Shown("", refused=str(exc))
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.elapsed += 1
        late = self._limit is not None and self.elapsed >= self._limit
        return self._shown(observation, info, float(reward), bool(terminated), bool(truncated or late))

    def _shown(
        self,
        observation: Any,
        info: Mapping[str, Any],
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
    ) -> Shown:
        try:
            data = spaces.observation_data(self.env.observation_space, observation)
        except spaces.Wordless as exc:
            if self._render_mode != "ansi":
                raise self._wordless(exc) from exc
            data = None
        text = str(self.env.render()) if self._render_mode == "ansi" else render_text(data)
        counts = info.get("achievements")
        if not isinstance(counts, Mapping | None):
            raise ForeignFailed('info["achievements"] is no dict of counts')
        achievements = None if counts is None else {str(name): int(count) for name, count in counts.items()}
        return Shown(text, {"observation": data}, reward, terminated, truncated, achievements=achievements)

    def _make(self) -> gymnasium.Env[Any, Any]:
        kwargs: dict[str, Any] = dict(self._config.kwargs)
        if self._render_mode is not None:
            kwargs["render_mode"] = self._render_mode
        try:
            env = gymnasium.make(self._spec, max_episode_steps=-1, disable_env_checker=True, **kwargs)
        except gymnasium.error.DependencyNotInstalled as exc:
            raise InvalidRequest(
                f"{self._spec.id!r} needs a package that this task app lacks: {clipped(str(exc), 200)}",
                where="env_name",
            ) from exc
        except (TypeError, ValueError, LookupError, AssertionError, gymnasium.error.Error) as exc:
            reason = clipped(f"{type(exc).__name__}: {exc}", 300)
            raise InvalidRequest(
                f"{self._spec.id!r} cannot be made of these: {reason}", where="config.kwargs"
            ) from exc
        return self._wrapper(env) if self._wrapper is not None else env

    def _wordless(self, exc: spaces.Wordless) -> InvalidRequest:
        return InvalidRequest(
            f"{self._spec.id!r} cannot be told as text: {exc}",
            where="env_name",
            hint="the operator can name a wrapper for it (docs/foreign.md)",
        )


class Pictured(ForeignEnvironment):
    """A gymnasium environment that can draw pictures."""

    _peer: GymnasiumPeer

    def frame(self, width: int, height: int) -> npt.NDArray[np.uint8]:
        """Draw the environment's own picture, scaled by nearest-neighbour sampling, [height, width, 3]."""
        picture = self._peer.frame()
        rows, columns = (np.arange(n) * m // n for n, m in zip((height, width), picture.shape, strict=False))
        near: npt.NDArray[np.uint8] = picture[rows[:, None], columns]
        return near


class EpisodeState(Body):
    """A snapshot of a restorable environment; `world` is what its `get_state()` returned."""

    elapsed: int
    total: float
    runs: bool
    text: str
    data: dict[str, JsonValue]
    counts: dict[str, int]
    reward: float
    world: JsonValue


class Restorable(ForeignEnvironment):
    """A gymnasium environment that has `get_state()` and `set_state(state)`, and so supports snapshots.

    `get_state()` must return plain JSON values, which include the state of the random generator.
    """

    _peer: GymnasiumPeer

    def snapshot(self) -> bytes:
        last = started(self._shown)
        state = {
            "elapsed": self._peer.elapsed, "total": self._return, "runs": self._runs, "text": last.text,
            "data": last.data, "counts": last.achievements_counts, "reward": last.reward_last_step,
            "world": self._peer.state(),
        }  # fmt: skip
        try:
            return json.dumps(state, allow_nan=False).encode()
        except (TypeError, ValueError) as exc:
            raise ForeignFailed(f"get_state() of {self.name} returns no plain JSON values: {exc}") from exc

    def restore(self, state: bytes) -> Observation:
        last = state_in(EpisodeState, state)
        with self._lock, self._leave_on_failure():
            self._open()
            self._peer.set_state(last.world, elapsed=last.elapsed)
            self._return, self._runs = last.total, last.runs
            self._shown = Observation(last.text, last.data, last.counts, last.reward)
            self._achievements = frozenset(last.counts) or None
            return self._shown


class RestorablePictured(Restorable, Pictured):
    """A restorable environment that can draw pictures."""


# Indexed by: has pictures, is restorable.
_CLASSES = ((ForeignEnvironment, Restorable), (Pictured, RestorablePictured))


def _find_spec(argument: str, reach: Reach) -> EnvSpec:
    """Find the registered environment. Only modules on the operator's list are imported for this."""
    module, colon, env_id = argument.rpartition(":")
    listed = ", ".join(reach.gymnasium_modules) or "none"
    if colon and module not in reach.gymnasium_modules:
        raise InvalidRequest(
            f"module {clipped(module)!r} is not on this task app's list; allowed: {listed}",
            where="env_name",
            hint=PREFIXES["gymnasium"].how,
        )
    for name in reach.gymnasium_modules:
        import_module(name)
    spec = registry.get(env_id)
    if spec is None or spec.entry_point is None or env_id.startswith(_IMPORTERS):
        ids = [name for name in registry if not name.startswith(_IMPORTERS)]
        close = " or ".join(map(repr, get_close_matches(env_id[:_LONGEST_ID], ids)))
        raise InvalidRequest(
            f"{clipped(env_id)!r} is not registered with gymnasium, which has {len(ids)} ids"
            + (f". Did you mean {close}?" if close else ""),
            where="env_name",
            hint=f"modules that this task app imports for their environments: {listed}; "
            + PREFIXES["gymnasium"].how,
        )
    return spec
