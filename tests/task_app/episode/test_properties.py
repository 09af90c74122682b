"""What holds of every conversation, however it is edited."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from task_app.episode.history import History
from tests.task_app.talking import asked, opened, read

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
