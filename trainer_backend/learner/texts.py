"""What a preset's tokenizer is trained on: the prompts that were seen, and the words of the tools."""

from collections.abc import Sequence
from typing import Any

from shared_schemas.trajectory import StepData, Trajectory
from trainer_backend.errors import NothingToLearnFrom


def prompt_texts(trajectories: Sequence[Trajectory]) -> list[str]:
    """Every prompt message of the episodes, what was said in words, and the calls as a model writes them.

    Raises:
        NothingToLearnFrom: there is none.
    """
    texts = [
        text
        for trajectory in trajectories
        for step in trajectory.steps
        for text in (*_shown(step), step.action_taken.get("content"), *_called(step, trajectory))
        if text
    ]
    if not texts:
        raise NothingToLearnFrom("no prompt was seen, so there is nothing to train a tokenizer on")
    return texts


def _shown(step: StepData) -> list[str | None]:
    return [message.content for message in step.observation_data.messages]


def _called(step: StepData, trajectory: Trajectory) -> list[str]:
    # Of a lone tool the presets' template writes the items alone: `tool_words`, each a token already.
    if len(trajectory.tools) < 2:
        return []
    return [f" {call.function.name} {call.function.arguments}" for call in step.tool_calls]


def tool_words(trajectories: Sequence[Trajectory]) -> list[str]:
    """Names that the offered tools take as arguments: each becomes one token."""
    words: dict[str, None] = {}
    for trajectory in trajectories[:1]:
        for tool in trajectory.tools:
            _enum_words(tool.function.parameters, words)
    return list(words)


def _enum_words(schema: Any, words: dict[str, None]) -> None:
    if isinstance(schema, dict):
        words.update(dict.fromkeys(word for word in schema.get("enum", ()) if isinstance(word, str)))
        for value in schema.values():
            _enum_words(value, words)
