"""Sokoban: boards worked by hand, the solver against a plain search, worlds, texts, teacher and snapshots."""

import asyncio
import json
from collections import deque
from typing import Any

import pytest

from task_app.environments.sokoban.board import Board, State, read_xsb, xsb_rows
from task_app.environments.sokoban.environment import (
    SokobanConfig,
    SokobanEnvironment,
    board_key,
    generate,
    push_key,
)
from task_app.environments.sokoban.solver import best_push, is_solvable, make_key, pushes_left
from task_app.environments.sokoban.text import compact_text
from task_app.policies.random_calls import DetourConfig
from task_app.policies.teachers import SokobanTeacher
from task_app.protocols import DecisionOutcome, Observation, PolicyObservation, ToolRequest, steps_quickly

# One push right solves it: from the left of the box, three moves away.
ROWS = ["######", "#____#", "#_$._#", "#@___#", "#____#", "######"]
ONE_BOX = SokobanConfig(size=4, boxes=1, min_pushes=1)


def environment_at(rows: list[str], config: SokobanConfig = ONE_BOX) -> SokobanEnvironment:
    environment = SokobanEnvironment(config)
    moment = {"rows": rows, "step": 0, "best": 0, "reward": 0.0, "no_effect": False, "invalid": False}
    environment.restore(json.dumps(moment).encode())
    return environment


def call(environment: SokobanEnvironment, *names: str) -> DecisionOutcome:
    tool = environment.tools()[0].function
    (argument,) = tool.parameters["properties"]
    return environment.step([ToolRequest(tool.name, {argument: list(names)}, "")])


def test_a_push_onto_the_last_goal_ends_the_episode_and_pays_eleven_less_a_tenth_a_step():
    outcome = call(environment_at(ROWS), "up", "right", "left")
    assert outcome.env_rewards == pytest.approx((-0.1, 10.9))
    assert outcome.executed_actions == ("up", "right")  # nothing runs after the end
    assert outcome.terminated
    assert outcome.observation.data["rows"][2] == "#_@*_#"
    assert outcome.observation.achievements_counts == {"box_1": 1, "solved": 1}


def test_a_box_in_a_corner_ends_the_episode_as_stuck_and_unpaid():
    outcome = call(environment_at(["######", "#____#", "#_$__#", "#_@._#", "#____#", "######"]), "up")
    # Against the upper rim no push brings it down again.
    assert (outcome.terminated, outcome.observation.data["stuck"]) == (True, True)
    assert outcome.env_rewards == (-0.1,)
    assert set(outcome.observation.achievements_counts.values()) == {0}


def test_a_box_on_a_goal_counts_only_while_the_board_can_be_solved():
    # The lower box closes the only way to the cell from which the upper one is pushed up to its goal.
    rows = ["######", "####.#", "###__#", "#__$_#", "#@$._#", "######"]
    outcome = call(environment_at(rows, SokobanConfig(size=4, boxes=2)), "right")
    assert outcome.observation.data["on_goals"] == 1
    assert outcome.observation.achievements_counts == {"box_1": 0, "box_2": 0, "solved": 0}


def test_walls_and_a_second_box_stop_a_push():
    rows = ["######", "#____#", "#@$$_#", "#_.._#", "#____#", "######"]
    outcome = call(environment_at(rows, SokobanConfig(size=4, boxes=2)), "right", "left", "right")
    assert outcome.observation.data["rows"] == rows
    assert outcome.observation.data["no_effect"]
    assert outcome.env_rewards == (-0.1, -0.1, -0.1)


def test_a_call_of_a_push_walks_behind_the_box():
    environment = environment_at(ROWS, ONE_BOX.model_copy(update={"text": "compact"}))
    outcome = call(environment, "1-right", "1-up")
    assert (outcome.executed_actions, outcome.terminated) == (("up", "right"), True)


def test_boxes_keep_their_numbers_during_a_call():
    rows = ["#######", "#_____#", "#_$_._#", "#_$_._#", "#@____#", "#_____#", "#######"]
    environment = environment_at(rows, SokobanConfig(text="compact"))
    # Box 1 passes into box 2's row and column order; "1" stays that box.
    outcome = call(environment, "1-right", "2-right", "1-right", "2-right")
    assert outcome.terminated
    assert outcome.observation.achievements_counts == {"box_1": 1, "box_2": 1, "solved": 1}


