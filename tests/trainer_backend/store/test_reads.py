"""What pages and the API are given, on both databases, of figures worked by hand."""

from base64 import urlsafe_b64encode
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from tests.trainer_backend.store.runs import episodes, evaluate, finish, metrics_row, new_run
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import write_rollouts
from trainer_backend.store import jobs, reads, reads_rollouts
from trainer_backend.store.database import Store, UnknownCursor, UnknownJob, UnknownRollout
from trainer_backend.store.reads import RunFilter
from trainer_backend.store.reads_rollouts import RolloutFilter
from trainer_backend.store.rows import Curve, Job
from trainer_backend.store.sync import sync_run


@pytest.fixture
def job(store: Store, run: RunDirectory) -> Job:
    """Of two iterations and an evaluation."""
    for iteration in (1, 2):
        finish(run, iteration, **{"time/update_s": float(iteration), "time/collect_s": 4.0})
    evaluate(run, 2, 3.0)
    made, _ = jobs.create(store, Job(name="a", config="", home="here", run_dir=str(run.path)))
    sync_run(store, made.id, run)
    return made


def test_jobs_are_told_what_their_metrics_say_before_a_sync_does(store: Store, run: RunDirectory, job: Job):
    fresh, _ = jobs.create(store, Job(name="b", config="", home="here"))
    finish(run, 3, **{"rollout/failed": 2.0})
    first, second = reads.refresh(store, [fresh, jobs.get(store, job.id)])
    assert (first.id, first.iteration, first.finished, first.outcome) == (fresh.id, 0, None, None)
    assert first.numbers == {"evaluated": {}, "sums": {}, "spark": None}
    assert (second.id, second.iteration, second.evaluation) == (job.id, 3, 3.0)
    assert second.numbers["sums"] == {"rollout/failed": 2.0}
    assert second.finished is not None and second.finished.tzinfo is not None
    assert reads.refresh(store, []) == []


def test_curves_are_named_by_their_kind_and_come_by_name_or_by_the_beginning_of_it(store, job):
    told = ("app/finished/own", "episode/outcome_reward", "policy/version", "time/collect_s", "time/update_s")
    assert reads.metric_names(store, job.id) == told
    assert reads.metric_names(store, job.id, "evaluation") == ("eval/outcome_reward",)
    found = reads.series(store, [job.id], ["time/*", "policy/version", "nowhere"])[job.id]
    assert list(found) == ["policy/version", "time/collect_s", "time/update_s"]
    numbers = (1.0, 2.0)
    assert found["time/update_s"] == Curve((1, 2), numbers, numbers, numbers)
    assert reads.series(store, [job.id], ["time/*"], kind="evaluation") == {job.id: {}}
    with pytest.raises(UnknownJob):
        reads.series(store, ["nobody"], ["time/*"])


def test_no_curve_has_more_points_than_asked_for(store: Store, run: RunDirectory, job: Job):
    for iteration in range(3, 8):
        run.append_metrics(metrics_row(iteration, **{"time/update_s": 1.0}))
    for points in (1, 2, 3, 5, 7, 100):
        found = reads.series(store, [job.id], ["time/update_s"], points=points)[job.id]["time/update_s"]
        assert len(found.values) <= points and found.iterations[-1] == 7


def test_a_live_page_goes_on_from_the_last_row_that_it_has(store: Store, run: RunDirectory, job: Job):
    seen = reads.metric_lines(store, job.id)
    told = [(line.kind, line.iteration) for line in seen]
    assert told == [("iteration", 1), ("iteration", 2), ("evaluation", 2)]
    assert seen[0].row["decision/unique_by_turn"] == [0.5, 0.0, 1.0]
    run.append_metrics(metrics_row(3))
    sync_run(store, job.id, run)
    (new,) = reads.metric_lines(store, job.id, after=seen[-1].number)
    assert new.iteration == 3
    assert reads.metric_lines(store, job.id, kind="evaluation") == seen[2:]
    assert reads.metric_lines(store, job.id, limit=1) == seen[:1]


def ids(store: Store, job: Job, where: RolloutFilter) -> list[str]:
    page = reads_rollouts.rollouts(store, job.id, where)
    return sorted(row.rollout_id.partition("/")[2] for row in page.items)


