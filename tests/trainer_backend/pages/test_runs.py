"""The list of runs as its address asks for it, and chosen runs side by side."""

import pytest
from starlette.datastructures import QueryParams

from tests.conftest import tiny_job
from tests.trainer_backend.pages.hand_made import empty_run
from tests.trainer_backend.pages.shown import Shown
from trainer_backend.pages.runs import compare_numbers, count_values, list_runs
from trainer_backend.store import jobs
from trainer_backend.store.reads import RunFilter
from trainer_backend.store.rows import Job


@pytest.fixture(scope="module")
def three(shared: Shown, tmp_path_factory) -> dict[str, str]:
    """Two runs that trained alike, of which one still runs, and an empty one of another environment."""
    folder = tmp_path_factory.mktemp("runs")
    other = empty_run(tiny_job(rollout__env_name="dialogue"), folder / "talk")
    ids = {
        "done": shared.small(folder / "tiny", name="done", tags={"team": "red", "who": "me"}),
        "live": shared.small(folder / "tiny2", name="live", state="running", tags={"team": "blue"}),
        "talk": shared.add(other, name="Talk", state="running"),
    }
    talk = jobs.get(shared.store, ids["talk"])
    jobs.transition(shared.store, talk, state="failed", detail="x" * 1000)
    return ids


def names(shown: Shown, query: str) -> list[str]:
    return [line["name"] for line in list_runs(shown.store, QueryParams(query))["lines"]]


def test_a_line_of_the_list_says_how_far_a_run_is_and_how_it_does(shared: Shown, three):
    talk, live, done = list_runs(shared.store, QueryParams())["lines"]
    assert (done["where"], done["tags"], done["done"]) == ("tiny", ["team=red", "who=me"], 2)
    assert (done["outcome"], done["held_out"], done["bounds"]) == ("2", "2", "1 to 3")
    text = shared.page("/")
    assert 'aria-label="training outcome from 1 to 2"' in text and "2 of 14 lost" in text
    assert (done["lost"], done["live"], live["live"]) == ("2 of 14", False, True)
    assert (talk["outcome"], talk["bounds"], talk["took"], talk["lost"]) == ("–", "", "", "")  # noqa: RUF001
    assert len(talk["detail"]) == 400


def test_runs_are_searched_filtered_and_sorted_by_the_address(shared: Shown, three):
    found = {
        "": ["Talk", "live", "done"],
        "text=TAL": ["Talk"],
        "text=red": ["done"],
        "state=active": ["live"],
        "state=ended": ["Talk", "done"],
        "state=failed": ["Talk"],
        "environment=crafter&model=&state=": ["live", "done"],
        "tag=team%3Dred&tag=who%3Dme": ["done"],
        "tag=team%3Dred&tag=who%3Dyou": [],
        "sort=name&down=0": ["Talk", "done", "live"],
        "sort=outcome&down=0": ["done", "live", "Talk"],
        "sort=iteration": ["live", "done", "Talk"],
    }
    assert {query: names(shared, query) for query in found} == found


def test_links_of_the_list_keep_all_else_that_the_address_asks_for(shared: Shown, three):
    query = f"text=&state=ended&tag=team%3Dred&run={three['live']}&sort=name&down=0"
    page = list_runs(shared.store, QueryParams(query))
    kept = query.removeprefix("text=&")
    assert page["address"] == f"/?{kept}"
    assert page["sorted_by"]["name"] == f"/?{kept.replace('down=0', 'down=1')}"
    assert page["sorted_by"]["state"].endswith("sort=state&down=1")
    assert page["chosen"] == [{"id": three["live"], "name": "live", "shown": False}]
    assert page["unchosen"] == "/?state=ended&tag=team%3Dred&sort=name&down=0"
    assert list_runs(shared.store, QueryParams("run=deleted"))["chosen"] == []


def test_the_form_offers_the_values_that_runs_have_and_the_chosen_tag_too(shared: Shown, three):
    assert count_values(shared.store, RunFilter(tags={"gone": "1"})) == {
        "states": {"failed": 1, "running": 1, "succeeded": 1},
        "environments": {"crafter": 2, "dialogue": 1},
        "models": {"tiny-0.3m": 3},
        "tags": {"gone": {}, "team": {"team=blue": 1, "team=red": 1}, "who": {"who=me": 1}},
    }
    text = shared.page("/?tag=gone%3D1")
    assert '<option value="gone=1" selected>gone=1 (0)</option>' in text


@pytest.mark.parametrize("path", ["/", "/runs/{}/rollouts"])
def test_a_list_that_is_followed_counts_no_values_and_one_that_comes_back_from_history_does(
    shared: Shown, three, path
):
    path = path.format(three["done"])
    part, whole = {"HX-Request": "true"}, {"HX-Request": "true", "HX-History-Restore-Request": "true"}
    texts = [shared.client.get(path, headers=headers).text for headers in (part, whole)]
    assert [text.count('<form class="filters"') for text in texts] == [0, 1]
    assert all('<div id="list"' in text for text in texts)


def test_a_long_list_is_turned_page_by_page(shown: Shown):
    for number in range(60):
        jobs.create(shown.store, Job(name=f"run {number:02}", config="", home="h"))
    first = list_runs(shown.store, QueryParams("sort=name&down=0"))
    assert (len(first["lines"]), first["lines"][-1]["name"], first["paged"]) == (50, "run 49", False)
    later = list_runs(shown.store, QueryParams(first["later"].partition("?")[2]))
    assert [line["name"] for line in later["lines"]][::9] == ["run 50", "run 59"]
    assert (later["later"], later["first"], later["paged"]) == ("", "/?sort=name&down=0", True)


def test_chosen_runs_stand_side_by_side_with_their_numbers_and_the_keys_that_differ(shared: Shown, three):
    page = compare_numbers(shared.store, [three["done"], three["talk"]])
    assert [(one["name"], one["held_out"], one["without"]) for one in page["runs"]] == [
        ("done", "2", f"run={three['talk']}"), ("Talk", "–", f"run={three['done']}"),  # noqa: RUF001
    ]  # fmt: skip
    assert ("rollout.env_name", ['"crafter"', '"dialogue"']) in page["differs"]
    evaluation, iteration = page["tables"]
    assert (evaluation["places"], iteration["places"]) == (["iteration 2", ""], ["iteration 2", ""])
    assert ("eval/success_rates/eat_cow", ["1", "–"]) in evaluation["rows"]  # noqa: RUF001
    assert ("loss/entropy", ["1.5", "–"]) in iteration["rows"]  # noqa: RUF001

    query = f"run={three['done']}&run={three['live']}"
    text = shared.page(f"/compare/numbers?{query}")
    assert f'href="/runs/{three["live"]}"' in text
    assert f'href="/compare?{query}"'.replace("&", "&amp;") in text
