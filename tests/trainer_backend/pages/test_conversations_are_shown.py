"""Conversations as a person sees them: `turnwise inspect`, the report, a comparison, the live table."""

import io

import pytest
from rich.console import Console

from shared_schemas.messages import Message
from shared_schemas.trajectory import UserAnswer
from tests.conftest import tiny_job
from tests.trainer_backend.core.test_segments import step
from tests.trainer_backend.dialogues import DEFINITION, dialogue, finished, reader
from tests.trainer_backend.pages.hand_made import empty_run, small_run
from tests.trainer_backend.pages.test_report import charts, no_frames, told
from trainer_backend.collect.metrics import evaluation_metrics
from trainer_backend.credit.inspect import episode_view
from trainer_backend.pages.compare import read_sides, summary_columns, summary_rows, write_comparison
from trainer_backend.pages.episode_view import new_messages
from trainer_backend.pages.report import write_report
from trainer_backend.pages.story import read_story
from trainer_backend.run.row_lines import Pace, word_iteration
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.terminal.progress import closing_lines

QUESTION = Message(role="user", content="3 + 3?")
WRONG = (finished(dialogue(0.0, 0.0), 1), finished(dialogue(0.0), 2))
RIGHT = (finished(dialogue(0.0, 1.0), 1), finished(dialogue(1.0), 2))


def iteration_row(iteration):
    return {
        "kind": "iteration", "iteration": iteration, "episode/outcome_reward": 0.5,
        "episode/outcome_definition": DEFINITION, "interaction/score_by_turn": [0.25, 0.5],
        "interaction/answers": 1.5, "decision/unique_by_turn": [0.0, 0.0], "decision/nonzero_frac": 0.0,
        "reward/mean": 0.5, "statelm/segments": 1.0, "time/collect_s": 1.0,
    }  # fmt: skip


def dialogue_run(path):
    run = empty_run(tiny_job(), path)
    for iteration, played in ((0, WRONG), (2, RIGHT)):
        row = {"kind": "evaluation", "iteration": iteration, **evaluation_metrics(played)}
        run.append_metrics({**row, "rollout/failed": 0.0, "rollout/finished": 2.0})
        write_rollouts(run.rollouts_file(f"evaluation_{iteration}"), played)
    for iteration in (1, 2):
        run.append_metrics(iteration_row(iteration))
        credits = [Credit([0.0, 1.0], [0.0, 0.0]), Credit([1.0], [0.0])]
        write_rollouts(run.rollouts_file(f"iteration_{iteration}"), RIGHT, credits)
    return run


@pytest.fixture
def run(tmp_path):
    return dialogue_run(tmp_path / "run")


def shown(rollout, **switches):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(episode_view(rollout, [], **switches))
    return console.export_text()


def test_a_decision_shows_what_is_new_and_what_was_edited():
    steps = reader().steps
    assert new_messages(steps[0]) == ["user: 2 + 2?"]
    assert new_messages(steps[1]) == ["tool: the whole chunk"]
    assert new_messages(steps[2]) == [
        "message 2 is now tool: [deleted]",
        'tool: {"status": "success", "deleted_msg_ids": [2], "message": "refused 0 (the task stays)"}',
    ]


def test_an_episode_is_inspected_message_by_message_and_whole_where_asked():
    new, whole = (shown(finished(reader()), full=full) for full in (False, True))
    assert (new.count("the whole chunk"), whole.count("the whole chunk")) == (1, 1)  # then it is a stub
    assert (new.count("2 + 2?"), whole.count("2 + 2?")) == (1, 3)
    assert 'deleteContext {"message_ids": [0, 2]}' in new
    assert "interaction +1" in shown(RIGHT[0], full=False)