def test_an_impossible_push_costs_a_step_and_ends_the_call():
    environment = environment_at(ROWS, ONE_BOX.model_copy(update={"text": "compact"}))
    nothing = call(environment, "2-up", "1-right")
    assert (nothing.executed_actions, nothing.env_rewards) == (("noop",), (-0.1,))
    assert nothing.observation.data["no_effect"]
    outcome = call(environment, "1-down", "1-down", "1-down")
    assert outcome.executed_actions == ("up", "up", "right", "down", "down")  # below is the rim


def test_the_solver_agrees_with_a_search_forwards_on_every_state_of_boards():
    for seed in range(6):
        board, _ = generate(seed, size=4, boxes=2, pushes=(2, 10))
        left, keys = pushes_left(board), every_key(board)
        assert {key: left[key] for key in keys & left.keys()} == fewest_pushes(board, keys)


def every_key(board: Board) -> set[tuple[int, int]]:
    free = [cell for cell in range(board.width**2) if board.floor >> cell & 1]
    return {
        make_key(board, State(1 << a | 1 << b, player))
        for a in free
        for b in free
        for player in free
        if a < b and player not in (a, b)
    }


def read_state(key: tuple[int, int]) -> State:
    return State(key[0], key[1].bit_length() - 1)


def fewest_pushes(board: Board, keys: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """All pushes forwards, followed back from the solved states."""
    before: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for key in keys:
        for push in board.pushes(read_state(key)):
            before.setdefault(make_key(board, push.state), []).append(key)
    counts = {key: 0 for key in keys if key[0] == board.goals}
    queue = deque(counts)
    while queue:
        key = queue.popleft()
        for earlier in before.get(key, ()):
            if earlier not in counts:
                counts[earlier] = counts[key] + 1
                queue.append(earlier)
    return counts


@pytest.mark.parametrize(
    "config",
    [
        SokobanConfig(),
        SokobanConfig(size=4, boxes=3, min_pushes=6, max_pushes=6),
        SokobanConfig(size=7, boxes=3, max_pushes=20),
        SokobanConfig(size=4, boxes=1, min_pushes=1, max_pushes=1),
    ],
    ids=str,
)
def test_every_world_can_be_solved_by_the_teacher_in_as_many_pushes_as_the_config_says(config):
    for seed in range(8):
        environment = SokobanEnvironment(config.model_copy(update={"text": "compact"}))
        observation = environment.reset(seed)
        board, state = read_xsb(observation.data["rows"])
        pushes = pushes_left(board)[make_key(board, state)]
        assert config.min_pushes <= pushes <= config.max_pushes
        assert not state.boxes & board.goals
        decisions = played_by_the_teacher(environment, observation)
        assert (environment.outcome_reward(), decisions) == (1.0, pushes)


def played_by_the_teacher(environment: SokobanEnvironment, observation: Observation) -> int:
    teacher = SokobanTeacher()
    for decision in range(1, 100):
        outcome = environment.step([asked(teacher, environment, observation)])
        observation = outcome.observation
        if outcome.terminated or outcome.truncated:
            return decision
    raise AssertionError("the episode does not end")


def asked(teacher: SokobanTeacher, environment: SokobanEnvironment, observation: Observation) -> ToolRequest:
    messages = PolicyObservation(environment.messages(observation, ()), observation.data)
    tools: list[dict[str, Any]] = [tool.model_dump(mode="json") for tool in environment.tools()]
    ((sent,), *_) = [asyncio.run(teacher.get_action(messages, tools))[0]["tool_calls"]]
    return ToolRequest(sent["name"], json.loads(sent["arguments"]), sent["arguments"])


def test_the_teacher_moves_where_moves_are_asked_and_never_fails_on_a_lost_board():
    environment = SokobanEnvironment()
    played_by_the_teacher(environment, environment.reset(5))
    assert environment.outcome_reward() == 1.0
    rows = ["######", "#$___#", "#_.__#", "#@___#", "#____#", "######"]
    lost = environment_at(rows)
    observation = lost.restore(lost.snapshot())
    assert asked(SokobanTeacher(), lost, observation).arguments == {"moves": ["up"]}


def test_a_detour_of_the_teacher_is_marked():
    environment = SokobanEnvironment(SokobanConfig(text="compact"))
    observation = environment.reset(0)
    messages = PolicyObservation((), observation.data)
    action, *_ = asyncio.run(SokobanTeacher(DetourConfig(epsilon=1.0)).get_action(messages, []))
    assert action["exploratory"] is True


def test_a_world_is_the_same_in_every_process_and_version():
    board, state = generate(7, size=5, boxes=2, pushes=(3, 10))
    assert xsb_rows(board, state) == [
        "#######", "#__#_+#", "#__##_#", "#__$_$#", "#____.#", "#_____#", "#######",
    ]  # fmt: skip


def test_the_compact_text_is_this():
    assert compact_text(environment_at(ROWS).restore(environment_at(ROWS).snapshot()).data) == (
        "on0 _ _ _ _ _ 1 . _ @ _ _ _ _ _ _ _ box1 to R1 1-up U1 1-down D2 1-left L1 1-right R2"
    )


def test_a_board_is_read_back_from_its_rows():
    board, state = read_xsb(ROWS)
    assert xsb_rows(board, state) == ROWS
    left = pushes_left(board)
    assert is_solvable(board, state, left)
    push = best_push(board, state, left)
    assert push is not None
    assert (push.way, push.direction) == (("up",), "right")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["####", "#@$#", "#_.#"], "as many rows as columns"),
        (["####", "#@$_", "#_.#", "####"], "the rim"),
        (["####", "#@$#", "#_ #", "####"], "is no letter"),
        (["####", "#@$#", "#__#", "####"], "as many boxes as goals"),
    ],
)
def test_what_is_no_board_is_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        read_xsb(rows)


