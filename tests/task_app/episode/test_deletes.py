"""deleteContext: what is deleted, and every id that is not, with its reason (DESIGN.md 4.12)."""

import json

import pytest

from task_app.episode.context_tools import apply
from task_app.protocols import ToolRequest
from tests.task_app.talking import asked, contents, edit, opened, read


def started():
    """System 0, task 1, turns 2 and 4 with the results 3 and 5; 3 is deleted, by turn 6 with the result 7."""
    return edit(read(read(opened(), "red"), "blue"), "deleteContext", message_ids=[3])


# The ten bad deletes of prior-art/verl.md 1.1, and similar ones.
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"message_ids": [99]}, "refused 99 (there is no such message; ids run from 0 to 8)"),
        ({"message_ids": [3.0]}, "refused 3.0 (an id is a whole number)"),
        ({"message_ids": [True]}, "refused True (an id is a whole number)"),
        ({"message_ids": [None]}, "refused None (an id is a whole number)"),
        ({"message_ids": [[2], {}]}, "refused a list (an id is a whole number), a dict (an id is a"),
        ({"message_ids": [-1]}, "refused -1 (there is no such message"),
        ({"message_ids": [10**40]}, "000... (there is no such message"),
        ({"message_ids": [3]}, "refused 3 (already deleted)"),
        ({"message_ids": [0]}, "refused 0 (the system message stays)"),
        ({"message_ids": [1]}, "refused 1 (the task stays)"),
        ({"message_ids": [8]}, "refused 8 (it belongs to this very turn)"),
        ({"message_ids": [3, 3]}, "refused 3 (already deleted), 3 (already deleted)"),
        ({"message_ids": ["2"]}, "refused '2' (an id is a whole number)"),
        ({"msg_id": "2"}, "refused '2' (an id is a whole number)"),
        ({"msg_id": [2]}, "refused a list (an id is a whole number)"),
    ],
)
def test_a_bad_id_is_refused_and_nothing_changes(arguments, reason):
    history = started()
    after, applied = asked(history, "deleteContext", **arguments)
    assert not applied.changes_view and applied.refused is None
    assert (applied.fields["status"], applied.fields["deleted_msg_ids"]) == ("error", [])
    assert reason in applied.fields["message"]
    assert after.changes() == history.changes()
    assert after.view()[: len(history)] == history.view()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "no message is named; give message_ids, a list of msg_id"),
        ({"message_ids": []}, "no message is named"),
        ({"message_ids": None, "msg_id": None}, "no message is named"),
        ({"message_ids": "2"}, "the argument 'message_ids' of deleteContext is '2': "),
        ({"message_ids": 2}, "the argument 'message_ids' of deleteContext is 2: "),
        ({"message_ids": {"0": 2}}, "the argument 'message_ids' of deleteContext is "),
        ({"ids": [2]}, "deleteContext has no argument 'ids'; known: message_ids, msg_id"),
        ({"message_ids": [2] * 1_001}, "message_ids holds 1001 ids; at most 1000 are read at once"),
        (None, "the arguments of deleteContext are no JSON object: '{oops'"),
    ],
)
def test_a_call_that_names_no_list_of_ids_is_refused_as_a_call(arguments, reason):
    history = started()
    applied = apply(history, ToolRequest("deleteContext", arguments, "{oops"))
    assert applied.history is history and not applied.changes_view
    assert reason in applied.refused and applied.text == f"error: {applied.refused}"


def test_good_ids_are_deleted_and_each_bad_one_has_its_reason():
    history, applied = asked(started(), "deleteContext", message_ids=[5, 0, 5, 2], msg_id=4)
    assert (
        json.loads(applied.text)
        == applied.fields
        == {
            "status": "success",
            "deleted_msg_ids": [5, 2, 4],
            "message": "refused 0 (the system message stays), 5 (named twice)",
        }
    )
    # The model reads the ids as further keys, and not as text within text.
    assert json.loads(contents(history)[-1]) == {
        "msg_id": 9,
        "msg_id(invoking_assistant)": 8,
        **applied.fields,
    }
    assert history.deleted_msg_ids == (2, 3, 4, 5)
    assert history.undo().deleted_msg_ids == (3,), "one call is one edit"


def test_of_many_bad_ids_the_first_twenty_have_their_reason():
    _, applied = asked(started(), "deleteContext", message_ids=[0] * 50)
    assert applied.text.count("the system message stays") == 20
    assert applied.fields["message"].endswith(" and 30 more")


def test_a_later_answer_of_the_user_may_be_deleted():
    history = read(opened(), "red")
    history = history.with_message(history[1].message)  # the user speaks again, as message 4
    history = edit(history, "deleteContext", message_ids=[4])
    assert contents(history)[4] == "[deleted]"


def test_results_of_the_same_turn_are_not_deleted_before_they_were_read():
    # turn 8 calls readChunk, answered as 9, and deleteContext of that 9
    history = read(started(), "green")
    applied = apply(history, ToolRequest("deleteContext", {"message_ids": [9]}))
    assert applied.fields["message"] == "refused 9 (it belongs to this very turn)"


def test_the_budget_tells_what_is_known():
    history = started()
    told = json.loads(contents(asked(history, "checkBudget")[0])[-1])["message"]
    # 9 messages when it is asked, of which 3 was deleted
    assert told == "8 of 9 messages shown in full"