FILTERS = [
    ({"stage": "train", "iteration": 2}, ["train/2/0/0", "train/2/0/1", "train/2/0/2"]),
    ({"group_id": "train/2/0"}, ["train/2/0/0", "train/2/0/1", "train/2/0/2"]),
    ({"stage": "evaluation"}, ["evaluation/2/0"]),
    ({"status": "failed"}, ["train/1/0/2", "train/2/0/2"]),
    ({"failure_code": "task_app_lost", "iteration": 1}, ["train/1/0/2"]),
    ({"min_reward": 2.0}, ["evaluation/2/0", "train/1/0/0", "train/2/0/0"]),
    ({"max_reward": 0.0, "iteration": 1}, ["train/1/0/1"]),
    ({"min_decisions": 1, "max_decisions": 2, "iteration": 1}, ["train/1/0/1"]),
    ({"min_decisions": 10**20}, []),
    ({"max_decisions": 10**20, "stage": "evaluation"}, ["evaluation/2/0"]),
    ({"lost": True}, ["train/1/0/2", "train/2/0/2"]),
    ({"text": "1/0/1"}, ["train/1/0/1"]),
    ({"text": "TRAIN/1/0/1"}, ["train/1/0/1"]),
    ({"text": "%"}, []),
    ({"text": "_"}, []),
    ({"iteration": 10**20}, []),
]


def test_rollouts_are_filtered_by_each_of_their_facts(store: Store, job: Job):
    for where, found in FILTERS:
        assert ids(store, job, RolloutFilter(**where)) == found, where


def test_a_count_is_exact_by_facets_and_bounded_otherwise(store, job, monkeypatch):
    monkeypatch.setattr(reads_rollouts, "MOST_COUNTED", 3)
    for where, counted in (
        (RolloutFilter(), (7, True)),
        (RolloutFilter(stage="train"), (6, True)),
        (RolloutFilter(stage="train", iteration=2, status="failed"), (1, True)),
        (RolloutFilter(min_reward=2.0), (3, True)),
        (RolloutFilter(text="train"), (3, False)),
    ):
        assert reads_rollouts.count_rollouts(store, job.id, where) == counted, where


def test_pages_hand_out_every_rollout_once_in_order_those_without_a_number_last(store: Store, job: Job):
    sorts = ("newest", "outcome_reward", "reward", "unique_achievements", "decisions")
    for sort, descending in product(sorts, (True, False)):
        rows, cursor = [], None
        while True:
            page = reads_rollouts.rollouts(
                store, job.id, sort=sort, descending=descending, cursor=cursor, limit=2
            )
            rows += page.items
            cursor = page.cursor
            if cursor is None:
                break
        assert len({row.number for row in rows}) == len(rows) == 7, (sort, descending)
        values = [row.number if sort == "newest" else getattr(row, sort) for row in rows]
        known = [value for value in values if value is not None]
        assert known == sorted(known, reverse=descending), (sort, descending)
        assert values == known + [None] * (7 - len(known)), (sort, descending)


# The last ones are written as ours are, with what no column holds.
CURSORS = ["", "x", "é", "bm90IGpzb24", "WzEsICJhIl0", "NQ"] + [
    urlsafe_b64encode(text.encode()).decode()
    for text in (
        "[1, 2147483648]", "[1e999, 1]", "[NaN, 1]", f"[{'9' * 400}, 1]", "[[], 1]", "[1, null]", "[" * 9_999,
    )
]  # fmt: skip


def test_a_cursor_that_is_none_of_ours_is_refused(store: Store, job: Job):
    for sort, cursor in product(("newest", "outcome_reward", "decisions"), CURSORS):
        with pytest.raises(UnknownCursor, match="cursor is"):
            reads_rollouts.rollouts(store, job.id, sort=sort, cursor=cursor)


def test_a_number_that_no_column_holds_is_that_of_no_row(store: Store, job: Job):
    assert reads_rollouts.count_rollouts(store, job.id, RolloutFilter(iteration=-(2**31) - 1)) == (0, True)
    assert reads.metric_lines(store, job.id, after=10**39) == ()


def test_facets_count_what_can_be_filtered_by(store: Store, job: Job):
    found = reads_rollouts.facets(store, job.id)
    assert found == {
        "stages": {"evaluation": 1, "train": 6},
        "policies": {"": 2, "openai": 5},
        "statuses": {"failed": 2, "finished": 5},
        "failure_codes": {"task_app_lost": 2},
        "stop_reasons": {"max_decisions": 5},
        "iterations": (1, 2),
    }
    fresh, _ = jobs.create(store, Job(name="b", config="", home="here"))
    assert reads_rollouts.facets(store, fresh.id)["iterations"] is None