def test_a_snapshot_of_another_size_is_refused():
    state = environment_at(ROWS).snapshot()
    with pytest.raises(ValueError, match="has size 4 and 1 boxes"):
        SokobanEnvironment(SokobanConfig(size=5, boxes=1)).restore(state)


def test_the_keys_of_states():
    there = environment_at(ROWS)
    here = there.restore(there.snapshot())
    walked = call(there, "right", "right").observation
    pushed = call(environment_at(ROWS), "right", "up").observation
    assert board_key(here) != board_key(walked)
    assert push_key(here) == push_key(walked) != push_key(pushed)


def test_a_box_that_was_on_a_goal_before_makes_it_another_state():
    environment = SokobanEnvironment()
    environment.reset(0)
    played = environment.restore(environment.snapshot())
    paid = json.loads(environment.snapshot()) | {"best": 1}
    after = environment.restore(json.dumps(paid).encode())
    for key in (board_key, push_key):
        assert key(played) != key(after)
    assert played.data == after.data


def test_steps_and_further_decisions_of_the_teacher_search_for_nothing():
    environment, teacher = SokobanEnvironment(SokobanConfig(text="compact")), SokobanTeacher()
    assert not steps_quickly(environment), "the first restore may search"
    observation = environment.reset(1)
    assert steps_quickly(environment)
    asked(teacher, environment, observation)
    pushes_left.cache_clear()  # as 128 other boards would
    decision = asked(
        teacher, environment, environment.step([asked(teacher, environment, observation)]).observation
    )
    environment.step([decision])
    assert pushes_left.cache_info().misses == 0


def test_fewer_pushes_than_boxes_are_refused():
    with pytest.raises(ValueError, match="each of 3 boxes needs a push"):
        SokobanConfig(boxes=3, min_pushes=1, max_pushes=2)


def test_the_picture_shows_every_cell():
    frame = environment_at(ROWS).frame(60, 90)
    assert frame.shape == (90, 60, 3)
    wall, floor, box, player = frame[5, 5], frame[22, 15], frame[37, 25], frame[52, 15]
    assert len({tuple(pixel) for pixel in (wall, floor, box, player)}) == 4
