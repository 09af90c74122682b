"""A whole job for real: child process, HTTP, engine, gradients, checkpoints. And again after stops."""

import json
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import rows_of, tiny_job, train_job, warmed_up
from tests.processes import wait_until
from trainer_backend import job_parts
from trainer_backend.errors import JobTeachesNothing
from trainer_backend.job.load import dump_job
from trainer_backend.run.stopping import STOPPING
from trainer_backend.rundir.checkpoint_paths import best_checkpoint, latest_checkpoint, read_iteration
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.spool import read_ledger
from trainer_backend.rundir.state import REFUSED, choose_exit_code, read_log, read_state, read_status
from trainer_backend.terminal.output import GONE


def test_the_job_runs_to_its_end_and_changes_the_model(trained):
    directory, _, progress = trained
    assert (progress.iteration, progress.policy_version, progress.updates) == (2, 2, 8)
    before = load_file(directory.checkpoints / "iteration_0" / "model.safetensors")
    after = load_file(directory.checkpoints / "iteration_2" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_warm_up_teaches_something(trained):
    directory, _, _ = trained
    (row,) = rows_of(directory, "warmup")[-1:]
    vocabulary = json.loads((directory.checkpoints / "iteration_0" / "config.json").read_text())["vocab_size"]
    assert row["warmup/loss"] < 0.6 * math.log(vocabulary)  # of a uniform guess


def test_what_it_told_and_how_it_ended_stand_in_its_directory(trained):
    directory, reporter, _ = trained
    lines, _ = read_log(directory.path)
    assert sorted(line.text for line in lines) == sorted(reporter.lines + reporter.row_lines)
    assert [line.split("  ")[0] for line in reporter.row_lines if "held-out" not in line] == [
        "iteration 1 of 2",
        "iteration 2 of 2",
    ]
    seen = read_status(directory.path)
    assert (seen.holder, seen.interrupted) == (None, False)
    assert (seen.state.state, seen.state.iteration, seen.state.starts) == ("ended", 2, 1)
    ledger = read_ledger(directory.path)
    for line in ledger:
        stored = read_rollouts(directory.rollouts_file(f"iteration_{line.iteration}"))
        assert line.rollout_ids == tuple(rollout.rollout_id for rollout in stored)
    assert [line.iteration for line in ledger] == [1, 2]
    assert not list(directory.rollouts.glob("*.jsonl")), "what is stored for good needs no spool"


def test_every_iteration_leaves_its_row_and_its_rollouts(trained):
    directory, reporter, _ = trained
    rows = rows_of(directory, "iteration")
    assert [row["iteration"] for row in rows] == [1, 2]
    assert reporter.rows[-1]["kind"] == "evaluation"
    for row in rows:
        stored = read_rollouts(directory.rollouts_file(f"iteration_{row['iteration']}"))
        assert len(stored) == 8
        assert row["decision/count"] == sum(len(rollout.trajectory.steps) for rollout in stored)


def test_recomputed_log_probs_are_those_that_were_sampled(trained):
    directory, _, _ = trained
    assert all(row["mismatch/logprob_max"] < 1e-4 for row in rows_of(directory, "iteration"))


def test_the_engine_s_totals_are_those_of_the_rollouts(trained):
    directory, _, _ = trained
    for row in rows_of(directory, "iteration"):
        stored = read_rollouts(directory.rollouts_file(f"iteration_{row['iteration']}"))
        calls = [step.policy_logprobs for rollout in stored for step in rollout.trajectory.steps]
        assert row["inference/requests"] == len(calls) == row["decision/count"]
        assert row["inference/sampled_tokens"] == sum(len(call.token_ids) for call in calls)
        assert 1 <= row["inference/mean_running"] <= 8  # episodes


def test_the_rollouts_are_plain_parquet_with_the_credit_of_every_decision(trained):
    directory, _, _ = trained
    table = pq.read_table(directory.rollouts_file("iteration_1")).to_pylist()
    for row in table:
        unique = [decision["unique_delta"] for decision in row["decisions"]]
        assert [decision["reward"] for decision in row["decisions"]] == unique
        assert sum(unique) == row["unique_achievements"]
        assert all(np.isfinite(decision["advantage"]) for decision in row["decisions"])


def test_a_stored_rollout_is_credited_again_to_the_same_numbers(trained):
    directory, _, _ = trained
    path = directory.rollouts_file("iteration_2")
    again = job_parts.credit(directory.job()).credit(read_rollouts(path))
    rows = pq.read_table(path).to_pylist()
    stored = [[decision["advantage"] for decision in row["decisions"]] for row in rows]
    assert [list(item.advantages_T) for item in again.credits] == stored


def test_the_best_checkpoint_is_the_one_with_the_best_evaluation(trained):
    directory, _, _ = trained
    evaluations = rows_of(directory, "evaluation")
    best = max(evaluations, key=lambda row: row["eval/outcome_reward"])["iteration"]
    assert best_checkpoint(directory.checkpoints).name == f"iteration_{best}"


def test_transformers_loads_the_best_checkpoint_and_computes_what_the_engine_did(trained):
    directory, _, _ = trained
    folder = directory.checkpoints / "best"
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    played = read_rollouts(directory.rollouts_file(f"evaluation_{read_iteration(folder.resolve())}"))
    call = played[0].trajectory.steps[0].policy_logprobs
    prompt, sampled = call.prompt_token_ids, call.token_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
    assert directory.job().rollout.temperature == 1.0
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(list(call.logprobs), abs=1e-4)
    assert tokenizer.decode(prompt, skip_special_tokens=True).strip()


def test_no_key_is_written_anywhere(trained):
    directory, reporter, _ = trained
    for path in directory.path.rglob("*"):
        if path.is_file() and path.suffix in {".toml", ".json", ".jsonl", ".log"}:
            assert "Bearer" not in path.read_text(errors="replace")
    for row in read_rollouts(directory.rollouts_file("iteration_1")):
        assert "inference_key" not in row.model_dump_json()
    assert not any("key" in line for line in reporter.lines)


@pytest.mark.timeout(120)
def test_a_terminal_that_is_gone_stops_no_run_and_its_hang_up_saves_and_leaves_nothing_running(
    trained, tmp_path: Path
):
    """`run/test_stopping.py` has the other signals."""
    path, run = tmp_path / "job.toml", tmp_path / "run"
    short = {"rollout__episodes_per_batch": 4, "rollout__max_turns": 2, "evaluation__instances": 1}
    path.write_text(dump_job(tiny_job(**warmed_up(trained), **short, training__iterations=500)))

    def texts() -> list[str]:
        return [line.text for line in read_log(run)[0]]

    words = ("train", str(path), "--run", str(run), "--dashboard", "--no-report")
    with subprocess.Popen(
        [sys.executable, "-m", "trainer_backend", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # The tests may run under nohup, whose children would stay on.
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        urls = {"task app": "", "dashboard": ""}
        while not all(urls.values()):
            name, _, url = process.stdout.readline().strip().rpartition(": ")
            urls |= {known: url for known in urls if name.endswith(known)}
        assert "tiny" in httpx.get(urls["dashboard"], headers={"Accept": "text/html"}).text
        process.stdout.close()  # as `head -1` does
        while not any(text.startswith("iteration 2 of 500  ") for text in texts()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            assert process.poll() is None
        process.send_signal(signal.SIGHUP)
    assert process.returncode == 130
    assert not any(map(_listening, urls.values()))
    latest = latest_checkpoint(run / "checkpoints")
    assert latest is not None
    last = (
        f"stopped by SIGHUP after iteration {read_iteration(latest)}; continue with: turnwise train --resume"
    )
    assert texts()[-1] == f"{last} {run}"
    assert (texts().count(GONE), texts().count(STOPPING)) == (1, 1)
    counted = [int(text.split()[1]) for text in texts() if text.startswith("iteration ")]
    assert counted == list(range(1, read_iteration(latest) + 1))


BUSY_WITH_A_TASK_APP = """
import asyncio, sys, threading
from functools import partial
from pathlib import Path
from pydantic import SecretStr
from trainer_backend.collect.task_apps import own_task_app
from trainer_backend.run.stopping import stop_on_signals

async def main():
    say = partial(print, flush=True)
    with stop_on_signals(tell=say, log=say):
        async with own_task_app(Path(sys.argv[1]), SecretStr("a-key")) as (url, _):
            print(url, flush=True)
            await asyncio.to_thread(threading.Event().wait)   # a step that never ends

asyncio.run(main())
"""


@contextmanager
def busy_with_a_task_app(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and the address of the task app that it has started."""
    command = [sys.executable, "-c", BUSY_WITH_A_TASK_APP, str(folder / "task_app.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert _listening(url)
        yield process, url


@pytest.mark.timeout(120)
def test_a_second_ctrl_c_leaves_no_task_app_running(tmp_path: Path):
    with busy_with_a_task_app(tmp_path) as (process, url):
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == STOPPING
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    wait_until(lambda: not _listening(url), within_s=60)  # the child notices that its stdin closed


def _listening(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    with suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


def test_prompts_that_are_too_long_are_no_outage(tmp_path: Path):
    short = {"warmup__episodes": 2, "warmup__epochs": 1, "evaluation__instances": 1}
    with pytest.raises(JobTeachesNothing) as caught:
        train_job(tiny_job(inference__max_model_len=40, **short), tmp_path / "run")
    assert choose_exit_code(caught.value) == REFUSED
    state = read_state(open_run(tmp_path / "run").path)
    assert state is not None and (state.state, state.code) == ("failed", "job_teaches_nothing")
    assert "1 of 1 rollouts lost: the first prompt does not fit the model" in state.detail
    assert "('crafter', seed " in state.detail and "inference.max_model_len" in state.detail