def test_the_policy_of_a_rollout_is_the_last_part_of_its_model(store: Store, run: RunDirectory, job: Job):
    item = episodes(3)[0]
    actor = item.trajectory.model_copy(update={"model": "crafter/actor"})
    write_rollouts(run.rollouts_file("iteration_3"), [item.model_copy(update={"trajectory": actor})])
    sync_run(store, job.id, run)
    assert ids(store, job, RolloutFilter(policy="actor")) == ["train/3/0/0"]


def test_a_rollout_is_found_by_its_id_or_an_end_of_it_that_only_one_has(store: Store, job: Job):
    whole = reads_rollouts.rollout(store, job.id, "run/train/1/0/1")
    assert whole == reads_rollouts.rollout(store, job.id, "train/1/0/1")
    assert (whole.iteration, whole.sibling, whole.decisions, whole.reward) == (1, 1, 2, 0.0)
    for name, told in (("0/1", r"2 rollouts .* are '0/1': run/train"), ("9", "no rollouts .* are '9'"),
                       ("Train/1/0/1", "no rollouts")):  # fmt: skip
        with pytest.raises(UnknownRollout, match=told):
            reads_rollouts.rollout(store, job.id, name)


def test_siblings_are_those_of_the_same_group_and_iteration_and_who_learned_from_one_is_told(store, job):
    row = reads_rollouts.rollout(store, job.id, "train/2/0/1")
    found = reads_rollouts.siblings(store, job.id, row)
    assert [item.rollout_id for item in found] == [f"run/train/2/0/{n}" for n in range(3)]
    assert row in found
    assert reads_rollouts.learning_iteration(store, job.id, "run/train/2/0/1") == 2
    assert reads_rollouts.learning_iteration(store, job.id, "run/train/2/0/2") is None  # it failed


def test_an_anchor_holds_every_decision_of_the_group_in_that_state(store: Store, job: Job):
    row = reads_rollouts.rollout(store, job.id, "train/1/0/0")
    found = {key: reads_rollouts.anchors(store, job.id, row, key, limit=9) for key in "sab"}
    assert {key: [(item.sibling, item.turn) for item in items] for key, items in found.items()} == {
        "s": [(0, 1), (1, 1), (1, 2)],
        "a": [(0, 2)],
        "b": [(0, 3)],
    }
    assert [item.advantage for item in found["s"]] == [0.5, -0.5, -0.25]
    assert reads_rollouts.anchors(store, job.id, row, "s", limit=2) == found["s"][:2]


def count_questions(store: Store, *reads: Callable[[], object]) -> list[int]:
    """The number of queries that each of these takes."""
    asked: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
    found = []
    for read in reads:
        asked.clear()
        read()
        found.append(len([statement for statement in asked if statement.startswith("SELECT")]))
    return found


def test_several_runs_are_asked_for_in_as_many_questions_as_one(store: Store, job: Job):
    others = [jobs.create(store, Job(name=name, config="", home="here"))[0].id for name in "bcd"]

    def questions(ids: list[str]) -> list[int]:
        return count_questions(
            store,
            lambda: reads.series(store, ids, ["time/*"]),
            lambda: reads.known_metrics(store, ids),
            lambda: reads.last_lines(store, ids, ["iteration", "evaluation"]),
        )

    assert questions([job.id, *others]) == questions([job.id])
    told = reads.last_lines(store, [job.id, *others], ["iteration", "evaluation", "nowhere"])
    assert {kind: line.iteration for kind, line in told[job.id].items()} == {"iteration": 2, "evaluation": 2}
    assert [told[other] for other in others] == [{}, {}, {}]
    for read in (reads.known_metrics, lambda store, ids: reads.last_lines(store, ids, ["iteration"])):
        with pytest.raises(UnknownJob, match="there is no job 'nobody'"):
            read(store, [job.id, "nobody"])


def test_pages_ask_as_many_questions_of_a_long_run_as_of_a_short_one(store, run, job):
    def questions() -> list[int]:
        row = reads_rollouts.rollout(store, job.id, "train/1/0/0")
        return count_questions(
            store,
            lambda: reads.refresh(store, [job] * 3),
            lambda: reads.series(store, [job.id], ["*", "time/*"]),
            lambda: reads_rollouts.rollouts(store, job.id),
            lambda: reads_rollouts.facets(store, job.id),
            lambda: reads_rollouts.anchors(store, job.id, row, "s", limit=40),
        )

    short = questions()
    for iteration in range(3, 9):
        finish(run, iteration)
    sync_run(store, job.id, run)
    assert questions() == short
    assert max(short) <= 4


