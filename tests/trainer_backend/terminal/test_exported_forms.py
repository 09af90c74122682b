"""Rows of messages for supervised training, and trajectories in ATIF: every answer once, and exact tokens."""

from collections.abc import Sequence
from typing import Any

from shared_schemas.messages import FunctionCall, Message, ToolCall
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import ObservationData, PolicyLogprobs, Sampling, StepData, StepInfo
from tests.trainer_backend.pages.hand_made import COW, WOOD, rollout
from tests.trainer_backend.terminal import atif_schema
from trainer_backend.terminal.atif import make_atif
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


def words(row: dict) -> list[tuple[str, str, int | None]]:
    return [(item["role"], item["content"], item.get("weight")) for item in row["messages"]]


def test_where_each_prompt_is_a_fresh_one_each_decision_is_a_row():
    rows = make_rows(episode(step(1, [said("user", "u1")], "a1"), step(2, [said("user", "u2")], "a2")))
    assert [words(row) for row in rows] == [
        [("user", "u1", None), ("assistant", "a1", 1)],
        [("user", "u2", None), ("assistant", "a2", 1)],
    ]
    assert [row["metadata"]["turns"] for row in rows] == [[1], [2]]


def test_a_conversation_is_one_row_with_each_answer_to_be_learned():
    first = step(1, [said("user", "u1")], "a1")
    new = [said("assistant", "a1"), said("user", "u2")]
    (row,) = make_rows(episode(first, step(2, new, "a2", reused=1)))
    assert words(row) == [
        ("user", "u1", None), ("assistant", "a1", 1), ("user", "u2", None), ("assistant", "a2", 1),
    ]  # fmt: skip
    assert (row["metadata"]["turn"], row["metadata"]["turns"]) == (2, [1, 2])
    # After an edit a row begins in which earlier answers are not learned again.
    one, other = make_rows(
        episode(first, step(2, new, "a2", reused=1, changed={0: said("user", "[deleted]")}))
    )
    assert words(one) == [("user", "u1", None), ("assistant", "a1", 1)]
    assert words(other) == [
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
    assert words(row) == [
        ("user", "u1", None), ("assistant", "nonsense", 0), ("user", "again", None), ("assistant", "a2", 1),
    ]  # fmt: skip
    assert row["metadata"]["turns"] == [2]
    # An episode of which nothing is worth learning has no row.
    assert make_rows(episode(step(1, [said("user", "u1")], "x", refused="no tool call"))) == []
    lost = rollout(1, [()]).model_copy(update={"trajectory": None, "status": "failed"})
    assert make_rows(lost) == []


def test_a_call_stands_in_its_message_as_the_model_made_it():
    (row,) = make_rows(episode(acted(step(1, [said("user", "u1")], ""), call("c", '{"n": 1}'))))
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


def told(item: Rollout, **trajectory: Any) -> dict[str, Any]:
    """The valid document of a rollout whose trajectory has these fields."""
    update = {"trajectory": item.trajectory.model_copy(update={"model": "tiny/actor", **trajectory})}
    document = make_atif(item.model_copy(update=update))
    atif_schema.check(document)
    return document


def short(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["source"], item["message"]) for item in document["steps"]]


def call(call_id: str, arguments: str = "{}") -> ToolCall:
    return ToolCall(id=call_id, function=FunctionCall(name="act", arguments=arguments))


def acted(item: StepData, *calls: ToolCall, result: str = "") -> StepData:
    info = item.step_info.model_copy(update={"tool_result": result})
    return item.model_copy(update={"tool_calls": calls, "step_info": info})


def answer(text: str, *ids: str) -> Message:
    """An answer with these calls, as later prompts show it."""
    return Message(role="assistant", content=text, tool_calls=tuple(map(call, ids)))


def result(call_id: str, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id)


def results(document: dict[str, Any], step_id: int) -> list[tuple[str | None, str]]:
    found = document["steps"][step_id - 1]["observation"]["results"]
    return [(item.get("source_call_id"), item["content"]) for item in found]


def prompt_step_ids(document: dict[str, Any]) -> list[Sequence[int] | None]:
    decisions = [item for item in document["steps"] if "turn" in item.get("extra", {})]
    return [item["extra"].get("prompt_step_ids") for item in decisions]


def test_a_conversation_is_told_as_it_went_on():
    first = acted(step(1, [said("system", "s"), said("user", "u")], "a1"), call("c"), call("d"))
    second = step(
        2, [answer("a1", "c", "d"), result("c", "one"), result("d", "two"), said("user", "v")], "a2", reused=2
    )
    document = told(episode(first, second))
    assert short(document) == [
        ("system", "s"), ("user", "u"), ("agent", "a1"), ("user", "v"), ("agent", "a2"),
    ]  # fmt: skip
    assert results(document, 3) == [("c", "one"), ("d", "two")]
    assert prompt_step_ids(document) == [None, None]


