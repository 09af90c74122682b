"""Pure: where the training switches stand in a request, and that they agree.

A config holds them as `step_rewards`, or as a table `training` with the names of a job's [training]; requests
that create something take that table beside the config too. Source 1 lets the same names stand in `rollout`,
where others may stand beside them.
"""

from collections.abc import Mapping
from typing import Any

from shared_schemas.rewards import StepRewards, TrainingSwitches
from task_app.complaints import validated
from task_app.errors import InvalidRequest

KEY, TABLE, ROLLOUT = "step_rewards", "training", "rollout"
OFF = StepRewards()


def take_step_rewards(
    config: Mapping[str, Any],
    *,
    where: str,
    training: TrainingSwitches | None = None,
    rollout: Any = None,
) -> tuple[dict[str, Any], dict[str, StepRewards]]:
    """Split `config` into what the plug-in reads and the switches, by their body path.

    Args:
        where: the body path of `config`.
        training: the table that stood beside it.
        rollout: what stood there under that name.
    """
    taken = {KEY, TABLE} | ({ROLLOUT} if _published(config.get(ROLLOUT)) else set())
    rest = {name: value for name, value in config.items() if name not in taken}
    found: dict[str, StepRewards] = {}
    if KEY in config:
        found[f"{where}.{KEY}"] = validated(StepRewards, config[KEY], where=f"{where}.{KEY}")
    if TABLE in config:
        found[f"{where}.{TABLE}"] = training_table(config[TABLE], where=f"{where}.{TABLE}")
    if ROLLOUT in taken:
        place = f"{where}.{ROLLOUT}"
        found[place] = training_table(_published(config[ROLLOUT]), where=place)
    if training is not None:
        found[TABLE] = training.step_rewards
    if of_rollout := _published(rollout):
        found[ROLLOUT] = training_table(of_rollout, where=ROLLOUT)
    return rest, found


def _published(rollout: Any) -> dict[str, Any]:
    """The switches in a `rollout` table; whatever else stands there is not ours."""
    table = rollout if isinstance(rollout, dict) else {}
    return {name: table[name] for name in TrainingSwitches.model_fields if name in table}


def training_table(table: Any, *, where: str) -> StepRewards:
    """The switches of a table with the published names."""
    return validated(TrainingSwitches, table, where=where).step_rewards


def agreed_step_rewards(found: Mapping[str, StepRewards]) -> StepRewards:
    """The one value of all places; none given means off."""
    places = list(found)
    for place in places[1:]:
        if found[place] != found[places[0]]:
            raise InvalidRequest(
                f"{place} differs from {places[0]}; give one of them, or the same", where=place
            )
    return found[places[0]] if places else OFF
