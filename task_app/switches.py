"""Pure: where the training switches (`step_rewards`) stand in a request, and that they agree."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shared_schemas.rewards import StepRewards
from task_app.complaints import invalid, most_telling
from task_app.errors import InvalidRequest

KEY = "step_rewards"
OFF = StepRewards()


def take_step_rewards(
    config: Mapping[str, Any], *, where: str
) -> tuple[dict[str, Any], dict[str, StepRewards]]:
    """Split `config` into what the plug-in reads and the switches, by their body path.

    Raises:
        InvalidRequest: the switches are not valid.
    """
    rest = {name: value for name, value in config.items() if name != KEY}
    if KEY not in config:
        return rest, {}
    place = f"{where}.{KEY}"
    try:
        return rest, {place: StepRewards.model_validate(config[KEY])}
    except ValidationError as exc:
        error = most_telling(exc.errors(include_url=False))
        raise invalid(error, where=place, known=StepRewards.model_fields) from exc


def agreed_step_rewards(found: Mapping[str, StepRewards]) -> StepRewards:
    """The one value of all places; none given means off.

    Raises:
        InvalidRequest: two places differ; silently preferring one would train on another reward.
    """
    places = list(found)
    for place in places[1:]:
        if found[place] != found[places[0]]:
            raise InvalidRequest(
                f"{place} differs from {places[0]}; give one of them, or the same", where=place
            )
    return found[places[0]] if places else OFF