def test_fresh_prompts_say_of_which_steps_they_consist():
    prompts = ([said("system", "s"), said("user", text)] for text in ("same", "same", "new"))
    document = told(episode(*(step(turn, new, f"a{turn}") for turn, new in enumerate(prompts, start=1))))
    assert short(document) == [
        ("system", "s"), ("user", "same"), ("agent", "a1"), ("user", "same"), ("agent", "a2"),
        ("user", "new"), ("agent", "a3"),
    ]  # fmt: skip
    assert prompt_step_ids(document) == [None, [1, 4], [1, 6]]


def test_results_that_no_prompt_shows_are_those_of_the_record_or_of_the_whole_conversation():
    one = acted(step(1, [said("user", "u")], ""), call("c"), result="done")
    two = acted(step(2, [said("user", "v")], ""), call("d"), call("e"), result="both")
    document = told(episode(one, two))
    assert (results(document, 2), results(document, 4)) == ([("c", "done")], [(None, "both")])
    last = acted(step(1, [said("user", "u")], "a"), call("c"), call("d"), result="one two")
    history = (said("user", "u"), answer("a", "c", "d"), result("c", "one"), result("d", "two"))
    assert results(told(episode(last), full_history=history), 2) == [("c", "one"), ("d", "two")]


def test_an_agent_and_its_sub_agent_are_told_once_each():
    """The main conversation asks a helper, and goes on with its own messages."""
    asked = acted(step(1, [said("user", "task")], "ask"), call("c"))
    helper = step(2, [said("system", "you help"), said("user", "part")], "helped")
    on = step(3, [said("user", "task"), answer("ask", "c"), result("c", "helped")], "done")
    document = told(episode(asked, helper, on))
    assert short(document) == [
        ("user", "task"), ("agent", "ask"), ("system", "you help"), ("user", "part"), ("agent", "helped"),
        ("agent", "done"),
    ]  # fmt: skip
    assert results(document, 2) == [("c", "helped")]
    assert prompt_step_ids(document) == [None, [3, 4], [1, 2]]


def test_a_captured_agent_s_sub_agent_is_a_trajectory_of_its_own_where_its_answer_arrived():
    asked = acted(step(1, [said("system", "s"), said("user", "task")], "ask"), call("c"), call("d"))
    helper = step(2, [said("system", "you help"), said("user", "part")], "helped")
    back = [said("system", "s"), said("user", "task"), answer("ask", "c", "d")]
    back += [result("c", "?"), result("d", "helped")]
    retold = [said("system", "s"), said("user", "task, so far: helped")]
    steps = asked, helper, step(3, back, "done"), step(4, retold, "really done")
    document = told(episode(*steps), env_name="agent:x")
    (sub,) = document["subagent_trajectories"]
    assert short(document) == [
        ("system", "s"), ("user", "task"), ("agent", "ask"), ("agent", "done"),
        ("user", "task, so far: helped"), ("agent", "really done"),
    ]  # fmt: skip
    assert short(sub) == [("system", "you help"), ("user", "part"), ("agent", "helped")]
    assert (prompt_step_ids(document), prompt_step_ids(sub)) == ([None, None, [1, 5]], [None])
    assert [item["extra"]["turn"] for item in (sub["steps"][2], document["steps"][3])] == [2, 3]
    assert results(document, 3) == [("c", "?"), ("d", "helped")]
    assert atif_schema.refs(document, sub) == {sub["trajectory_id"]} == {f"{document['trajectory_id']}~2"}
    one, other = document["steps"][2]["observation"]["results"]
    assert "subagent_trajectory_ref" not in one and other["subagent_trajectory_ref"]
    assert document["final_metrics"]["extra"]["decisions"] == 4


def test_an_answer_arrives_after_it_was_given_so_no_two_agents_refer_to_each_other():
    """Both end with the word that the other was told, one of them before that was anybody's answer."""
    asked = acted(step(1, [said("user", "task")], "ask"), call("c"))
    early = step(2, [said("user", "task"), answer("ask", "c"), result("c", "ok")], "go")
    one = acted(step(3, [said("system", "one")], "call"), call("x"))
    other = acted(step(4, [said("system", "other")], "call"), call("y"))
    one_ends = step(5, [said("system", "one"), answer("call", "x"), result("x", "ok")], "ok")
    other_ends = step(6, [said("system", "other"), answer("call", "y"), result("y", "ok")], "ok")
    document = told(episode(asked, early, one, other, one_ends, other_ends), env_name="agent:x")
    first, second = document["subagent_trajectories"]
    assert atif_schema.refs(document) == set() == atif_schema.refs(first)
    assert atif_schema.refs(second) == {first["trajectory_id"]}


