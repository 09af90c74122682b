"""The history of a conversation and its edits: ids, stubs, deletes, summaries, undo (DESIGN.md 4.12)."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_schemas.messages import FunctionCall, Message, ToolCall
from task_app.episode.context_tools import (
    CONTEXT_TOOLS,
    Budget,
    EditResult,
    apply,
    context_specs,
    cut,
    propose_deletes,
)
from task_app.episode.history import History
from task_app.protocols import ToolRequest

QUESTION = Message(role="user", content="Which colour is the harbour?")
OPENING = (Message(role="system", content="You read."), QUESTION)


def opened(*, shows_ids: bool = True) -> History:
    """System 0, task 1."""
    return History.start(OPENING, shows_ids=shows_ids)


def assistant(msg_id: int, *calls: tuple[str, Any], content: str = "") -> Message:
    """Call ids follow from the message's own id."""
    made = tuple(
        ToolCall(id=f"call-{msg_id}-{i}", function=FunctionCall(name=name, arguments=json.dumps(arguments)))
        for i, (name, arguments) in enumerate(calls)
    )
    return Message(role="assistant", content=content, tool_calls=made or None)


def read(history: History, *texts: str) -> History:
    """After a turn that calls readChunk once for each text, and is answered with them."""
    calls = [("readChunk", {"chunk_id": i}) for i in range(len(texts))]
    message = assistant(len(history), *calls, content="Reading on.")
    history = history.with_message(message)
    for call, text in zip(message.tool_calls or (), texts, strict=True):
        history = history.with_result(call, text)
    return history


def asked(history: History, tool: str, **arguments: Any) -> tuple[History, EditResult]:
    """After a turn that calls a context tool, its result appended; and what the tool did."""
    assert tool in CONTEXT_TOOLS
    message = assistant(len(history), (tool, arguments))
    assert message.tool_calls is not None
    applied = apply(history.with_message(message), ToolRequest(tool, arguments))
    return applied.history.with_result(message.tool_calls[0], applied.text, fields=applied.fields), applied


def edit(history: History, tool: str, **arguments: Any) -> History:
    """The same, for an edit that is expected to be made."""
    history, applied = asked(history, tool, **arguments)
    assert applied.changes_view, applied.text
    return history


def contents(history: History) -> list[str | None]:
    return [message.content for message in history.view()]


def test_ids_count_all_messages_from_0_in_order_of_append():
    history = read(read(opened(), "red"), "blue", "green")
    # system 0, task 1; assistant 2 and its result 3; assistant 4 and its results 5 and 6
    assert [entry.msg_id for entry in history] == [0, 1, 2, 3, 4, 5, 6]
    assert [entry.invoking for entry in history] == [None, None, None, 2, None, 4, 4]
    assert (history.first_user_id, history.last_assistant_id) == (1, 4)
    told = {"msg_id": 3, "msg_id(invoking_assistant)": 2, "message": "red"}
    assert json.loads(contents(history)[3]) == told, "a model that may edit its context reads them"


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
    wordless, _ = asked(opened(), "checkBudget")
    stub = edit(wordless, "deleteContext", message_ids=[2]).view()[2]
    assert (stub.content, stub.tool_calls[0].function.arguments) == ("", "{}")


def test_the_full_history_keeps_what_was_deleted_under_the_published_keys():
    history = edit(read(opened(), "red"), "deleteContext", message_ids=[3])
    told = [message.model_dump(exclude_none=True) for message in history.full_history()][2:4]
    assert told[0]["msg_id"] == 2 and told[0]["content"] == "Reading on."
    assert told[1] == {
        "role": "tool", "content": "red", "tool_call_id": "call-2-0", "tool_name": "readChunk",
        "msg_id": 3, "msg_id(invoking_assistant)": 2,
    }  # fmt: skip
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
    one, other = read(moment, "blue"), read(moment, "gr\ud83d")
    assert json.loads(contents(one)[-1])["message"] == "blue"
    assert json.loads(contents(other)[-1])["message"] == "gr?", "half a character is a question mark"
    assert len(moment) == 4


def test_what_is_not_there_is_neither_answered_nor_edited():
    history = opened()
    (call,) = assistant(2, ("readChunk", {})).tool_calls
    assert history.with_edit({}) is history
    with pytest.raises(ValueError, match="at least one message"):
        History.start((), shows_ids=True)
    with pytest.raises(ValueError, match="'readChunk'"):
        history.with_result(call, "red")
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
    refusal = "refused 0 (the system message stays), 5 (named twice)"
    assert applied.fields == {"status": "success", "deleted_msg_ids": [5, 2, 4], "message": refusal}
    assert json.loads(applied.text) == applied.fields
    # The model reads the ids as further keys, and not as text within text.
    ids = {"msg_id": 9, "msg_id(invoking_assistant)": 8}
    assert json.loads(contents(history)[-1]) == ids | applied.fields
    assert history.deleted_msg_ids == (2, 3, 4, 5)
    assert history.undo().deleted_msg_ids == (3,), "one call is one edit"


