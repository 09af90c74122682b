import pytest

from shared_schemas.messages import Message
from shared_schemas.trajectory import StopReason
from task_app.episode.context_tools import apply
from task_app.episode.history import History
from task_app.protocols import ToolRequest
from tests.trainer_backend.core.test_segments import step
from tests.trainer_backend.dialogues import AGAIN, TASK, call, decision, dialogue, reader, said, trajectory
from trainer_backend.core.conversations import (
    context_metrics,
    failure_metrics,
    interaction_metrics,
    refused_edits,
    segment_metrics,
    user_turns,
)
from trainer_backend.core.segments import build_segments

LATE, NEVER = dialogue(0.0, 1.0), dialogue(0.0, 0.0, 0.0)
PLAIN = LATE.model_copy(update={"full_history": ()})  # as of an environment with fresh prompts


def test_answers_are_counted_and_their_scores_followed_by_turn():
    # one episode is right at its second answer and ends; the other is wrong three times
    assert interaction_metrics([LATE, NEVER]) == {
        "interaction/score": 1 / 5,
        "interaction/answers": 5 / 2,
        "interaction/user_turns": 3 / 2,
        "interaction/score_by_turn": [0.0, 0.5, 0.5],
    }


def test_the_last_score_by_turn_is_the_mean_outcome():
    played = [dialogue(0.25), dialogue(1.0, 0.5), NEVER]
    by_turn = interaction_metrics(played)["interaction/score_by_turn"]
    assert by_turn[-1] == pytest.approx(sum(item.outcome_reward for item in played) / 3)


def test_an_answer_without_a_score_changes_no_score():
    assert interaction_metrics([dialogue(0.5, None, outcome_reward=0.5)])["interaction/score_by_turn"] == [
        0.5,
        0.5,
    ]


def test_without_a_scored_answer_or_a_history_there_is_nothing_to_tell():
    assert interaction_metrics([dialogue(None, outcome_reward=0.0)]) == {}
    assert interaction_metrics([PLAIN]) == context_metrics([PLAIN]) == segment_metrics([]) == {}


def test_what_opens_a_conversation_is_no_turn_of_the_user():
    assert user_turns(trajectory(LATE.steps, [TASK, said("a"), TASK])) == 1
    examples = [TASK, said("4"), TASK, said("4"), TASK]  # few-shot: an answer in them is not the model's
    opened = [decision(1, examples, reused=0)]
    assert user_turns(trajectory(opened, [*examples, said("4"), AGAIN, said("5")])) == 1
    assert user_turns(trajectory(opened, examples)) == user_turns(trajectory([], examples)) == 0


def test_edits_and_the_longest_context_are_means_over_conversations():
    over = dialogue(0.0, stop_reason=StopReason.CONTEXT_LENGTH)
    assert context_metrics([reader(), over, PLAIN]) == {
        "statelm/deletes": 0.5,
        "statelm/edited": 0.5,
        "statelm/refused_edits": 0.5,
        "statelm/context_length_exceeded": 0.5,
        "statelm/peak_context": (53 + 13) / 2,  # 50 and 10 of prompts, 3 of each answer
    }


def test_a_peak_that_no_server_counted_is_left_out():
    uncounted = [
        item.model_copy(update={"step_info": item.step_info.model_copy(update={"prompt_tokens": None})})
        for item in LATE.steps
    ]
    assert "statelm/peak_context" not in context_metrics([trajectory(uncounted, LATE.full_history)])


@pytest.mark.parametrize(
    ("tool", "arguments", "refused"),
    [
        ("deleteContext", {"message_ids": [3]}, 0),
        ("deleteContext", {"message_ids": [3, 0]}, 1),
        ("deleteContext", {"message_ids": [0, 1, 99]}, 1),
        ("deleteContext", {}, 1),
        ("deleteContext", None, 1),
        ("deletePart", {"msg_id": 3, "start": "no such", "end": "words"}, 1),
        ("deletePart", {"msg_id": 3, "start": "one", "end": "two"}, 0),
        ("summarizeContext", {"message_ids": [1], "summary": "s"}, 1),
        ("checkBudget", {}, 0),
    ],
)  # fmt: skip
def test_what_a_task_app_refuses_is_counted_by_the_words_that_it_refuses_with(tool, arguments, refused):
    history = History.start([Message(role="system", content="s"), TASK], shows_ids=True)
    for made, text in ((call("readChunk"), "one two three"), (call(tool), None)):
        history = history.with_message(Message(role="assistant", content="", tool_calls=(made,)))
        if text is None:
            applied = apply(history, ToolRequest(tool, arguments, "{oops"))
            history, text = applied.history, applied.text
        history = history.with_result(made, text)
    assert refused_edits(trajectory(LATE.steps, history.full_history())) == refused


def test_another_tool_may_say_refused():
    assert (
        refused_edits(trajectory([], [TASK, Message(role="tool", content="a; refused b", tool_name="t")]))
        == 0
    )


def test_tokens_that_stand_again_in_a_new_segment_are_masked_there():
    # 1 2 | 3 4, then after a delete 1 2 7 | 8: five tokens of context in two segments; and 5 | 6 in one
    edited = build_segments([step(1, 0, [1, 2], [3, 4]), step(2, 2, [7], [8])], rollout_id="a")
    plain = build_segments([step(1, 0, [5], [6])], rollout_id="b")
    assert segment_metrics([edited, plain]) == {"statelm/segments": 1.5, "statelm/masked_tokens": 3.0}


def test_a_timeout_is_a_failure_of_the_interaction_too():
    failures = {"interaction_deadline": 2, "interaction_failed": 1, "critical_error": 9}
    assert failure_metrics(failures) == {"interaction/timeouts": 2.0, "interaction/failures": 3.0}
    assert failure_metrics({}) == {"interaction/timeouts": 0.0, "interaction/failures": 0.0}
