"""What is imitated of an episode, decisions or a teacher's labels; what a tokenizer is trained on."""

from collections.abc import Sequence

import pytest

from shared_schemas.messages import FunctionCall, FunctionSpec, Message, ToolCall, ToolSpec
from shared_schemas.trajectory import ObservationData, StepData, StepInfo, StopReason, Trajectory
from tests.trainer_backend.learner.hand_made import tiny_tokenizer
from trainer_backend.core.imitation import LABEL
from trainer_backend.errors import JobError, NothingToLearnFrom
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.learner.warmup import demonstrations, prompt_texts, tool_word_ids

TOOL = ToolSpec(
    function=FunctionSpec(
        name="act",
        description="",
        parameters={
            "properties": {"actions": {"type": "array", "items": {"type": "string", "enum": ["noop", "do"]}}}
        },
    )
)


def call(*actions: str) -> ToolCall:
    names = ", ".join(f'"{name}"' for name in actions)
    return ToolCall(id="c", function=FunctionCall(name="act", arguments=f'{{"actions": [{names}]}}'))


def label(*actions: str) -> dict[str, object]:
    return {"content": None, "tool_calls": [call(*actions).model_dump(mode="json")]}


def one_decision(tools: Sequence[ToolSpec], seen: str, **decision: object) -> Trajectory:
    step = StepData(
        turn=1, observation_data=ObservationData(messages=(Message(role="user", content=seen),)), **decision
    )
    return Trajectory(
        env_name="e", policy_name="p", seed=0, tools=tuple(tools), steps=(step,), outcome_reward=0.0,
        outcome_definition="none", env_steps=0, terminated=True, truncated=False,
        stop_reason=StopReason.ENVIRONMENT_DONE, wall_s=0.0,
    )  # fmt: skip


def played(action: dict[str, object], *, refused: str | None = None, tools: int = 1) -> Trajectory:
    info = StepInfo(invalid_reason=refused)
    return one_decision(
        [TOOL] * tools, "tree L2", action_taken=action, tool_calls=(call("noop"),), step_info=info
    )


def taught(
    action: dict[str, object], *, refused: str | None = None, allowed: list[int] | None = None
) -> list[str]:
    """What the model is to write after the prompt of the one decision."""
    renderer, episodes = ChatRenderer(tiny_tokenizer()), [played(action, refused=refused)]
    segments = demonstrations(episodes, renderer, min_outcome_reward=0.0, allowed=allowed)
    return [renderer.decode(part.token_ids[part.sampled_positions].tolist()) for part in segments]


def test_a_decision_is_imitated_as_it_was_made():
    assert taught({"type": "tool_call"}) == ["<|call|> noop<|end|>"]


def test_a_model_of_tool_words_alone_imitates_the_words_of_a_call():
    allowed = tool_word_ids([played({"type": "tool_call"})] * 2, tiny_tokenizer())
    both = {"type": "tool_call", LABEL: label("do", "noop")}
    assert taught(both, allowed=allowed) == [" do noop"]


@pytest.mark.parametrize("tools", [0, 2])
def test_words_alone_are_no_call_of_no_tool_or_of_one_of_two(tools: int):
    with pytest.raises(JobError, match=rf"model\.only_tool_words.*{tools} tools"):
        tool_word_ids([played({"type": "tool_call"}, tools=tools)], tiny_tokenizer())


@pytest.mark.parametrize("refused", [None, "no tool call"])
def test_a_label_is_imitated_in_its_place_whatever_became_of_the_decision(refused):
    assert taught({"type": "tool_call", LABEL: label("do", "noop")}, refused=refused) == [
        "<|call|> do noop<|end|>"
    ]


@pytest.mark.parametrize(
    "given",
    [{"content": None, "tool_calls": []}, {**label("do"), "exploratory": True}],
    ids=["empty", "detour"],
)
def test_an_empty_label_or_a_random_detour_of_the_teacher_is_not_imitated(given: dict[str, object]):
    with pytest.raises(NothingToLearnFrom):
        taught({"type": "tool_call", LABEL: given})


FINISH = ToolCall(id="c", function=FunctionCall(name="finish", arguments='{"answer": "Mira"}'))


def tool(name: str) -> ToolSpec:
    return ToolSpec(function=FunctionSpec(name=name, description="", parameters={}))


def trajectory(*tools: str, said: str | None = None) -> Trajectory:
    action = {"type": "tool_call"} | ({"content": said} if said else {})
    return one_decision([tool(name) for name in tools], "Who?", action_taken=action, tool_calls=(FINISH,))


def test_calls_are_texts_as_the_presets_template_writes_them_with_their_names():
    # The last call of an episode stands in no prompt, and is what the model has to write to end it.
    texts = prompt_texts([trajectory("finish", "read", said="So:")])
    assert texts == ["Who?", "So:", ' finish {"answer": "Mira"}']
    assert prompt_texts([trajectory("finish")]) == ["Who?"], "of a lone tool the items are written alone"
    with pytest.raises(NothingToLearnFrom):
        prompt_texts([])