def test_of_many_bad_ids_the_first_twenty_have_their_reason():
    _, applied = asked(started(), "deleteContext", message_ids=[0] * 50)
    assert applied.text.count("the system message stays") == 20
    assert applied.fields["message"].endswith(" and 30 more")


def test_a_later_answer_of_the_user_may_be_deleted_and_no_result_before_it_was_read():
    history = read(opened(), "red")
    history = history.with_message(history[1].message)  # the user speaks again, as message 4
    history = edit(history, "deleteContext", message_ids=[4])
    assert contents(history)[4] == "[deleted]"
    # turn 8 calls readChunk, answered as 9, and deleteContext of that 9
    applied = apply(read(started(), "green"), ToolRequest("deleteContext", {"message_ids": [9]}))
    assert applied.fields["message"] == "refused 9 (it belongs to this very turn)"


def test_the_budget_counts_messages_tokens_of_the_last_reply_and_turns():
    # 9 messages when it is asked, of which 3 was deleted
    history, applied = asked(started(), "checkBudget")
    assert told(history, -1) == applied.text == "8 of 9 messages shown in full"
    budget = Budget(used_tokens=900, max_tokens=1_024, decisions_left=7)
    applied = apply(opened(), ToolRequest("checkBudget", {}), budget=budget)
    assert applied.text == "900 of 1024 tokens of context used; 7 turns left; 2 of 2 messages shown in full"


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


def part(msg_id, start, end):
    return {"msg_id": msg_id, "start": start, "end": end}


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("deletePart", part(3, "blue", "sea"), "message 3: it does not hold the words 'blue'"),
        ("deletePart", part(3, "sky", "red"), "message 3: the words 'red' do not follow 'sky'"),
        ("deletePart", part(1, "W", "W"), "refused 1 (the task stays)"),
        ("deletePart", part("3", "red", "red"), "refused '3' (an id is a whole number)"),
        ("summarizeContext", {"message_ids": [0], "summary": "all"}, "refused 0 (the system message stays)"),
    ],
)
def test_a_part_that_is_not_there_and_a_summary_of_nothing_change_nothing(tool, arguments, told):
    _, applied = asked(read(opened(), "red sky"), tool, **arguments)
    done = {"deletePart": "deleted", "summarizeContext": "summarized"}[tool]
    assert applied.text.startswith(f"{done} nothing; {told}") and not applied.changes_view


def test_a_summary_stands_in_place_of_the_first_of_its_messages():
    history = read(read(opened(), "the harbour is red"), "the rest is blue")
    history = edit(history, "summarizeContext", message_ids=[5, 3, 4], summary="harbour: red")
    assert told(history, 3) == "[summary of 3, 4, 5] harbour: red"
    assert contents(history)[4:6] == ["[deleted]"] * 2
    assert history.deleted_msg_ids == (3, 4, 5)


def test_a_summary_may_itself_be_summarized_or_deleted_but_not_in_part():
    history = edit(read(opened(), "red"), "summarizeContext", message_ids=[2, 3], summary="red")
    _, applied = asked(history, "deletePart", msg_id=2, start="red", end="red")
    assert applied.text == "deleted nothing; message 2 holds a summary, which is deleted as a whole"
    again = edit(history, "summarizeContext", message_ids=[2, 4], summary="still red")
    assert contents(again)[2] == "[summary of 2, 4] still red"
    gone = edit(again, "deleteContext", message_ids=[2])
    assert contents(gone)[2] == "[deleted]"


def test_there_is_nothing_to_redo_after_another_edit():
    history = edit(edit(read(opened(), "red"), "deleteContext", message_ids=[3]), "undoEdit")
    history = edit(history, "deleteContext", message_ids=[2])
    _, applied = asked(history, "redoEdit")
    assert (applied.text, applied.changes_view) == ("there is no undone change to make again", False)
    assert asked(opened(), "undoEdit")[1].text == "there is no change of the context to undo"


