"""The teacher of documents: what it does follows from its prompt alone."""

import json

import pytest

from shared_schemas.messages import Message
from shared_schemas.trajectory import Trajectory, prompts
from task_app.plugins import default_plug_boards
from task_app.policies.documents import (
    UNKNOWN,
    DocumentsTeacher,
    DocumentsTeacherConfig,
    ToolResult,
    deletable,
)
from task_app.protocols import PolicyObservation
from tests.task_app.counting import running_app
from tests.task_app.rollout_client import play

CHUNK = 1_000
FACT = "The code of Amber Harbour is"


def request(seed=0, *, edits=True, forgets=0.0, indexed=True, **generate):
    made = {"kind": "needle", "chars": 20 * CHUNK, "distractors": 3, **generate}
    config = {"generate": made, "chunk_size": CHUNK, "indexed": indexed}
    config |= {"tools": ["readChunk", "finish"]} if indexed else {}
    return {
        "rollout_id": f"{seed}",
        "run_id": "r",
        "start": {"seed": seed},
        "env": {"env_name": "documents", "config": config},
        "policy": {"policy_name": "documents_teacher", "config": {"forgets": forgets, "seed": seed}},
        "multi_turn": {"statelm_enabled": edits},
    }


async def played(*requests) -> list[Trajectory]:
    async with running_app(default_plug_boards()) as client:
        return [rollout.trajectory for rollout in (await play(client, *requests)).values()]


def most_chars(trajectory: Trajectory) -> int:
    """Of its longest prompt, without the system's message and the task."""
    shown = [seen[2:] for seen in prompts(trajectory.steps)]
    return max(sum(len(message.content or "") for message in messages) for messages in shown)


def names(trajectory: Trajectory, t: int) -> list[str]:
    return [call.function.name for call in trajectory.steps[t].tool_calls]


@pytest.mark.parametrize("kind", ["needle", "keeper"])
async def test_it_answers_whatever_is_asked_and_shows_less_than_three_chunks(kind):
    # Among so many documents some have the fact on the border of two chunks.
    for trajectory in await played(*(request(seed, kind=kind, chars=7 * CHUNK) for seed in range(16))):
        assert trajectory.outcome_reward == 1.0
        assert not any(step.step_info.invalid_reason for step in trajectory.steps)
        assert most_chars(trajectory) < 3 * CHUNK


async def test_without_the_tool_it_reads_on_and_shows_all_that_it_read():
    for trajectory in await played(*(request(seed, edits=False) for seed in range(5))):
        assert trajectory.outcome_reward == 1.0 and not trajectory.had_delete_operation
        chunks = len(trajectory.steps) - 1
        assert most_chars(trajectory) > 0.9 * chunks * CHUNK


async def test_in_one_message_it_deletes_and_reads_and_it_forgets_as_often_as_it_is_told_to():
    (never,) = await played(request(7, chars=50 * CHUNK))
    assert names(never, 0) == ["readChunk"]
    assert names(never, 1) == ["deleteContext", "readChunk"]
    (always,) = await played(request(7, chars=50 * CHUNK, forgets=1.0))
    assert always.outcome_reward == 1.0 and not always.had_delete_operation
    half = await played(*(request(seed, chars=30 * CHUNK, forgets=0.5) for seed in range(10)))
    turns = [names(trajectory, t) for trajectory in half for t in range(1, len(trajectory.steps) - 1)]
    assert sum(len(turn) == 1 for turn in turns) / len(turns) == pytest.approx(0.5, abs=0.07)


async def test_it_builds_the_index_where_there_is_none():
    (trajectory,) = await played(request(indexed=False))
    assert names(trajectory, 0) == ["buildIndex"] and trajectory.outcome_reward == 1.0


async def test_a_question_that_it_does_not_know_is_answered_at_the_end_of_the_document():
    (trajectory,) = await played(request(kind="hops", chars=3 * CHUNK))
    assert json.loads(trajectory.steps[-1].tool_calls[0].function.arguments) == {"answer": UNKNOWN}
    assert "read to its end" in trajectory.steps[-2].step_info.tool_result


def chunk(text: str, msg_id: int, invoking: int) -> ToolResult:
    return ToolResult(f"chunk 3 of 0 to 9:\n{text}", msg_id, invoking)


def test_all_goes_but_a_chunk_whose_end_may_be_the_beginning_of_the_fact():
    before = [ToolResult("deleted 1, 2", 4, 3), chunk("Rain fell.", 5, 3)]
    assert deletable([*before, chunk("It rained. Ada", 7, 6)], FACT) == [3, 4, 5, 6, 7]
    for end in ("The", "The code of Amber", "The code of Amber Harbour is 48"):
        assert deletable([*before, chunk(f"It rained. {end}", 7, 6)], FACT) == [3, 4, 5]
    # What follows the last full stop is nothing.
    assert deletable([chunk("It rained. ", 2, 1)], FACT) == [1, 2]
    # Of the turn whose chunk stays the other results go, and the message that called stays.
    assert deletable([ToolResult("deleted 1", 4, 3), chunk("The code", 5, 3)], FACT) == [4]


def test_results_without_ids_are_not_deleted():
    assert deletable([ToolResult.of("chunk 0 of 0 to 9:\nRain fell.")], FACT) == []


async def test_it_goes_on_from_a_snapshot_as_it_would_have():
    told = {"msg_id": 2, "msg_id(invoking_assistant)": 1, "message": "chunk 0 of 0 to 9:\nRain."}
    result = Message(role="tool", tool_call_id="c", content=json.dumps(told))
    task = Message(role="user", content="What is the code of Amber Harbour?")
    seen = PolicyObservation((task, result), {})
    offered = [{"type": "function", "function": {"name": "deleteContext"}}]

    async def turns(teacher: DocumentsTeacher, count: int) -> list[int]:
        return [len((await teacher.get_action(seen, offered))[0]["tool_calls"]) for _ in range(count)]

    teacher = DocumentsTeacher(DocumentsTeacherConfig(forgets=0.5, seed=4))
    await turns(teacher, 5)
    other = DocumentsTeacher()
    other.config = teacher.config
    other.restore(teacher.snapshot())
    assert await turns(other, 40) == await turns(teacher, 40)


@pytest.mark.parametrize(
    ("question", "read"),
    [
        ("What is the code of " * 100_000, "nothing"),
        ("What is the code of a ?? What is the code of b", "nothing"),
        ("a " * 500_000, "a " * 1_000_000 + "b"),
        ("", "a" * 2_000_000),
    ],
    ids=["beginnings of a question", "marks", "a fact that overlaps itself", "one word"],
)
async def test_a_question_and_a_document_of_megabytes_are_read_in_one_go(question, read):
    seen = [
        Message(role="user", content=question),
        Message(role="tool", content=f"chunk 0 of 0 to 1:\n{read}"),
    ]
    # The square of the first would take longer than a test may; a pass over any of them takes milliseconds.
    await DocumentsTeacher().get_action(PolicyObservation(tuple(seen), {}))


@pytest.mark.parametrize(
    "content",
    ['{"msg_id": 1}', '{"msg_id": [], "message": "x", "msg_id(invoking_assistant)": 0}', "[1]", "{"],
)
def test_a_result_that_only_looks_like_one_with_an_id_is_its_text(content):
    assert ToolResult.of(content) == ToolResult(content)
