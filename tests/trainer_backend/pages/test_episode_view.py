"""An episode decision by decision: its lines, one decision, the messages that it saw."""

import pytest

from tests.trainer_backend.dialogues import TASK, dialogue, reader
from tests.trainer_backend.pages.hand_made import COW, WOOD, rollout
from trainer_backend.pages.episode_view import BAR_WIDTH, decision_lines, decision_view, draw_bar, show_prompt

CREDIT = [
    {"reward": 1.0, "return_to_go": 1.5, "advantage": 2.0, "episode_advantage": None, "state_key": "k"},
    {"reward": 0.5, "return_to_go": 0.5, "advantage": -1.0, "branch_returns": [1.0, -0.25]},
]
PLAYED = rollout(1, [WOOD, COW]).trajectory


def test_a_line_says_what_was_done_and_unlocked_and_its_advantage_on_the_scale_of_the_largest():
    first, second = decision_lines(PLAYED, CREDIT)
    assert (first["turn"], first["action"], first["unlocked"]) == (1, "do noop", ["collect wood"])
    assert (first["reward"], first["return_to_go"], first["advantage"]) == (1.0, 1.5, 2.0)
    assert first["bar"] == {"kind": "up", "x": BAR_WIDTH / 2, "width": BAR_WIDTH / 2}
    assert second["bar"] == {"kind": "down", "x": BAR_WIDTH / 4, "width": BAR_WIDTH / 4}


def test_an_episode_without_credit_has_lines_without_it_and_one_of_advantages_of_0_bars_without_length():
    assert [(line["advantage"], line["bar"]) for line in decision_lines(PLAYED, [])] == [(None, None)] * 2
    assert decision_view(PLAYED, [], 1)["credit"] == []
    assert draw_bar(0.0, 0.0)["width"] == 0.0


def test_a_conversation_s_line_says_what_was_called_or_written_and_what_was_paid():
    lines = decision_lines(dialogue(0.25, 1.0), [])
    assert [(line["action"], line["payments"]) for line in lines] == [
        ("answer 1", ["interaction +0.25"]), ("answer 2", ["interaction +1"]),
    ]  # fmt: skip
    assert decision_lines(reader(), [])[1]["action"] == 'deleteContext {"message_ids": [0, 2]}'


def test_a_decision_shows_the_credit_that_is_stored_and_leaves_out_what_is_not():
    view = decision_view(PLAYED, CREDIT, 2)
    assert [(name, value) for name, value, _ in view["credit"]] == [
        ("r_t", "+0.5"), ("return-to-go", "+0.5"), ("advantage", "−1"),  # noqa: RUF001
    ]  # fmt: skip
    assert view["branch_returns"] == ["+1", "−0.25"]  # noqa: RUF001
    assert [(name, value) for name, value, _ in view["measures"]] == [
        ("environment", "+1"), ("unique_delta", "1"), ("ach_delta", "1"),
    ]  # fmt: skip
    assert decision_view(PLAYED, CREDIT, 1)["state_key"] == "k"


def test_a_decision_says_how_its_advantage_follows_from_its_parts():
    parts = {"return": 1.5, "baseline": -0.5, "compared": 3.0, "branches": None}
    stored = CREDIT[0] | {"estimator": "stepwise", "advantage_parts": parts}
    assert decision_view(PLAYED, [stored], 1)["derivation"] == [
        (
            ["advantage ", "2", " = return ", "1.5", " − baseline ", "−0.5", ""],  # noqa: RUF001
            "baseline: mean of 3 siblings at this turn (0 for one that has ended)",
        )
    ]
    assert decision_view(PLAYED, CREDIT, 1)["derivation"] == [], "an earlier version stored no parts"
    gone = stored | {"estimator": "an estimator of a later version"}
    assert decision_view(PLAYED, [gone], 1)["derivation"] == []


def test_parts_that_an_earlier_version_stored_as_columns_are_shown_and_a_fresh_prompt_is_all_new():
    stored = {"advantage": 0.5, "episode_advantage": 0.25, "step_advantage": 0.75}
    names = [name for name, _, _ in decision_view(PLAYED, [stored], 1)["credit"]]
    assert names == ["A_E", "A_S", "advantage"]
    view = decision_view(PLAYED, [], 2)
    assert view["fresh"] and [message["state"] for message in view["prompt"]] == ["new"]


def test_what_follows_the_last_answer_stands_with_the_last_decision():
    """No prompt shows it any more: a result after the last answer."""
    assert decision_view(dialogue(1.0), [], 1)["after"] == []
    longer = reader().model_copy(update={"full_history": (*reader().full_history, TASK)})
    assert decision_view(longer, [], 3)["after"] == ["user: 2 + 2?"]
    assert decision_view(longer, [], 2)["after"] == []


def test_a_prompt_says_which_messages_are_new_and_what_stood_where_one_was_deleted():
    states = [[message["state"] for message in show_prompt(reader(), turn)] for turn in (1, 2, 3)]
    assert states == [["new"], ["kept", "new", "new"], ["kept", "kept", "edited", "new", "new"]]
    stub = show_prompt(reader(), 3)[2]
    assert (stub["text"], stub["was"]) == ("[deleted]", "the whole chunk")
    assert (stub["deleted"], stub["edited_at"]) == (True, 3)
    (call,) = show_prompt(reader(), 2)[1]["calls"]
    assert (call.function.name, call.function.arguments) == ("readChunk", '{"n": 1}')


def test_an_edit_that_is_taken_back_leaves_no_trace_and_one_that_deletes_nothing_is_no_deletion():
    episode = reader()
    *others, last = episode.steps
    whole = episode.full_history[2].model_copy(update={"content": "the whole chunk"})
    seen = {"messages": (), "messages_reused": 5, "changed": {2: others[1].observation_data.messages[1]}}
    undone = last.model_copy(
        update={"turn": 4, "observation_data": last.observation_data.model_copy(update=seen)}
    )
    back = episode.model_copy(update={"steps": (*episode.steps, undone)})
    assert whole.content == show_prompt(back, 4)[2]["text"]
    assert [message["state"] for message in show_prompt(back, 4)] == ["kept"] * 5
    kept = episode.model_copy(update={"deleted_msg_ids": ()})
    assert (show_prompt(kept, 3)[2]["state"], show_prompt(kept, 3)[2]["deleted"]) == ("edited", False)


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_the_prompt_is_the_one_that_the_wire_s_own_rule_gives(turn):
    from shared_schemas.trajectory import prompts

    wanted = list(prompts(reader().steps))[turn - 1]
    assert [message["text"] for message in show_prompt(reader(), turn)] == [
        message.content or "" for message in wanted
    ]
