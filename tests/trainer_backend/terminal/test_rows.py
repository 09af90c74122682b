"""Rows of messages for supervised training: every answer once, with exactly what was seen before it."""

from collections.abc import Sequence

from shared_schemas.messages import FunctionCall, Message, ToolCall
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import ObservationData, StepData, StepInfo
from tests.trainer_backend.pages.hand_made import COW, WOOD, rollout
from trainer_backend.terminal.rows import make_rows


def said(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def step(
    turn: int,
    new: Sequence[Message],
    answer: str,
    *,
    reused: int = 0,
    changed: dict[int, Message] | None = None,
    refused: str | None = None,
) -> StepData:
    return StepData(
        turn=turn,
        observation_data=ObservationData(messages=tuple(new), messages_reused=reused, changed=changed or {}),
        action_taken={"type": "text", "content": answer},
        step_info=StepInfo(invalid_reason=refused),
    )


def episode(*steps: StepData) -> Rollout:
    played = rollout(1, [()])
    return played.model_copy(
        update={"trajectory": played.trajectory.model_copy(update={"steps": tuple(steps)})}
    )


def short(row: dict) -> list[tuple[str, str, int | None]]:
    return [(item["role"], item["content"], item.get("weight")) for item in row["messages"]]


def test_where_each_prompt_is_a_fresh_one_each_decision_is_a_row():
    rows = make_rows(episode(step(1, [said("user", "u1")], "a1"), step(2, [said("user", "u2")], "a2")))
    assert [short(row) for row in rows] == [
        [("user", "u1", None), ("assistant", "a1", 1)],
        [("user", "u2", None), ("assistant", "a2", 1)],
    ]
    assert [row["metadata"]["turns"] for row in rows] == [[1], [2]]


def test_a_conversation_is_one_row_with_each_answer_to_be_learned():
    first = step(1, [said("user", "u1")], "a1")
    new = [said("assistant", "a1"), said("user", "u2")]
    (row,) = make_rows(episode(first, step(2, new, "a2", reused=1)))
    assert short(row) == [
        ("user", "u1", None), ("assistant", "a1", 1), ("user", "u2", None), ("assistant", "a2", 1),
    ]  # fmt: skip
    assert (row["metadata"]["turn"], row["metadata"]["turns"]) == (2, [1, 2])
    # After an edit a row begins in which earlier answers are not learned again.
    one, other = make_rows(
        episode(first, step(2, new, "a2", reused=1, changed={0: said("user", "[deleted]")}))
    )
    assert short(one) == [("user", "u1", None), ("assistant", "a1", 1)]
    assert short(other) == [
        ("user", "[deleted]", None), ("assistant", "a1", 0), ("user", "u2", None), ("assistant", "a2", 1),
    ]  # fmt: skip
    assert other["metadata"]["turns"] == [2]


def test_what_was_refused_stays_in_sight_and_is_not_learned():
    refused = "no tool call"
    (row,) = make_rows(
        episode(
            step(1, [said("user", "u1")], "nonsense", refused=refused),
            step(2, [said("assistant", "nonsense"), said("user", "again")], "a2", reused=1),
            step(3, [said("assistant", "a2"), said("user", "u3")], "nonsense", reused=3, refused=refused),
        )
    )
    assert short(row) == [
        ("user", "u1", None), ("assistant", "nonsense", 0), ("user", "again", None), ("assistant", "a2", 1),
    ]  # fmt: skip
    assert row["metadata"]["turns"] == [2]
    # An episode of which nothing is worth learning has no row.
    assert make_rows(episode(step(1, [said("user", "u1")], "x", refused="no tool call"))) == []
    lost = rollout(1, [()]).model_copy(update={"trajectory": None, "status": "failed"})
    assert make_rows(lost) == []


def test_a_call_stands_in_its_message_as_the_model_made_it():
    call = ToolCall(id="c", function=FunctionCall(name="act", arguments='{"n": 1}'))
    acted = step(1, [said("user", "u1")], "").model_copy(update={"tool_calls": (call,)})
    (row,) = make_rows(episode(acted))
    assert row["messages"][-1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "act", "arguments": '{"n": 1}'}}],
        "weight": 1,
    }


def test_a_row_tells_what_its_decisions_achieved_and_earned():
    played = rollout(7, [WOOD, COW])
    words = [
        item.model_copy(update={"action_taken": {"type": "text", "content": "a"}})
        for item in played.trajectory.steps
    ]
    credits = [{"turn": 1, "reward": 1.0}, {"turn": 2, "reward": 0.5}]
    spoken = played.trajectory.model_copy(update={"steps": tuple(words)})
    first, second = make_rows(played.model_copy(update={"trajectory": spoken}), credits)
    assert first["metadata"]["achievements"] == {
        "new_unique": ["collect_wood"],
        "turned_true": ["collect_wood"],
        "cumulative_unique": ["collect_wood"],
    }
    assert second["metadata"]["achievements"]["new_unique"] == ["eat_cow"]
    assert second["metadata"]["achievements"]["cumulative_unique"] == ["collect_wood", "eat_cow"]
    assert [row["metadata"]["reward"] for row in (first, second)] == [1.0, 0.5]
    assert (first["metadata"]["seed"], first["metadata"]["outcome_reward"]) == (7, 2.0)
    assert make_rows(episode(step(1, [said("user", "u")], "a")))[0]["metadata"]["reward"] is None
