"""What a preset's tokenizer is trained on: all that its model will read and write, each word as it stands."""

import pytest

from shared_schemas.messages import FunctionCall, FunctionSpec, Message, ToolCall, ToolSpec
from shared_schemas.trajectory import ObservationData, StepData, StopReason, Trajectory
from trainer_backend.errors import NothingToLearnFrom
from trainer_backend.learner.warmup import prompt_texts

FINISH = ToolCall(id="c", function=FunctionCall(name="finish", arguments='{"answer": "Mira"}'))


def tool(name: str) -> ToolSpec:
    return ToolSpec(function=FunctionSpec(name=name, description="", parameters={}))


def trajectory(*tools: str, said: str | None = None) -> Trajectory:
    step = StepData(
        turn=1,
        observation_data=ObservationData(messages=(Message(role="user", content="Who?"),)),
        action_taken={"type": "tool_call"} | ({"content": said} if said else {}),
        tool_calls=(FINISH,),
    )
    return Trajectory(
        env_name="e", policy_name="p", seed=0, tools=tuple(map(tool, tools)), steps=(step,),
        outcome_reward=0.0, outcome_definition="none", env_steps=0, terminated=True, truncated=False,
        stop_reason=StopReason.ENVIRONMENT_DONE, wall_s=0.0,
    )  # fmt: skip


def test_calls_are_texts_as_the_presets_template_writes_them_with_their_names():
    # The last call of an episode stands in no prompt, and is what the model has to write to end it.
    assert prompt_texts([trajectory("finish", "read", said="So:")]) == [
        "Who?",
        "So:",
        ' finish {"answer": "Mira"}',
    ]


def test_of_a_lone_tool_the_items_are_written_alone_and_the_call_is_no_text():
    assert prompt_texts([trajectory("finish")]) == ["Who?"]


def test_without_a_prompt_there_is_nothing_to_train_on():
    with pytest.raises(NothingToLearnFrom):
        prompt_texts([])