def test_a_capture_whose_prompts_begin_alike_has_one_trajectory():
    steps = (step(turn, [said("user", "u"), said("user", str(turn))], f"a{turn}") for turn in (1, 2))
    document = told(episode(*steps), env_name="capture")
    assert "subagent_trajectories" not in document and prompt_step_ids(document) == [None, [1, 4]]


def test_what_was_not_sampled_is_no_training_data():
    opening = [said("user", "2+2?"), said("assistant", "4"), said("user", "3+3?")]
    document = told(episode(step(1, opening, "6")))
    assert [item.get("is_copied_context") for item in document["steps"]] == [None, True, None, None]
    assert [item.get("llm_call_count") for item in document["steps"]] == [None, None, None, 1]


def test_an_edited_message_is_told_as_the_model_saw_it():
    first = step(1, [said("user", "long"), said("user", "u")], "a1")
    edited = {0: said("user", "[deleted]")}
    document = told(episode(first, step(2, [said("assistant", "a1")], "a2", reused=2, changed=edited)))
    assert short(document)[3:] == [("user", "[deleted]"), ("agent", "a2")]
    assert prompt_step_ids(document) == [None, [2, 3, 4]]


def test_the_prompts_of_a_conversation_are_put_together_from_their_new_ids():
    def sampled(item: StepData, reused: int, new: tuple[int, ...], ids: tuple[int, ...]) -> StepData:
        tokens = PolicyLogprobs(
            prompt_ids_reused=reused, prompt_token_ids=new, token_ids=ids, logprobs=(-0.5,) * len(ids),
            finish_reason="stop", versions=((0, 3),),
        )  # fmt: skip
        info = item.step_info.model_copy(update={"prompt_tokens": reused + len(new), "completion_tokens": 2})
        fields = {"policy_logprobs": tokens, "sampling": Sampling(temperature=0.7, seed=1), "step_info": info}
        return item.model_copy(update=fields)

    first = sampled(step(1, [said("user", "u")], "a"), 0, (1, 2, 3), (4, 5))
    second = sampled(step(2, [said("assistant", "a"), said("user", "v")], "b", reused=1), 5, (6,), (7, 8))
    edited = sampled(step(3, [said("user", "w")], "c"), 2, (9,), (10, 11))
    document = told(episode(first, second, edited))
    metrics = [item["metrics"] for item in document["steps"] if item["source"] == "agent"]
    assert [item["prompt_token_ids"] for item in metrics] == [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 9]]
    assert [item["completion_token_ids"] for item in metrics] == [[4, 5], [7, 8], [10, 11]]
    assert [len(item["prompt_token_ids"]) for item in metrics] == [item["prompt_tokens"] for item in metrics]
    assert metrics[1]["logprobs"] == [-0.5, -0.5]
    assert metrics[1]["extra"]["policy_versions"] == ((0, 3),)
    assert metrics[1]["extra"]["sampling"]["temperature"] == 0.7
    totals = document["final_metrics"]
    assert (totals["total_prompt_tokens"], totals["total_completion_tokens"]) == (3 + 6 + 3, 6)
    assert totals["total_steps"] == len(document["steps"])


def test_a_policy_without_a_model_calls_none():
    document = told(episode(step(1, [said("user", "u")], "a")), model="")
    assert document["steps"][1]["llm_call_count"] == 0
    assert "metrics" not in document["steps"][1] and "model_name" not in document["agent"]


def test_arguments_that_are_no_object_stay_as_they_were_written():
    written = acted(
        step(1, [said("user", "u")], ""), call("c", '{"n": 1}'), call("d", "[1"), call("e", "[1]")
    )
    calls = told(episode(written))["steps"][1]["tool_calls"]
    assert [item["arguments"] for item in calls] == [{"n": 1}, {}, {}]
    assert [item.get("extra", {}).get("arguments_text") for item in calls] == [None, "[1", "[1]"]


def test_rewards_and_credit_stand_with_their_decision_and_a_failed_rollout_has_no_trajectory():
    played = rollout(7, [WOOD, COW])
    credits = [{"turn": turn, "reward": 1.0, "advantage": 0.5 / turn} for turn in (1, 2)]
    document = make_atif(played, credits)
    atif_schema.check(document)
    extras = [item["extra"] for item in document["steps"] if item["source"] == "agent"]
    assert [(item["reward"], item["advantage"]) for item in extras] == [(1.0, 0.5), (1.0, 0.25)]
    assert [item["unique_achievements"] for item in extras] == [("collect_wood",), ("eat_cow",)]
    assert document["final_metrics"]["extra"]["outcome_reward"] == 2.0
    assert (document["extra"]["seed"], document["session_id"]) == (7, played.rollout_id)
    assert make_atif(rollout(1, [()]).model_copy(update={"trajectory": None, "status": "failed"})) is None
