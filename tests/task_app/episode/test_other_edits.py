"""Parts, summaries, undo and redo, the budget, and what the window manager proposes."""

import json

import pytest

from task_app.episode.context_tools import (
    CONTEXT_TOOLS,
    Budget,
    apply,
    context_specs,
    cut,
    propose_deletes,
)
from task_app.protocols import ToolRequest
from tests.task_app.talking import asked, contents, edit, opened, read


def told(history, msg_id):
    return json.loads(contents(history)[msg_id])["message"]


def test_a_part_is_cut_from_its_first_words_through_its_last():
    history = edit(
        read(opened(), "red sky, blue sea, green land"), "deletePart", msg_id=3, start="blue", end="sea, "
    )
    assert told(history, 3) == "red sky, [10 characters deleted]green land"
    assert history.deleted_msg_ids == ()


def test_parts_of_one_message_join_where_they_touch():
    text = "abcdefghij"
    first = cut(text, (), "cd", "cd")
    assert (first.text, first.spans, first.chars) == ("ab[2 characters deleted]efghij", ((2, 4),), 2)
    second = cut(text, first.spans, "b", "f")
    assert (second.text, second.spans, second.chars) == ("a[5 characters deleted]ghij", ((1, 6),), 3)


def test_what_was_cut_is_not_found_again():
    # "xy" stands at 0 and 4; the first is cut, so the second is meant
    text = "xy--xy--"
    first = cut(text, (), "xy", "xy")
    assert cut(text, first.spans, "xy", "xy").spans == ((0, 2), (4, 6))
    with pytest.raises(ValueError, match="does not hold the words 'xy'"):
        cut(text, ((0, 2), (4, 6)), "xy", "xy")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"msg_id": 3, "start": "blue", "end": "sea"}, "message 3: it does not hold the words 'blue'"),
        ({"msg_id": 3, "start": "sky", "end": "red"}, "message 3: the words 'red' do not follow 'sky'"),
        ({"msg_id": 1, "start": "W", "end": "W"}, "refused 1 (the task stays)"),
        ({"msg_id": "3", "start": "red", "end": "red"}, "refused '3' (an id is a whole number)"),
    ],
)
def test_a_part_that_is_not_there_changes_nothing(arguments, reason):
    _, applied = asked(read(opened(), "red sky"), "deletePart", **arguments)
    assert applied.text == f"deleted nothing; {reason}" and not applied.changes_view


def test_a_summary_stands_in_place_of_the_first_of_its_messages():
    history = read(read(opened(), "the harbour is red"), "the rest is blue")
    history = edit(history, "summarizeContext", message_ids=[5, 3, 4], summary="harbour: red")
    assert told(history, 3) == "[summary of 3, 4, 5] harbour: red"
    assert contents(history)[4] == "[deleted]"
    assert contents(history)[5] == "[deleted]"
    assert history.deleted_msg_ids == (3, 4, 5)


def test_a_summary_may_itself_be_summarized_or_deleted_but_not_in_part():
    history = edit(read(opened(), "red"), "summarizeContext", message_ids=[2, 3], summary="red")
    _, applied = asked(history, "deletePart", msg_id=2, start="red", end="red")
    assert applied.text == "deleted nothing; message 2 holds a summary, which is deleted as a whole"
    again = edit(history, "summarizeContext", message_ids=[2, 4], summary="still red")
    assert contents(again)[2] == "[summary of 2, 4] still red"
    gone = edit(again, "deleteContext", message_ids=[2])
    assert contents(gone)[2] == "[deleted]"


def test_a_summary_of_nothing_changes_nothing():
    _, applied = asked(opened(), "summarizeContext", message_ids=[0, 1], summary="all")
    assert applied.text.startswith("summarized nothing; refused 0 (the system") and not applied.changes_view


def test_undo_shows_what_was_deleted_and_redo_deletes_it_again():
    before = read(opened(), "red")
    deleted = edit(before, "deleteContext", message_ids=[3])
    undone = edit(deleted, "undoEdit")
    assert undone.view()[:4] == before.view()
    redone = edit(undone, "redoEdit")
    assert redone.view()[:4] == deleted.view()[:4]
    assert told(redone, 9) == "done again; deleted now: 3"


def test_there_is_nothing_to_redo_after_another_edit():
    history = edit(edit(read(opened(), "red"), "deleteContext", message_ids=[3]), "undoEdit")
    history = edit(history, "deleteContext", message_ids=[2])
    for tool, text in (("redoEdit", "there is no undone change to make again"),):
        _, applied = asked(history, tool)
        assert (applied.text, applied.changes_view) == (text, False)
    assert asked(opened(), "undoEdit")[1].text == "there is no change of the context to undo"


def test_the_least_important_messages_are_proposed_until_enough_would_be_freed():
    # The task names "harbour": the second result is used, the first is not; both are long.
    history = read(read(opened(), "cloud " * 30), "harbour " * 30)
    first, *rest = propose_deletes(history, chars=100)
    assert first.msg_id == 3 and not rest
    # Seven messages. No other message names the "cloud" of 3: (3/7 + 0) / 2. The words of 2, 4 and 5 are all
    # named later or by the task: (2/7 + 1) / 2, (4/7 + 1) / 2 and (5/7 + 1) / 2. 6 is the turn under way.
    everything = propose_deletes(history.with_message(history[2].message), chars=10**6)
    assert [(one.msg_id, round(14 * one.importance)) for one in everything] == [
        (3, 3),
        (2, 9),
        (4, 11),
        (5, 12),
    ]
    # 30 times "cloud " is 180 characters; the ids around it go too, and "[deleted]" (9) stays.
    assert everything[0].chars == len(contents(history)[3]) - 9 > 180


def test_a_proposal_names_only_what_deleteContext_takes_and_edits_nothing():
    history = read(read(opened(), "cloud " * 30), "harbour " * 30)
    after, applied = asked(history, "proposeDeletes", chars=10**6)
    assert not applied.changes_view and applied.text.startswith("least important first, ")
    ids = [one.msg_id for one in propose_deletes(after, chars=10**6)]
    _, deleted = asked(after, "deleteContext", message_ids=ids)
    assert "refused" not in deleted.text
    assert asked(opened(), "proposeDeletes", chars=1)[1].text == "there is no message left to delete"


def test_the_budget_counts_tokens_of_the_last_reply_and_turns():
    budget = Budget(used_tokens=900, max_tokens=1_024, decisions_left=7)
    applied = apply(opened(), ToolRequest("checkBudget", {}), budget=budget)
    assert applied.text == "900 of 1024 tokens of context used; 7 turns left; 2 of 2 messages shown in full"


def test_the_published_tools_are_offered_and_the_others_by_name():
    assert [spec.function.name for spec in context_specs()] == ["deleteContext", "checkBudget"]
    named = context_specs(CONTEXT_TOOLS)
    assert [spec.function.name for spec in named] == list(CONTEXT_TOOLS)
    assert all(spec.function.description for spec in named)
    ids = named[0].function.parameters["properties"]["message_ids"]
    assert ids["type"] == "array" and ids["items"] == {"type": "integer", "minimum": 0}
