"""An entry of the operator's interaction file: a class, its config, and the name that requests know it by."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from shared_schemas.base import Body
from task_app.complaints import invalid, most_telling
from task_app.protocols import BaseInteraction

B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True)
class InteractionEntry:
    """What an interaction is built from, anew for each episode: what a class keeps on `self` is its own."""

    name: str
    kind: type[BaseInteraction]
    config: Mapping[str, Any]

    @property
    def never_blocks(self) -> bool:
        """Whether the class promises it, and may run on the service's event loop."""
        return bool(getattr(self.kind, "never_blocks", False))

    def build(self) -> BaseInteraction:
        """A new object; its config holds its name too, as published."""
        return self.kind({**deepcopy(dict(self.config)), "name": self.name})


def config_of(model: type[B], config: Mapping[str, Any]) -> B:
    """The config of an interaction of ours, checked.

    Raises:
        InvalidRequest: says which key is unknown, missing or out of its bounds.
    """
    given = {key: value for key, value in config.items() if key != "name"}
    try:
        return model.model_validate(given)
    except ValidationError as exc:
        error = most_telling(exc.errors(include_url=False))
        raise invalid(error, where="config", known=model.model_fields) from exc
