"""The history of a conversation: ids, the view with stubs, moments that share what they have in common."""

import json
import sys

import pytest

from shared_schemas.messages import Message
from task_app.episode.history import History
from tests.task_app.talking import OPENING, asked, assistant, contents, edit, opened, read


def test_ids_count_all_messages_from_0_in_order_of_append():
    history = read(read(opened(), "red"), "blue", "green")
    # system 0, task 1; assistant 2 and its result 3; assistant 4 and its results 5 and 6
    assert [entry.msg_id for entry in history] == [0, 1, 2, 3, 4, 5, 6]
    assert [entry.invoking for entry in history] == [None, None, None, 2, None, 4, 4]
    assert (history.first_user_id, history.last_assistant_id) == (1, 4)


def test_a_tool_result_tells_its_ids_where_a_model_may_edit_its_context():
    shown = contents(read(opened(), "red"))[-1]
    assert json.loads(shown) == {"msg_id": 3, "msg_id(invoking_assistant)": 2, "message": "red"}


def test_without_editing_the_view_is_the_messages_as_they_were_said():
    history = read(opened(shows_ids=False), "red")
    call = assistant(2, ("readChunk", {"chunk_id": 0}), content="Reading on.")
    result = Message(role="tool", content="red", tool_call_id="call-2-0")
    assert history.view() == (*OPENING, call, result)


def test_a_stub_keeps_role_tool_name_and_call_id():
    history = edit(read(opened(), "red"), "deleteContext", message_ids=[2, 3])
    said, result = history.view()[2:4]
    (call,) = said.tool_calls
    assert (said.role, said.content) == ("assistant", "[deleted]")
    assert (call.id, call.function.name, call.function.arguments) == ("call-2-0", "readChunk", "{}")
    assert (result.role, result.tool_call_id, result.content) == ("tool", "call-2-0", "[deleted]")


def test_the_stub_of_a_call_without_words_has_none_either():
    history, _ = asked(opened(), "checkBudget")
    history = edit(history, "deleteContext", message_ids=[2])
    (call,) = history.view()[2].tool_calls
    assert (history.view()[2].content, call.function.arguments) == ("", "{}")


def test_the_full_history_keeps_what_was_deleted_under_the_published_keys():
    history = edit(read(opened(), "red"), "deleteContext", message_ids=[3])
    told = [message.model_dump(exclude_none=True) for message in history.full_history()][2:4]
    assert told[0]["msg_id"] == 2 and told[0]["content"] == "Reading on."
    assert told[1] == {
        "role": "tool",
        "content": "red",
        "tool_call_id": "call-2-0",
        "tool_name": "readChunk",
        "msg_id": 3,
        "msg_id(invoking_assistant)": 2,
    }
    assert history.deleted_msg_ids == (3,)


def test_every_edit_leaves_the_history_before_it_as_it_was():
    first = read(opened(), "red")
    second = read(edit(first, "deleteContext", message_ids=[3]), "blue")
    third = edit(second, "deleteContext", msg_id=2)
    assert [one.deleted_msg_ids for one in (first, second, third)] == [(), (3,), (2, 3)]
    assert [one.had_delete_operation for one in (first, second, third)] == [False, True, True]
    assert third.undo().view()[: len(second)] == second.view()
    assert third.undo().undo().view()[: len(first)] == first.view()
    assert third.undo().undo().had_delete_operation


def test_histories_share_their_messages():
    history = read(opened(), "red")
    histories = [history]
    for _ in range(20):
        history = read(edit(history, "deleteContext", msg_id=len(history) - 1), "blue")
        histories.append(history)
    assert len({id(one._log) for one in histories}) == 1


def test_an_earlier_moment_can_be_continued_without_touching_the_later_one():
    moment = read(opened(), "red")
    one, other = read(moment, "blue"), read(moment, "green")
    assert json.loads(contents(one)[-1])["message"] == "blue"
    assert json.loads(contents(other)[-1])["message"] == "green"
    assert len(moment) == 4


def test_half_a_character_in_a_result_becomes_a_question_mark():
    assert json.loads(contents(read(opened(), "a\ud83d"))[-1])["message"] == "a?"


def test_a_conversation_needs_an_opening_and_a_result_needs_a_caller():
    with pytest.raises(ValueError, match="at least one message"):
        History.start((), shows_ids=True)
    (call,) = assistant(2, ("readChunk", {})).tool_calls
    with pytest.raises(ValueError, match="'readChunk'"):
        opened().with_result(call, "red")


def test_an_edit_names_messages_that_are_there():
    history = opened()
    assert history.with_edit({}) is history
    with pytest.raises(ValueError, match="id 9; ids run from 0 to 1"):
        history.with_edit({9: None})
    with pytest.raises(IndexError, match="ids run from 0 to 1"):
        history[2]


def test_a_long_chain_of_edits_costs_no_recursion():
    history = read(opened(), "red")
    for _ in range(sys.getrecursionlimit() + 100):
        history, _ = asked(history, "deleteContext", msg_id=3)
        history, _ = asked(history, "undoEdit")
    assert history.deleted_msg_ids == () and history.had_delete_operation
    del history