def test_tokens_states_and_context_are_shown_by_the_names_of_source_3():
    # 1 2 | 3 4 and 5 | 6 continue each other; the delete keeps 1 2, and 9 | 8 follows
    sampled = [step(1, 0, [1, 2], [3, 4]), step(2, 4, [5], [6]), step(3, 2, [9], [8])]
    episode = reader()
    steps = [
        one.model_copy(update={"policy_logprobs": ids.policy_logprobs, "sampling": ids.sampling})
        for one, ids in zip(episode.steps, sampled, strict=True)
    ]
    steps[-1] = steps[-1].model_copy(update={"is_done": True})
    episode = episode.model_copy(update={"steps": tuple(steps)})
    told = shown(finished(episode), full=True, tokens=True)
    lines = [" ".join(line.split()) for line in told.splitlines()]
    assert "full_history 6 messages (msg_id_counter 6); deleted_msg_ids 2; had_delete_operation true" in lines
    assert [line for line in lines if line.startswith("states")] == [
        "states PENDING GENERATING PROCESSING_TOOLS",
        "states GENERATING PROCESSING_TOOLS",
        "states PENDING GENERATING INTERACTING COMPLETED",
    ]
    edited = episode.model_copy(update={"deleted_msg_ids": (2, 4)})
    assert "deleted_msg_ids 2, 4;" in " ".join(shown(finished(edited), full=False, tokens=True).split())
    assert "full_history" not in shown(finished(edited), full=False)
    whole = episode.model_copy(update={"deleted_msg_ids": (), "had_delete_operation": False})
    line = " ".join(shown(finished(whole), full=False, tokens=True).split())
    assert "(msg_id_counter 6); deleted_msg_ids none; had_delete_operation false" in line
    third = lines[lines.index("decision 3") :]
    names = ("trajectory_snapshots[", "emission_views[", "assistant_turn_boundaries[")
    assert [line for line in third if line.startswith(names)] == [
        "trajectory_snapshots[0] segment 1: prompt_ids 0 to 2, response_ids 2 to 6, "
        "response_mask 1 from 2 to 4, 5 to 6",
        "emission_views[2] segment 2: prompt_ids 0 to 3",
        "assistant_turn_boundaries[2] 3 to 4: response_mask 1",
    ]
    assert {"prompt_ids 1 2 9", "response_ids 8"} <= set(third)
    plain = episode.model_copy(update={"full_history": ()})
    assert "full_history" not in shown(finished(plain), full=False, tokens=True), "it is no conversation"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ((True, False, True), ["trajectory_snapshots[0] segment 2"]),
        ((False, True, True), ["trajectory_snapshots[0] segment 1", "trajectory_snapshots[1] segment 2"]),
    ],
)
def test_edits_alone_close_a_segment_that_is_a_snapshot(changed, told):
    # 1 2 | 3 4, then 1 2 7 | 6 and 1 2 9 | 8: three segments
    sampled = [step(1, 0, [1, 2], [3, 4]), step(2, 2, [7], [6]), step(3, 2, [9], [8])]
    steps = []
    for one, ids, edited in zip(reader().steps, sampled, changed, strict=True):
        seen = one.observation_data.model_copy(update={"changed": {0: QUESTION} if edited else {}})
        calls = {"policy_logprobs": ids.policy_logprobs, "sampling": ids.sampling}
        steps.append(one.model_copy(update={**calls, "observation_data": seen}))
    text = shown(finished(reader().model_copy(update={"steps": tuple(steps)})), full=False, tokens=True)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert [line.split(":")[0] for line in lines if line.startswith("trajectory_snapshots")] == told


def test_what_a_user_told_that_no_prompt_shows_is_inspected_with_its_decision():
    episode = dialogue(1.0)
    answer = UserAnswer(metadata={"mood": "pleased"}, unshown="thank you")
    info = episode.steps[0].step_info.model_copy(update={"user_answer": answer})
    told = episode.model_copy(update={"steps": (episode.steps[0].model_copy(update={"step_info": info}),)})
    text = shown(finished(told, 1), full=False)
    assert "answer  user, not shown: thank you" in text
    assert 'answer  metadata: {"mood": "pleased"}' in text
    assert "answer  " not in shown(RIGHT[1], full=False)


def test_the_report_of_dialogues_speaks_of_their_outcome_alone(run):
    text = told(html := write_report(run, frames=no_frames).read_text())
    assert "last turn score of the last answer" in text
    assert "after iteration 2 (best, last) 1.00 (95 %: 0.21 to 1.00) last turn score" in text
    assert "training last turn score 0.5 0.5 at iteration 1" in text
    assert "iteration last turn score decisions invalid played" in text
    assert "1 last turn score in 1 decision (" in text
    assert "No pictures: &#39;dialogue&#39; draws none; pictures come from" in text
    for absent in ("nique achievement", "Crafter score", "Success rate"):
        assert absent not in text
    assert charts(html)["achieved_by_turn"]["curves"][0]["y"] == [0.25, 0.5]


def test_the_end_of_a_run_and_a_comparison_name_the_outcome(run, tmp_path):
    before, after, difference, chosen = map(str.strip, closing_lines(read_story(run)))
    assert before == "before RL: 0.00 (95 % 0.00 to 0.79) last turn score, 2 worlds"
    assert after == "after iteration 2: 1.00 (95 % 0.21 to 1.00) last turn score, 2 worlds"
    assert difference == "difference, world by world: +1.00 (95 % -0.35 to +1.00), 2 worlds"
    assert chosen.startswith("best checkpoint: iteration 2, 1.00")
    other = dialogue_run(tmp_path / "other")
    sides = read_sides([run.path, other.path])
    assert summary_columns(sides)[3:] == ["last turn score (95 %)", "minus the first (95 %)", "episodes"]
    assert summary_rows(sides)[1][4:] == ("+0.00 (-0.69 to +0.69)", "2")
    html = write_comparison(sides, tmp_path / "out").read_text()
    assert "last turn score (95 %)" in html and "Success rate" not in html


def test_runs_that_count_different_things_are_compared_with_a_doubt(run, tmp_path):
    sides = read_sides([run.path, small_run(tiny_job(), tmp_path / "crafter").path])
    html = write_comparison(sides, tmp_path / "out").read_text()
    assert "the figures are not of one kind: last turn score; unique achievements" in html
    assert summary_columns(sides)[3] == "outcome (95 %)"


def test_an_iteration_is_told_with_the_figures_that_it_has():
    line = word_iteration(iteration_row(1), Pace())
    assert "last turn score 0.50  reward 0.50  answers 1.5  segments 1.0" in line
    assert "rewarded" not in line
