"""Which observations count as one state, and that a key is the same in any process."""

import ast
import subprocess
import sys
from dataclasses import replace

import pytest

from shared_schemas.messages import FunctionCall, Message, ToolCall
from shared_schemas.state_keys import OF_ENVIRONMENT, TEXT_LAST_N, list_state_keys
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.state_keys import CRAFTER_STATE_KEYS
from task_app.episode.prompts import Prompt
from task_app.episode.state_keys import STATE_KEYS, EpisodeStateKeys, StateKey, keys_by_name, select_keys
from task_app.errors import UnknownName
from task_app.plugins import ENVIRONMENTS
from task_app.protocols import Observation, ToolRequest

# Names that can be requested: text_last_n with numbers.
LAST = ("text_last_1", "text_last_2", "text_last_3", "text_last_12")
OF_ALL = [name for name in STATE_KEYS if name != TEXT_LAST_N] + [*LAST]


def seen(text="tree", **data):
    return Observation(text=text, data=data)


def find_keys(name, observations, of_environment=CRAFTER_STATE_KEYS):
    known = keys_by_name(of_environment, conversation=False)
    keys = EpisodeStateKeys(select_keys([name], known, where="state_keys"))
    return [keys.next(observation, Prompt(()))[name] for observation in observations]


def crafter(seed=3):
    env = CrafterEnvironment(CrafterConfig())
    return env, env.reset(seed)


def moved(observation, **changes):
    return replace(observation, data={**observation.data, **changes})


def test_a_text_is_one_state_wherever_it_is_met_and_a_history_is_not():
    trees = [seen("tree"), seen("water"), seen("tree"), seen("water"), seen("tree")]
    plain, last_2 = find_keys("text", trees), find_keys("text_last_2", trees)
    assert plain[0] == plain[2] == plain[4] != plain[1]
    assert last_2[2] == last_2[4] != last_2[0], "the first has nothing before it"
    assert len(set(find_keys("text_history", trees))) == 5


@pytest.mark.parametrize("n", [1, 2, 5, 6, 999_999_999])
def test_the_last_n_observations_forget_what_was_before_for_any_n(n):
    seven, eight = ([seen(first), *map(seen, "bcdef")] for first in ("a", "x"))
    name = f"text_last_{n}"
    # The sixth observation: the first one counts from n = 6 on.
    assert (find_keys(name, seven)[5] == find_keys(name, eight)[5]) == (n < 6)
    answers = (said("1", *[SAME, "2"] * 4, SAME), said("3", *[SAME, "2"] * 4, SAME))
    # Six observations, the opening included; the first answer is the one between the first two.
    assert (keys_of_prompts(name, answers[0]) == keys_of_prompts(name, answers[1])) == (n < 6)


@pytest.mark.parametrize("name", ["text_last_0", "text_last_n", "text_last_02", "text_last_٣"])
def test_an_n_that_is_no_number_from_1_on_is_refused(name):
    with pytest.raises(UnknownName, match="text_last_n"):
        find_keys(name, [seen()])


def test_parts_that_join_to_the_same_text_are_told_apart():
    assert (
        find_keys("text_last_2", [seen("ab"), seen("c")])[1]
        != find_keys("text_last_2", [seen("a"), seen("bc")])[1]
    )


def test_numbers_and_truth_values_are_told_apart_and_the_order_of_names_is_not():
    kind = {"own": StateKey(lambda observation: observation.data["x"])}
    one, true, whole = (find_keys("own", [seen(x=x)], kind)[0] for x in (1, True, 1.0))
    assert len({one, true, whole}) == 3
    assert find_keys("own", [seen(x={"a": 1, "b": 2})], kind) == find_keys(
        "own", [seen(x={"b": 2, "a": 1})], kind
    )


def test_a_new_version_of_a_key_meets_no_old_one():
    old, new = StateKey(lambda o: o.text), StateKey(lambda o: o.text, version=2)
    assert (
        find_keys("k", [seen()], {"k": old})[0].split(":")[1]
        == find_keys("k", [seen()], {"k": new})[0].split(":")[1]
    )
    assert find_keys("k", [seen()], {"k": old}) != find_keys("k", [seen()], {"k": new})


def test_the_default_is_the_environments_first_key_or_else_its_text():
    _, start = crafter()
    assert find_keys("default", [start]) == find_keys("nearest", [start])
    assert find_keys("default", [start], {}) == find_keys("text", [start], {})


def test_hunger_and_time_part_no_states_by_default_but_danger_night_and_items_do():
    _, start = crafter()
    held = start.data["inventory"]
    same = [start, moved(start, inventory={**held, "food": 3, "health": 8}), moved(start, step=40)]
    assert len(set(find_keys("nearest", same))) == 1
    others = [
        start,
        moved(start, inventory={**held, "health": 3}),
        moved(start, dark=True),
        moved(start, inventory={**held, "wood": 1}),
        moved(start, target="table"),
    ]
    assert len(set(find_keys("nearest", others))) == len(others)