EVERY = RunFilter()


def listed(store: Store, where: RunFilter = EVERY, **order: Any) -> list[str]:
    """The names of the runs on all pages of two."""
    names, cursor = [], None
    while True:
        page = reads.runs(store, where, cursor=cursor, limit=2, **order)
        names += [job.name for job in page.items]
        cursor = page.cursor
        if cursor is None:
            return names


@pytest.fixture
def three(store: Store, job: Job, tmp_path: Path) -> None:
    """Jobs b, without a run, and c, whose run has one iteration; with `job`, which has two."""
    config = '[rollout]\nenv_name = "dialogue"\n[model]\nname = "Qwen/Qwen3-0.6B"\n'
    jobs.create(store, Job(name="b", config=config, home="here", tags={"who": "Ann", "of": "x"}))
    run = new_run(tmp_path / "c")
    finish(run, 1, **{"episode/outcome_reward": 0.5, "rollout/failed": 2.0})
    tags = {"who": "Bo", 'a"b': "é"}
    third = Job(name="c", config=config, home="here", state="paused", tags=tags, run_dir=str(run.path))
    made, _ = jobs.create(store, third)
    sync_run(store, made.id, run)


def test_the_list_of_runs_is_sorted_by_each_column_and_those_without_a_value_come_last(store, three):
    expected = {"created": "abc", "name": "abc", "iteration": "bca", "finished": "acb", "outcome": "cab"}
    for sort, ascending in {**expected, "evaluation": "abc", "state": "cab"}.items():
        found = "".join(listed(store, sort=sort, descending=False))
        assert found == ascending, sort
        assert sorted(listed(store, sort=sort)) == ["a", "b", "c"]
    assert listed(store) == ["c", "b", "a"]
    assert listed(store, sort="outcome") == ["a", "c", "b"]


def test_a_cursor_of_the_list_of_runs_that_is_none_of_ours_is_refused(store: Store):
    odd = (urlsafe_b64encode(text.encode()).decode() for text in ('["x", 1]', '["2026-11-21", 1]', "[[], 1]"))
    for sort, cursor in product(("created", "finished", "outcome"), (*CURSORS, *odd)):
        with pytest.raises(UnknownCursor, match="cursor is"):
            reads.runs(store, sort=sort, cursor=cursor)


def test_runs_are_found_by_each_of_their_facts(store: Store, three: None):
    for where, names in (
        (RunFilter(text="QWEN"), "cb"),
        (RunFilter(text="ann"), "b"),
        (RunFilter(text="%"), ""),
        (RunFilter(states=frozenset({"paused", "failed"})), "c"),
        (RunFilter(environment="dialogue", tags={"who": "Bo"}), "c"),
        (RunFilter(model="Qwen3-0.6B", tags={"who": "Ann", "of": "x"}), "b"),
        (RunFilter(tags={"who": "Ann", "of": "y"}), ""),
        (RunFilter(tags={"who": "an"}), ""),
        (RunFilter(tags={'a"b': "é"}), "c"),
        (RunFilter(tags={"b": "é"}), ""),
        (RunFilter(text="é"), "c"),
    ):
        assert "".join(listed(store, where)) == names, where


def test_the_list_of_runs_tells_what_the_sync_has_seen_and_what_can_be_filtered_by(store: Store, three: None):
    first, second, third = reads.runs(store).items
    assert (first.iteration, first.outcome, first.evaluation) == (1, 0.5, None)
    assert (first.environment, first.model) == ("dialogue", "Qwen3-0.6B")
    assert first.numbers["sums"] == {"rollout/failed": 2.0}
    assert (second.iteration, second.finished, second.numbers) == (0, None, {})
    assert third.numbers["evaluated"] == {"eval/outcome_reward": 3.0}
    assert third.numbers["spark"] == [[1, 2], [1.0, 1.0]]
    assert reads.run_facets(store) == {
        "environments": {"dialogue": 2},
        "models": {"Qwen3-0.6B": 2},
        "states": {"paused": 1, "queued": 2},
        "tags": {'a"b=é': 1, "of=x": 1, "who=Ann": 1, "who=Bo": 1},
    }
