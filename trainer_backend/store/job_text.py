"""What the text of a job says, for who shows jobs: read once, however often its row is."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import tomli


@lru_cache(maxsize=256)
def tables_of(config: str) -> Mapping[str, Any]:
    """The job's tables; nothing where its text cannot be read any more."""
    try:
        return tomli.loads(config)
    except tomli.TOMLDecodeError:
        return {}


def iterations_of(config: str) -> int | None:
    """How many it is to do; None where that is not known."""
    table = tables_of(config).get("training")
    found = table.get("iterations") if isinstance(table, Mapping) else None
    return found if isinstance(found, int) else None
