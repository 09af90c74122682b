"""Runs a level of BabyAI in minigrid, and returns its full state and what the agent sees.

Source: Chevalier-Boisvert et al., BabyAI (arXiv 1810.08272); minigrid, envs/babyai.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any, Literal

ActionName = Literal["left", "right", "forward", "pickup", "drop", "toggle"]
NOOP = "done"  # an action that has no effect in BabyAI

_DOOR_STATES = ("open", "closed", "locked")
_SIDES = {"ahead": (0, 1), "left": (-1, 0), "right": (1, 0)}


def level_id(level: str, *, spec_of: Callable[[str], object] = find_spec) -> str:
    """Return the id under which gymnasium knows a level, such as `BabyAI-GoToLocal-v0` for `GoToLocal`.

    Raises ValueError if the level is unknown or minigrid is not installed. `spec_of` looks up an installed
    package; tests replace it.
    """
    if spec_of("minigrid") is None:
        raise ValueError("babyai needs minigrid, which is not installed: pip install 'turnwise[babyai]'")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    import minigrid  # noqa: F401  # registers its levels
    from gymnasium.envs.registration import registry

    known = {name.split("-")[1]: name for name in registry if name.startswith("BabyAI-")}
    if level not in known:
        close = get_close_matches(level, known, n=1)
        meant = f". Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{level!r} is no level of BabyAI, such as GoToLocal or PutNextLocal{meant}")
    return known[level]


class Level:
    """Plays one level, episode by episode. The same seed and actions give the same states."""

    def __init__(self, level: str, *, max_steps: int) -> None:
        import gymnasium

        made = gymnasium.make(level_id(level), max_steps=max_steps, disable_env_checker=True)
        self.env: Any = made.unwrapped
        self._seen: Any = None

    def reset(self, seed: int) -> None:
        self._seen, _ = self.env.reset(seed=seed)

    def act(self, action: str) -> tuple[float, bool]:
        """Execute an action; return its reward, and whether the mission has ended."""
        self._seen, reward, terminated, _, _ = self.env.step(self.env.actions[action])
        return float(reward), bool(terminated)

    @property
    def mission(self) -> str:
        return str(self.env.mission)

    @property
    def carrying(self) -> str | None:
        held = self.env.carrying
        return f"{held.color} {held.type}" if held is not None else None

    def objects(self) -> list[dict[str, Any]]:
        """List the visible objects, nearest first.

        Each object is a dict. `words` names the object (such as `red ball`). `ahead` and `right` are its
        distances from the agent in cells (negative `right`: to the left). `role` is the result of `_role`.
        """
        from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

        view = self._seen["image"]
        own = (view.shape[0] // 2, view.shape[1] - 1)
        found = []
        for i, j in zip(*(view[:, :, 0] > 3).nonzero(), strict=True):  # 0 to 3: unseen, empty, wall, floor
            if (i, j) == own:
                continue  # the carried object
            kind, colour, state = (int(value) for value in view[i, j])
            words = [IDX_TO_COLOR[colour], IDX_TO_OBJECT[kind]]
            if words[1] == "door":
                words.insert(0, _DOOR_STATES[state])
            ahead, right = int(own[1] - j), int(i - own[0])
            place = self.env.agent_pos + ahead * self.env.dir_vec + right * self.env.right_vec
            role = _role(self.env.instrs, self.env.grid.get(*place))
            found.append({"words": " ".join(words), "ahead": ahead, "right": right, "role": role})
        return sorted(found, key=lambda item: (item["ahead"] + abs(item["right"]), item["right"]))

    def room(self) -> dict[str, int]:
        """Count the free visible cells in a straight line from the agent, by side (ahead, left, right)."""
        view = self._seen["image"][:, :, 0]
        free = {}
        for side, (right, ahead) in _SIDES.items():
            i, j, count = view.shape[0] // 2 + right, view.shape[1] - 1 - ahead, 0
            while 0 <= i < view.shape[0] and 0 <= j < view.shape[1] and view[i, j] in (1, 3):
                i, j, count = i + right, j - ahead, count + 1
            free[side] = count
        return free

    def state(self) -> list[Any]:
        """Return everything that determines the rest of the episode, except the number of steps left."""
        env = self.env
        return [
            env.mission,
            [int(env.agent_pos[0]), int(env.agent_pos[1]), int(env.agent_dir)],
            _encode_object(env.carrying),
            " ".join(map(_encode_object, env.grid.grid)),
            list(_progress(env.instrs)),
        ]


def _role(instruction: Any, item: Any) -> str | None:
    """Return an object's role in a mission, or None if the mission does not concern the object.

    If an instruction says to put one object next to another, the first has the role `move`, and the other
    has the role `beside`. The object of any other instruction has the role `goal`.
    """
    for name, role in (("desc", "goal"), ("desc_move", "move"), ("desc_fixed", "beside")):
        described = getattr(instruction, name, None)
        if described is not None and any(one is item for one in described.obj_set):
            return role
    parts = [getattr(instruction, part, None) for part in ("instr_a", "instr_b")]
    return next(filter(None, (_role(part, item) for part in parts if part)), None)


def _encode_object(item: Any) -> str:
    """Encode an object as one word: type and colour, the state of a door, and the content of a box."""
    if item is None:
        return "."
    state = f"{int(item.is_open)}{int(item.is_locked)}" if item.type == "door" else ""
    inside = f"({_encode_object(item.contains)})" if item.type == "box" else ""
    return f"{item.type}-{item.color}{state}{inside}"


def _progress(instruction: Any) -> Iterator[Any]:
    """Yield an instruction's progress: completed parts, positions of its objects, and the carried object."""
    for part in ("instr_a", "instr_b"):
        if hasattr(instruction, part):
            yield str(getattr(instruction, f"{part[-1]}_done"))
            yield from _progress(getattr(instruction, part))
    for name in ("desc", "desc_move", "desc_fixed"):
        if hasattr(instruction, name):
            description = getattr(instruction, name)
            yield _places(description.obj_poss)
            yield _places(item.cur_pos for item in description.obj_set)
            held = getattr(instruction, "preCarrying", None)
            number = (i for i, item in enumerate(description.obj_set) if item is held)
            yield next(number, _encode_object(held))


def _places(positions: Any) -> list[Sequence[int]]:
    return [[int(place[0]), int(place[1])] for place in positions]
