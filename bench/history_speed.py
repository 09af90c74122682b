"""A conversation of 100 turns with 20 deletes: all its prompts are rendered in 20 ms; memory is linear.

    python -m bench.history_speed [--repeats 20]

Timed is the least CPU time of some repeats of the whole episode: 100 views, 200 messages with chunks of 2,000
characters, 20 edits; no tokenizer. Memory is what a history holds at its end, texts included, a turn, for
100, 200 and 400 turns. Exit code 1 when a limit is missed.
"""

import sys
import time
import tracemalloc

from bench import kit
from shared_schemas.messages import FunctionCall, Message, ToolCall
from task_app.episode.context_tools import apply
from task_app.episode.history import History
from task_app.protocols import ToolRequest

TURNS, EVERY = 100, 5
LIMIT_MS = 20.0
# Four times the turns may take this much more memory a turn: allocation comes in steps.
LIMIT_GROWTH = 1.2
CHUNK = "The road to Amber Harbour was closed for a week. " * 41
OPENING = (
    Message(role="system", content="You read."),
    Message(role="user", content="Which colour is the harbour?"),
)


def said(turn: int, tool: str, arguments: str) -> Message:
    call = ToolCall(id=f"call-{turn}", function=FunctionCall(name=tool, arguments=arguments))
    return Message(role="assistant", content="Reading on.", tool_calls=(call,))


def episode(turns: int) -> tuple[History, int]:
    """The history at its end, and the number of messages in all its prompts."""
    history, shown = History.start(OPENING, shows_ids=True), 0
    for turn in range(turns):
        shown += len(history.view())
        if turn % EVERY == EVERY - 1:
            # All results since the last delete.
            ids = [len(history) - 1 - 2 * back for back in range(EVERY - 1)]
            message = said(turn, "deleteContext", f'{{"message_ids": {ids}}}')
            applied = apply(history.with_message(message), ToolRequest("deleteContext", {"message_ids": ids}))
            assert applied.changes_view, applied.text
            history, text = applied.history, applied.text
        else:
            # A chunk of its own, as a tool makes it.
            message, text = said(turn, "readChunk", f'{{"chunk_id": {turn}}}'), f"{turn}: {CHUNK}"
            history = history.with_message(message)
        assert message.tool_calls is not None
        history = history.with_result(message.tool_calls[0], text)
    return history, shown


def least_ms(repeats: int) -> float:
    def once() -> float:
        start = time.process_time()
        episode(TURNS)
        return time.process_time() - start

    return 1e3 * min(once() for _ in range(repeats))


def kilobytes_a_turn(turns: int) -> float:
    tracemalloc.start()
    history, _ = episode(turns)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(history.deleted_msg_ids) == turns // EVERY * (EVERY - 1)
    return held / 1024 / turns


def main() -> int:
    options = kit.options(__doc__, ("--repeats", 20))
    history, shown = episode(TURNS)
    edits = len(history.deleted_msg_ids) // (EVERY - 1)
    found = least_ms(options.repeats)
    print(
        f"{TURNS} turns, {edits} deletes, {shown} messages shown: {found:.1f} ms "
        f"(at most {LIMIT_MS:g}) {'ok' if found <= LIMIT_MS else 'TOO SLOW'}"
    )
    sizes = {turns: kilobytes_a_turn(turns) for turns in (TURNS, 2 * TURNS, 4 * TURNS)}
    growth = sizes[4 * TURNS] / sizes[TURNS]
    told = ", ".join(f"{turns} turns {size:.1f} KB a turn" for turns, size in sizes.items())
    print(f"held: {told}; x{growth:.2f} {'ok' if growth <= LIMIT_GROWTH else 'NOT LINEAR'}")
    return 0 if found <= LIMIT_MS and growth <= LIMIT_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