def test_the_least_important_messages_are_proposed_until_enough_would_be_freed():
    # The task names "harbour": the second result is used, the first is not; both are long.
    history = read(read(opened(), "cloud " * 30), "harbour " * 30)
    first, *rest = propose_deletes(history, chars=100)
    assert first.msg_id == 3 and not rest
    # Seven messages. No other message names the "cloud" of 3: (3/7 + 0) / 2. The words of 2, 4 and 5 are all
    # named later or by the task: (2/7 + 1) / 2, (4/7 + 1) / 2 and (5/7 + 1) / 2. 6 is the turn under way.
    everything = propose_deletes(history.with_message(history[2].message), chars=10**6)
    proposed = [(one.msg_id, round(14 * one.importance)) for one in everything]
    assert proposed == [(3, 3), (2, 9), (4, 11), (5, 12)]
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


def test_the_published_tools_are_offered_and_the_others_by_name():
    assert [spec.function.name for spec in context_specs()] == ["deleteContext", "checkBudget"]
    named = context_specs(CONTEXT_TOOLS)
    assert [spec.function.name for spec in named] == list(CONTEXT_TOOLS)
    assert all(spec.function.description for spec in named)
    ids = named[0].function.parameters["properties"]["message_ids"]
    assert ids["type"] == "array" and ids["items"] == {"type": "integer", "minimum": 0}


IDS = st.lists(st.one_of(st.integers(-2, 30), st.text(max_size=2), st.booleans(), st.none()), max_size=4)
MOVES = st.one_of(
    st.tuples(st.just("read"), st.lists(st.text(max_size=12), min_size=1, max_size=3)),
    st.tuples(st.just("deleteContext"), st.fixed_dictionaries({"message_ids": IDS})),
    st.tuples(
        st.just("summarizeContext"),
        st.fixed_dictionaries({"message_ids": IDS, "summary": st.text(min_size=1, max_size=8)}),
    ),
    st.tuples(
        st.just("deletePart"),
        st.fixed_dictionaries(
            {
                "msg_id": st.integers(0, 30),
                "start": st.text("eai", min_size=1, max_size=2),
                "end": st.just("n"),
            }
        ),
    ),
    st.tuples(st.sampled_from(["undoEdit", "redoEdit", "checkBudget"]), st.just({})),
)


def played(moves) -> History:
    history = opened()
    for name, given_ in moves:
        history = read(history, *given_) if name == "read" else asked(history, name, **given_)[0]
    return history


def pairs(messages) -> list[tuple[str, list[str], list[str]]]:
    """For every assistant message the call ids it makes, and those that the results behind it answer."""
    found: list[tuple[str, list[str], list[str]]] = []
    for message in messages:
        if message.role == "assistant":
            calls = message.tool_calls or ()
            found.append((message.role, [call.id for call in calls], []))
        elif message.role == "tool":
            found[-1][2].append(message.tool_call_id)
    return found


@settings(deadline=None, max_examples=60)
@given(st.lists(MOVES, max_size=12))
def test_ids_are_places_and_no_view_loses_a_message_or_a_pair_of_call_and_result(moves):
    history = played(moves)
    said = history.full_history()
    assert [message.model_extra["msg_id"] for message in said] == list(range(len(history)))
    view = history.view()
    assert [message.role for message in view] == [message.role for message in said]
    assert all(calls == results for _, calls, results in pairs(view))
    assert pairs(view) == pairs(said)
    names = [[call.function.name for call in message.tool_calls or ()] for message in said]
    assert [[call.function.name for call in message.tool_calls or ()] for message in view] == names
    told = [(i, m.content) for i, m in enumerate(view) if m.role == "tool" and m.content != "[deleted]"]
    assert all(json.loads(content)["msg_id"] == i for i, content in told)


@settings(deadline=None, max_examples=60)
@given(st.lists(MOVES, max_size=10), IDS)
def test_undo_is_the_inverse_of_an_edit_and_redo_that_of_undo(moves, ids):
    before = played(moves)
    after, applied = asked(before, "deleteContext", message_ids=[*ids, 2, 3])
    if not applied.changes_view:
        return
    undone, redone = after.undo(), after.undo().redo()
    assert undone.view()[: len(before)] == before.view()
    assert redone.view() == after.view() and redone.deleted_msg_ids == after.deleted_msg_ids
    assert undone.full_history() == after.full_history()


@settings(deadline=None, max_examples=60)
@given(st.lists(MOVES, max_size=12))
def test_only_what_edits_the_view_counts_as_an_edit_and_protected_messages_stay(moves):
    history, changed = opened(), 0
    for name, given_ in moves:
        before = history
        if name == "read":
            history, edited = read(history, *given_), False
        else:
            history, applied = asked(history, name, **given_)
            edited = applied.changes_view
        changed += edited
        if not edited:
            assert history.view()[: len(before)] == before.view()
    assert history.had_delete_operation == bool(changed)
    assert history.view()[:2] == opened().view()
