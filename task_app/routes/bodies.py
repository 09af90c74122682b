"""The base of bodies whose shape others made: unknown keys are kept, but a misspelling of ours is refused."""

from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from shared_schemas.base import OpenBody
from shared_schemas.rewards import TrainingSwitches
from task_app.switches import KEY

MISSPELT = "misspelt_key"
# High enough to let real keys of other task apps pass: `run_id` beside our `rl_run_id`, `parent_env_id`.
_CUTOFF = 0.85
_LONGEST = 40
# Each is compared with all that are known.
MOST_UNKNOWN = 100

LONGEST_ID = 200

# Switches beside the config, where nobody reads them: they would be dropped in silence as other keys are.
MISPLACED = frozenset({KEY, *TrainingSwitches.model_fields})

EnvId = Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]


class ForeignBody(OpenBody):
    """An open body: `{"sed": 7}` would else be dropped in silence and start the world of seed 0."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspellings(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        unknown = body.keys() - cls.model_fields.keys()
        if len(unknown) > MOST_UNKNOWN:
            raise PydanticCustomError(
                "too_many_keys",
                "{found} unknown keys; at most {most} are read over",
                {"found": len(unknown), "most": MOST_UNKNOWN},
            )
        for name in unknown:
            if len(name) > _LONGEST:
                continue
            close = get_close_matches(name, cls.model_fields, n=1, cutoff=_CUTOFF)
            if close:
                raise PydanticCustomError(
                    MISSPELT,
                    "unknown key '{name}'. Did you mean '{meant}'?",
                    {"name": name, "meant": close[0]},
                )
        return body


class CreateBody(ForeignBody):
    """Of requests that create something: the switches of decision rewards stand in `config` or a table."""

    config: dict[str, Any] = Field(default_factory=dict, description="may hold step_rewards")
    training: TrainingSwitches | None = Field(
        default=None, description="the same switches, under their names in a job's [training]"
    )
    rollout: Any = Field(default=None, description="a table that may hold them under these names too")

    @model_validator(mode="before")
    @classmethod
    def _refuse_misplaced_switches(cls, body: Any) -> Any:
        for name in sorted(MISPLACED & body.keys()) if isinstance(body, dict) else ():
            home = "config" if name == KEY else "training"
            raise PydanticCustomError(
                MISSPELT, "'{name}' has no effect here; it stands in '{home}'", {"name": name, "home": home}
            )
        return body
