"""Names of the tools with which a model edits its context; task_app/episode implements them."""

from typing import Annotated

from pydantic import AfterValidator, Field

from shared_schemas.base import did_you_mean

# The published tools are the default; the others are offered if they are named.
PUBLISHED = ("deleteContext", "checkBudget")
CONTEXT_TOOLS = (*PUBLISHED, "deletePart", "summarizeContext", "undoEdit", "redoEdit", "proposeDeletes")


def _check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in CONTEXT_TOOLS:
            raise ValueError(f"unknown context tool {name[:80]!r}{did_you_mean(name[:80], CONTEXT_TOOLS)}")
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is named more than once; each is offered once")
    return names


ContextTools = Annotated[tuple[str, ...], Field(max_length=16), AfterValidator(_check_names)]