def test_what_is_nearest_is_told_by_its_offset():
    _, start = crafter()
    rows = [["grass"] * 9 for _ in range(7)]
    rows[3][7] = "cow"
    rows[0][0] = "cow"
    once = moved(start, rows=[list(row) for row in rows])
    rows[0][0] = "grass"
    nearest_alone = moved(start, rows=[list(row) for row in rows])
    assert find_keys("nearest", [once]) == find_keys("nearest", [nearest_alone])
    rows[3][7], rows[3][6] = "grass", "cow"
    assert find_keys("nearest", [once]) != find_keys("nearest", [moved(start, rows=rows)])


def all_keys():
    """Every key of two observations of Crafter."""
    env, start = crafter()
    call = ToolRequest("interact_many", {"actions": ["move_left", "do", "noop"]})
    observations = [start, env.step([call]).observation]
    return {name: find_keys(name, observations) for name in (*CRAFTER_STATE_KEYS, *OF_ALL)}


def test_every_key_is_the_same_in_another_process_with_another_hash_seed():
    code = f"from {__name__} import all_keys; print(all_keys())"
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert ast.literal_eval(found) == all_keys()


SAME = "no, try again"


def said(*texts, opening=("system: be brief", "user: 6 * 7?")):
    """Messages of a conversation: the opening, then answers of the policy and what it is told, in turn."""
    spoken = [Message(role=text.split(": ")[0], content=text.split(": ")[1]) for text in opening]
    roles = ("assistant", "user")
    return (*spoken, *(Message(role=roles[n % 2], content=text) for n, text in enumerate(texts)))


def keys_of_prompts(name, *prompts):
    """Of prompts that only grow; a Prompt stands as it is."""
    keys = EpisodeStateKeys(select_keys([name], keys_by_name({}, conversation=True), where=""))
    found, reused = [], 0
    for prompt in prompts:
        prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt, reused)
        found.append(keys.next(seen("6 * 7?"), prompt)[name])
        reused = len(prompt.messages)
    return found


@pytest.mark.parametrize("name", ["default", *OF_ALL[:-4], *LAST[1:]])
def test_equal_questions_after_different_answers_are_different_states(name):
    low, high = (keys_of_prompts(name, said(), said(answer, SAME)) for answer in ("41", "43"))
    assert low[0] == high[0] != low[1], "before the first answer siblings are in one state"
    assert low[1] != high[1]
    assert keys_of_prompts(name, said(), said("41", SAME)) == low


def test_the_last_two_observations_and_the_answer_between_them_forget_what_was_before():
    first, second = (said(answer, SAME, "40", SAME) for answer in ("41", "43"))
    met = {name: keys_of_prompts(name, first) == keys_of_prompts(name, second) for name in OF_ALL}
    assert [name for name in OF_ALL if met[name]] == ["text_last_1", "text_last_2"]


def test_an_answer_counts_however_many_results_follow_it_and_ids_of_calls_do_not():
    def after(chunk, prefix):
        calls = [
            ToolCall(id=f"{prefix}{n}", function=FunctionCall(name="readChunk", arguments=f"[{n + chunk}]"))
            for n in range(3)
        ]
        results = (Message(role="tool", content="nothing", tool_call_id=call.id) for call in calls)
        return (*said(), Message(role="assistant", content="", tool_calls=tuple(calls)), *results)

    for name in [name for name in OF_ALL if name != "text_last_1"]:
        one, same, other = (keys_of_prompts(name, after(*given)) for given in ((0, "a"), (0, "b"), (1, "a")))
        assert one == same != other


def test_an_edited_context_is_the_state_that_it_shows_and_the_history_tells_how_it_came():
    whole, stub = said("41", SAME, "40", SAME), Message(role="assistant", content="[deleted]")
    edited = (*whole[:2], stub, *whole[3:])
    shown_so = Prompt(edited, reused=4, changed={2: stub})
    for name, equal in (("text", True), ("text_history", False)):
        by_an_edit = keys_of_prompts(name, said(), said("41", SAME), shown_so)
        from_the_start = keys_of_prompts(name, said(), edited[:4], edited)
        assert (by_an_edit[2] == from_the_start[2]) == equal
        assert by_an_edit[2] != keys_of_prompts(name, said(), said("41", SAME), whole)[2]


@pytest.mark.parametrize("env_name", ENVIRONMENTS)
def test_every_key_that_an_environment_has_is_listed_for_jobs_and_pages(env_name):
    own = ENVIRONMENTS[env_name].state_keys
    assert list(own) == list(OF_ENVIRONMENT.get(env_name, ())), "the first is the default"
    for conversation in (False, True):
        known = keys_by_name(own, conversation=conversation)
        assert sorted(known) == sorted(list_state_keys(env_name) or known)


def test_an_unknown_key_is_refused_with_the_known_ones():
    with pytest.raises(UnknownName, match=r"unknown state key 'nearst'\. Did you mean 'nearest'\? Known: "):
        select_keys(["text", "nearst"], {**STATE_KEYS, **CRAFTER_STATE_KEYS}, where="state_keys")
