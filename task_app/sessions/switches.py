"""Finds the reward switches of a request, which determine the rewards of decisions; no I/O.

A config may contain the switches in a table `step_rewards`, or in a table `training` with the names that
[training] of a job has. A table `rollout`, as in 1-crafter-event-rewards.md, may contain these names among
others. Requests that create something also accept `training` and `rollout` outside the config.
"""

from collections.abc import Mapping
from typing import Any

from shared_schemas.rewards import StepRewardKeys, StepRewards
from task_app.complaints import validated
from task_app.errors import InvalidRequest

KEY, TABLE, ROLLOUT = "step_rewards", "training", "rollout"
OFF = StepRewards()


def take_step_rewards(
    config: Mapping[str, Any], *, where: str, training: StepRewardKeys | None = None, rollout: Any = None
) -> tuple[dict[str, Any], dict[str, StepRewards]]:
    """Separate the reward switches from the plug-in's own config.

    Return the rest of `config`, and a mapping from the path in the request body to the switches found there.
    `where` is the path of `config` in the body. `training` and `rollout` are the request's tables with these
    names, outside the config.
    """
    for outer, table in ((where, config), (f"{where}.{KEY}", config.get(KEY))):
        for name in _find_switches(table):
            place = f"{outer}.{name}"
            raise InvalidRequest(
                f"{place}: it has no effect here; it stands in a table {TABLE!r}", where=place
            )
    own_keys = {KEY, TABLE} | ({ROLLOUT} if _find_switches(config.get(ROLLOUT)) else set())
    rest = {name: value for name, value in config.items() if name not in own_keys}
    by_place: dict[str, StepRewardKeys] = {}
    if KEY in config:
        by_place[f"{where}.{KEY}"] = validated(StepRewards, config[KEY], where=f"{where}.{KEY}")
    if TABLE in config:
        by_place[f"{where}.{TABLE}"] = validated(StepRewardKeys, config[TABLE], where=f"{where}.{TABLE}")
    if ROLLOUT in own_keys:
        place = f"{where}.{ROLLOUT}"
        by_place[place] = validated(StepRewardKeys, _find_switches(config[ROLLOUT]), where=place)
    if training is not None:
        by_place[TABLE] = training
    if switches := _find_switches(rollout):
        by_place[ROLLOUT] = validated(StepRewardKeys, switches, where=ROLLOUT)
    return rest, {place: keys.step_rewards for place, keys in by_place.items()}


def _find_switches(table: Any) -> dict[str, Any]:
    """Return those entries of a table whose names are switches; an empty dict if `table` is no mapping."""
    table = table if isinstance(table, Mapping) else {}
    return {name: table[name] for name in StepRewardKeys.model_fields if name in table}


def agree_on_step_rewards(by_place: Mapping[str, StepRewards]) -> StepRewards:
    """Return the switches on which all places agree; if `by_place` is empty, all switches are off.

    Raises InvalidRequest if two places differ.
    """
    first, *others = list(by_place) or [""]
    for place in others:
        if by_place[place].step_rewards != by_place[first].step_rewards:
            raise InvalidRequest(f"{place} differs from {first}; give one of them, or the same", where=place)
    return by_place.get(first, OFF).step_rewards
