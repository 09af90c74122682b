"""What a task app loads when it is first needed: plug-ins, and the client session of plug-ins."""

import asyncio
from collections import ChainMap

from task_app.app import create_app
from task_app.board import Board
from task_app.settings import Settings
from tests.task_app.counting import KEY, boards


def test_an_entry_is_loaded_when_it_is_first_looked_up_and_its_names_load_nothing():
    loads = []
    board = Board({"a": lambda: loads.append("a") or "A", "b": lambda: loads.append("b") or "B"})
    more = ChainMap({"c": "C"}, board)
    assert (list(more), "b" in more, len(board)) == (["a", "b", "c"], True, 2) and loads == []
    assert (board["b"], more["b"], more["c"]) == ("B", "B", "C") and loads == ["b"]


async def test_the_session_of_plug_ins_is_opened_once_on_whatever_thread_asks_and_closed_in_the_end():
    app = create_app(Settings(api_keys=(KEY,)), boards=boards())
    async with app.router.lifespan_context(app):
        context = app.state.services.policy_context(inference_key=None)
        asked = [asyncio.to_thread(lambda: context.session) for _ in range(8)]
        (session,) = set(await asyncio.gather(*asked))
        assert session is context.session and not session.closed
        assert session.connector.limit == 2 * Settings().max_concurrent_rollouts
    assert session.closed
