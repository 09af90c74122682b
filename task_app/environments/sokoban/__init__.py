"""The puzzle Sokoban: push every box onto a goal. Boards are generated, and every board can be solved."""
