from collections import ChainMap

from task_app.board import Board


def test_an_entry_is_loaded_when_it_is_first_looked_up_and_its_names_load_nothing():
    loads = []
    board = Board({"a": lambda: loads.append("a") or "A", "b": lambda: loads.append("b") or "B"})
    more = ChainMap({"c": "C"}, board)
    assert (list(more), "b" in more, len(board)) == (["a", "b", "c"], True, 2) and loads == []
    assert (board["b"], more["b"], more["c"]) == ("B", "B", "C") and loads == ["b"]
