"""Rows of a file through a whole run: planned, played, answered, stored and told by their ids."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
from pydantic import SecretStr

from shared_schemas.rollouts import InteractionSpec
from tests.conftest import ListReporter, at_the_task_app, rows_of, tiny_job, train_job
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.collect.sources import read_row_id
from trainer_backend.collect.trial import try_job
from trainer_backend.data.dataset import DataSet, read_data
from trainer_backend.data.rows import Row
from trainer_backend.errors import DataError, JobError
from trainer_backend.evaluation.play import Checkpoint, evaluate
from trainer_backend.evaluation.result import as_json
from trainer_backend.job.schema import JobConfig
from trainer_backend.pages.compare import doubts, read_sides
from trainer_backend.pages.report import last_minus_first, write_report
from trainer_backend.pages.story import read_story
from trainer_backend.rundir.checkpoint_paths import latest_checkpoint
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import finished_rows, read_rollouts
from trainer_backend.start import run_job
from trainer_backend.terminal.evaluation_tables import tables
from trainer_backend.terminal.progress import closing_lines

CONFIGS = Path(__file__).parents[2] / "configs"


def job_on_sums(**overrides: object) -> JobConfig:
    """Two groups of four an iteration, two answers an episode; the interaction scores each, and that is what
    a decision earns in the mode of the tiny job, `decision_stepwise`."""
    given = {
        "data__path": str(CONFIGS / "data" / "arithmetic.jsonl"),
        "data__held_out_share": 0.25,
        "data__interaction": "gsm8k",
        "multi_turn__enable": True,
        "multi_turn__interaction_config_path": str(CONFIGS / "interactions" / "gsm8k.yaml"),
        "rollout__env_name": "dialogue",
        "rollout__env_config": {},
        "rollout__max_turns": 2,
        "warmup__policy_config": {},
        **overrides,
    }
    return tiny_job(**given).model_copy(update={"warmup": None})


def on_documents(**overrides: object) -> JobConfig:
    given = {
        "data__interaction": None,
        "multi_turn__interaction_config_path": None,
        "rollout__env_name": "documents",
    }
    return job_on_sums(**given, **overrides)


def planner(job: JobConfig, data: DataSet | None) -> Planner:
    return job_parts.planner(job, "run.1", Inference("http://127.0.0.1:9", "tiny/actor", SecretStr("")), data)


def groups(directory, name: str) -> dict[str, set[str]]:
    """By group, what its siblings were asked."""
    found: dict[str, set[str]] = {}
    for rollout in read_rollouts(directory.rollouts_file(name)):
        asked = rollout.trajectory.steps[0].observation_data.messages[-1].content
        found.setdefault(rollout.group_id, set()).add(asked)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    return train_job(job_on_sums(), tmp_path_factory.mktemp("data") / "run")


def test_siblings_are_asked_their_row_and_every_start_plans_the_same_rows(run):
    directory, reporter, _ = run
    data = job_parts.data(directory.job())
    for iteration in (1, 2):
        for group_id, asked in groups(directory, f"iteration_{iteration}").items():
            assert asked == {data.by_id[read_row_id(group_id)].question}
        again = planner(directory.job(), data).training(iteration)
        assert {request.group_id for request in again} == groups(directory, f"iteration_{iteration}").keys()
    assert data.notes[0] in reporter.lines


def test_the_interaction_scores_every_answer_by_the_truth_of_its_row(run):
    directory, _, _ = run
    stored = read_rollouts(directory.rollouts_file("iteration_1"))
    steps = [step for rollout in stored for step in rollout.trajectory.steps]
    # An untrained model may write a call that cannot be read: no answer, so the interaction is not asked.
    answers = [step for step in steps if step.step_info.invalid_reason is None]
    assert len(answers) > len(steps) / 2
    for step in steps:
        assert [part.source for part in step.reward_parts] == ["interaction"] * (step in answers)
        assert (step.step_info.interaction_s > 0.0) is (step in answers)
    row = rows_of(directory, "iteration")[0]
    took = [step.step_info.interaction_s for step in steps]
    assert row["time/interaction_s"] == pytest.approx(sum(took))


def test_by_decision_each_answer_earns_what_the_interaction_gave_it(run):
    directory, _, _ = run
    assert directory.job().training.step_rewards_mode == "decision_stepwise"
    episodes = finished_rows(directory.rollouts_file("iteration_1"), ["decisions", "rollout"])
    assert len(episodes) == 8
    for episode in episodes:
        steps = json.loads(episode["rollout"])["trajectory"]["steps"]
        scores = [sum(part["value"] for part in step["reward_parts"]) for step in steps]
        assert [decision["reward"] for decision in episode["decisions"]] == scores
        assert all(step["metadata"]["decision_rewards"] is None for step in steps)


async def test_a_mode_that_pays_nothing_in_an_environment_is_told_before_anything_is_played(tmp_path):
    said: list[str] = []
    job = on_documents()
    async with job_parts.task_apps(at_the_task_app(job), tmp_path / "task_app.log", tell=said.append) as apps:
        for mode in ("decision_stepwise", "env_sparse"):
            training = job.training.model_copy(update={"step_rewards_mode": mode})
            plan = planner(job.model_copy(update={"training": training}), with_a_document(1))
            await try_job(plan, apps, from_scratch=False)
    (told,) = said
    assert told.startswith("training.step_rewards_mode = 'decision_stepwise' pays nothing in 'documents'")


def test_evaluations_play_the_held_out_rows_and_are_told_row_by_row(run):
    directory, _, _ = run
    data = job_parts.data(directory.job())
    held_out = {row.id: row.question for row in data.evaluation}
    for name in ("evaluation_0", "evaluation_2"):
        played = groups(directory, name)
        assert {read_row_id(group): asked for group, asked in played.items()} == {
            row_id: {question} for row_id, question in held_out.items()
        }
    assert last_minus_first(read_story(directory)).count == 4 == len(held_out)
    assert [row["eval/episodes"] for row in rows_of(directory, "evaluation")] == [4, 4]
    html = write_report(directory).read_text()
    assert "at most 4: 0.25 of train of" in html
    assert any(f"Row {row_id}, evaluation after" in html for row_id in held_out)


async def test_an_evaluation_lists_the_rows_by_their_ids(run):
    directory, _, _ = run
    job = directory.job()
    once = job.multi_turn.model_copy(update={"max_assistant_turns": 1})
    job = job.model_copy(update={"multi_turn": once})
    result = await evaluate(at_the_task_app(job), Checkpoint(latest_checkpoint(directory.checkpoints)))
    rows = {row.id for row in job_parts.data(job).evaluation}
    assert json.loads(as_json(result))["rows"].keys() == rows
    assert "0.25 of train of" in result.setting["held-out rows"]
    assert result.setting["decisions at most"] == 1 < job.rollout.max_turns
    assert any("lowest outcomes of 4 rows" in str(part) for part in tables(result).renderables)


def test_a_run_refuses_rows_that_changed_since_it_began(run, tmp_path):
    directory, _, _ = run
    changed = tmp_path / "sums.jsonl"
    changed.write_text("".join(Path(directory.job().data.path).read_text().splitlines(keepends=True)[1:]))
    job = directory.job()
    job = job.model_copy(update={"data": job.data.model_copy(update={"path": changed})})
    with pytest.raises(DataError, match=r"since the run began, 1 held-out row is gone: \w+ \(.*line 1\)"):
        asyncio.run(run_job(job, directory, ListReporter(), resume=True))


def test_accepted_rows_are_told_of_wherever_their_figures_are(run, tmp_path):
    """One training row of the run becomes a held-out one, and the run goes on for an iteration."""
    directory = open_run(copytree(run[0].path, tmp_path / "run"))
    job, before = directory.job(), job_parts.data(run[0].job())
    lines = Path(job.data.path).read_text().splitlines(keepends=True)
    held_out = [row.where for row in (*before.evaluation, before.training[0])]
    numbers = {int(where.rpartition(" ")[2]) - 1 for where in held_out}
    for name, chosen in (("training", False), ("held_out", True)):
        rows = [line for number, line in enumerate(lines) if (number in numbers) is chosen]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    keys = {"path": tmp_path / "training.jsonl", "evaluation_path": tmp_path / "held_out.jsonl"}
    data = job.data.model_copy(update={**keys, "held_out_share": None})
    training = job.training.model_copy(update={"iterations": 3})
    evaluation = job.evaluation.model_copy(update={"instances": len(numbers)})
    keys = {"data": data, "training": training, "evaluation": evaluation}
    stored = job.model_copy(update=keys)
    job = at_the_task_app(stored)
    finished = job.model_copy(update={"training": directory.job().training})
    asyncio.run(run_job(finished, directory, ListReporter(), resume=True, accept_data=True))
    with pytest.raises(DataError):  # nothing was left to play, so nothing was accepted
        asyncio.run(run_job(job, directory, ListReporter(), resume=True))
    reporter = ListReporter()
    asyncio.run(run_job(job, directory, reporter, resume=True, accept_data=True))
    directory.replace_job(stored)  # without the place where it was played
    said = "\n".join(reporter.lines)
    leak = f"1 of {len(numbers)} held-out rows ask what the run trained on"
    assert leak in said
    others = "the evaluations after iterations 0 and 2 set other tasks than the last one"
    assert others in said and others in "\n".join(closing_lines(read_story(directory)))
    assert last_minus_first(read_story(directory)) is None, "no evaluation before had these tasks"
    html = write_report(directory).read_text()
    assert leak in html and others in html
    (first, second) = read_sides([run[0].path, directory.path])
    told = doubts([first, second])
    assert any(leak in line for line in told) and any("set different tasks" in line for line in told)
    player = Checkpoint(latest_checkpoint(directory.checkpoints))
    result = asyncio.run(evaluate(job, player, run=directory.path))
    assert result.setting["since the run began"] == leak


def file_of(path: Path, prompts: dict[str, object]) -> str:
    rows = [json.dumps({"id": row, "prompt": prompt, "answer": "4"}) for row, prompt in prompts.items()]
    path.write_text("\n".join(rows))
    return str(path)


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory: pytest.TempPathFactory):
    """A run with one row of four, and one held-out one of two, that do not fit the model."""
    folder, long = tmp_path_factory.mktemp("long"), "zq xv " * 200
    opening = [{"role": "system", "content": long}, {"role": "user", "content": "2 + 2?"}]
    path = file_of(folder / "a.jsonl", {"a": "1 + 3?", "b": opening, "c": "3 + 1?", "d": "2 + 2?"})
    held_out = file_of(folder / "b.jsonl", {"e": "4 + 0?", "f": long})
    tables = {"data__path": path, "data__evaluation_path": held_out, "data__held_out_share": None}
    keys = {"training__group_size": 2, "training__max_lost_share": 0.25}
    job = job_on_sums(**tables, **keys, rollout__env_config={"system": "Add."})
    return train_job(job, folder / "run")


def test_rows_that_do_not_fit_the_model_are_listed_before_rl_and_are_those_whose_rollouts_are_lost(long_rows):
    directory, reporter, progress = long_rows
    said = reporter.lines
    places = [place for place, line in enumerate(said) if "do not fit the model" in line]
    assert places[-1] < next(place for place, line in enumerate(said) if line.startswith("gateway: "))
    lines = [said[place] for place in places]
    stored = [read_rollouts(directory.rollouts_file(name)) for name in ("iteration_1", "evaluation_0")]
    for line, rollouts, (kind, row) in zip(
        lines, stored, (("training", "b"), ("held-out", "f")), strict=True
    ):
        lost = {read_row_id(item.group_id): item.failure for item in rollouts if item.failure is not None}
        assert {read_row_id(item.group_id) for item in rollouts} > lost.keys() == {row}
        tokens = re.search(r"a prompt of (\d+) tokens \+ max_tokens 8", lost[row].detail)
        assert f"1 of {4 if kind == 'training' else 2} {kind} rows do not fit" in line
        assert (
            f": line 2, {int(tokens[1]):,} tokens); 248 tokens fit: inference.max_model_len 256 less" in line
        )
        assert lost[row].code == "context_length_exceeded"
        assert re.search(rf"\('dialogue', seed \d+ in group '[^']*/{row}'\)", lost[row].detail)
        assert "inference.max_model_len" in lost[row].detail
    assert progress.iteration == 2, "training goes on"


def told_of(job: JobConfig, data: DataSet, folder: Path) -> str:
    async def ask() -> None:
        async with job_parts.task_apps(at_the_task_app(job), folder / "task_app.log") as apps:
            await try_job(planner(job, data), apps, from_scratch=True)

    with pytest.raises((JobError, DataError)) as found:
        asyncio.run(ask())
    return str(found.value)


def test_a_misspelt_interaction_is_told_before_anything_is_played(tmp_path):
    job = job_on_sums(data__interaction="gsm8")
    told = told_of(job, job_parts.data(job), tmp_path)
    assert told.startswith("data.interaction, or interaction_kwargs of a row: unknown interaction 'gsm8'")
    assert "Did you mean 'gsm8k'?" in told


def test_a_row_that_the_environment_does_not_take_is_told_by_its_id(tmp_path):
    job = job_on_sums()
    rows = (Row("a/1", "Who?", document="Ada did.", ground_truth="Ada"),)
    told = told_of(job, DataSet(rows, rows), tmp_path)
    assert told.startswith("data.path, row 'a/1', sent to rollout.env_name as 'document_content'")
    assert "rollout.env_name = 'dialogue' plays prompts, and 'documents' documents" in told


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            {"multi_turn__enable": False},
            "multi_turn.enable: it is false, and the environment 'documents' is a",
        ),
        (
            {"algorithm__advantage": "branch"},
            "algorithm.advantage: 'branch' plays on from snapshots, and 'doc",
        ),
    ],
)
def test_what_a_job_cannot_do_with_a_conversation_is_told_before_anything_is_played(
    tmp_path, overrides, told
):
    found = told_of(on_documents(**overrides), with_a_document(1), tmp_path)
    assert found.startswith(told)


def test_a_truth_that_is_no_number_is_told_under_any_name_of_the_interaction_that_needs_one(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Capital?", "ground_truth": "Paris"}\n' * 3)
    named = tmp_path / "named.yaml"
    named.write_text(
        "interaction: [{class_name: task_app.interactions.gsm8k.Gsm8kInteraction, name: maths}]",
        encoding="utf-8",
    )
    keys = {"data__path": str(rows), "multi_turn__interaction_config_path": str(named)}
    held_out = {"data__evaluation_path": str(rows), "data__held_out_share": None}
    job = job_on_sums(**keys, **held_out, data__interaction="maths")
    data = read_data(job.data, instances=2)
    assert "rows.jsonl: lines 1, 2, 3, 2, 3: 5 rows have no ground truth" in told_of(job, data, tmp_path)


def test_an_interaction_that_would_never_be_asked_is_told_before_anything_is_played(tmp_path):
    job = job_on_sums(rollout__env_name="documents")
    rows = tuple(
        replace(row, interaction=InteractionSpec(name="gsm8k")) for row in with_a_document(1).training
    )
    told = told_of(job, DataSet(rows, rows), tmp_path)
    assert told.startswith("data.interaction: it, or interaction_kwargs of a row, names an interaction that")


def with_a_document(letters: int) -> DataSet:
    """The second of two rows has a document of so many letters; each is six bytes of JSON in ASCII."""
    texts = ("Ada did.", "\u00e9" * letters)
    rows = tuple(Row(f"a/{n}", "Who?", document=text, ground_truth="Ada") for n, text in enumerate(texts))
    return DataSet(rows[:1], rows)


def test_a_row_that_is_larger_than_the_task_app_takes_is_told_before_anything_is_played(tmp_path):
    job = on_documents()
    told = told_of(job, with_a_document(200_000), tmp_path)
    assert told.startswith("data.path, row 'a/1': its request has 1,20")
    assert "takes 1,048,576. The task app's TURNWISE_MAX_BODY_BYTES" in told


async def test_the_job_s_own_task_app_takes_its_largest_row(tmp_path):
    job = on_documents()
    data = with_a_document(400_000)
    async with job_parts.task_apps(job, tmp_path / "task_app.log", data=data) as apps:
        plan = planner(job, data)
        await try_job(plan, apps, from_scratch=False)
        await apps.serving[0].submit([plan.largest()])  # 2.4 MB, and it does not answer with 413


def test_interactions_that_no_row_is_for_are_refused():
    with pytest.raises(JobError, match=r"interaction_config_path: the run would ignore it: no row has"):
        job_parts.data(job_on_sums(data__interaction=None))
    with pytest.raises(JobError, match=r"the run would ignore it: there is no \[data\]"):
        job_parts.data(job_on_sums().model_copy(update={"data": None}))


async def test_every_document_of_the_repository_is_taken_by_the_environment_that_holds_documents(tmp_path):
    job = on_documents(
        data__path=str(CONFIGS / "data" / "documents"),
        data__evaluation_split="test",
        data__held_out_share=None,
    )
    data = job_parts.data(job)
    assert data is not None
    async with job_parts.task_apps(at_the_task_app(job), tmp_path / "task_app.log") as apps:
        for row in (*data.training, *data.evaluation):
            await try_job(planner(job, DataSet((row,), (row,))), apps, from_scratch=False)
