"""`turnwise serve` as a process: a run, or a model folder, for the official `openai` client."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from service_kit.server import Listener
from tests.conftest import policy_server, tiny_job
from trainer_backend.__main__ import app
from trainer_backend.errors import JobError, ModelFolderError, RunDirectoryError
from trainer_backend.processes.policy_server import FolderPolicy, PolicyServer
from trainer_backend.rundir.checkpoint_paths import best_checkpoint
from trainer_backend.rundir.layout import create_run
from trainer_backend.terminal.serve import what_to_serve

ROOT = Path(__file__).parents[3]
KEY = "a key of my own"
MESSAGES = [{"role": "user", "content": "wood 2 tree 1"}]


@contextmanager
def served(run: Path, *, model: str) -> Iterator[openai.OpenAI]:
    """A client of the process while it serves; then it is asked to end, and does so in order."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer_backend", "serve", str(run), "--port", "0"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "TURNWISE_API_KEY": KEY},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        line = next(line for line in process.stdout if "is served as" in line)
        assert f" is served as {model} at http://127.0.0.1:" in line
        url = line.split(" at ")[1].split(";")[0]
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "stopping\n")


def test_a_run_serves_its_best_checkpoint_until_it_is_stopped(trained):
    run = trained[0].path
    with served(run, model="tiny/actor") as client:
        assert [model.id for model in client.models.list()] == ["tiny/actor"]
        reply = client.chat.completions.create(model="tiny/actor", messages=MESSAGES, max_tokens=4, seed=1)
        assert 1 <= reply.usage.completion_tokens <= 4
        # A library's wish that nothing enforces has no effect, and the reply and the server say so.
        wishes = {"response_format": {"type": "json_object"}, "parallel_tool_calls": False}
        asked = client.chat.completions.with_raw_response.create(
            model="tiny/actor", messages=MESSAGES, max_tokens=4, seed=1, **wishes
        )
        assert asked.headers["X-Turnwise-Ignored"] == "parallel_tool_calls, response_format"
        assert asked.parse().choices[0].message == reply.choices[0].message
        assert client.models.retrieve("tiny/actor").ignored == dict.fromkeys(wishes, 1)
        stranger = client.with_options(api_key="another")
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_a_model_folder_is_served_without_a_job_and_to_this_machine_without_a_key(model_folders):
    loaded, folder = what_to_serve(model_folders["llama"], None, ["model.device=cpu"])
    job = loaded.config
    with (
        Listener("127.0.0.1", 0) as listener,
        FolderPolicy(
            job.model, PolicyServer(job.job.name, listener, job.inference, key="none"), folder
        ).serving() as inference,
        openai.OpenAI(base_url=f"{inference.url}/v1", api_key="any", max_retries=0, timeout=60) as client,
    ):
        with pytest.raises(openai.PermissionDeniedError, match="only this machine may ask"):
            client.with_options(default_headers={"Host": "rebound.example"}).models.list()
        (model,) = client.models.list()
        assert model.model_dump()["max_model_len"] == 1024, "all positions that the model has"
        reply = client.chat.completions.create(model=model.id, messages=MESSAGES, max_tokens=4)
        assert reply.model == "llama/actor"


def test_what_is_served_is_what_a_person_means(trained, model_folders: Mapping[str, Path], tmp_path: Path):
    run, folder = trained[0].path, model_folders["qwen3"]
    loaded, model = what_to_serve(run, None, ["inference.max_running=3"])
    assert (loaded.config.job.name, loaded.config.inference.max_running) == ("tiny", 3)
    assert model == best_checkpoint(run / "checkpoints")
    checkpoint = run / "checkpoints" / "iteration_0"
    assert what_to_serve(checkpoint, None, [])[1] == checkpoint
    job = tmp_path / "job.toml"
    job.write_text(f'[job]\nname = "mine"\n[model]\npath = "{folder}"\n[inference]\nmax_model_len = 64')
    loaded, model = what_to_serve(folder, job, [])
    assert (loaded.config.job.name, loaded.config.inference.max_model_len, model) == ("mine", 64, folder)


def test_serving_needs_one_copy_of_the_model_and_its_cache(trained):
    folder = trained[0].path / "checkpoints" / "iteration_0"
    job = tiny_job()
    with policy_server(job) as server:
        policy = FolderPolicy(job.model, server, folder)
    weights = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert policy.plan.needs.device.keys() == {"engine", "cache"}
    assert policy.plan.needs.device["engine"] == 4 * weights, "float32 on a CPU"
    assert replace(policy.plan, free=4 * weights).shortage() is None
    assert replace(policy.plan, free=4 * weights - 1).shortage() is not None


def test_what_cannot_be_served_is_told_before_anything_is_loaded(tmp_path, model_folders, monkeypatch):
    with pytest.raises(ModelFolderError, match=r"config\.json: it cannot be read"):
        what_to_serve(tmp_path, None, [])
    with pytest.raises(RunDirectoryError, match="no checkpoint yet"):
        what_to_serve(create_run(tiny_job(), tmp_path / "run").path, None, [])
    monkeypatch.delenv("TURNWISE_API_KEY", raising=False)
    asked = ["serve", str(model_folders["llama"]), "--host", "192.0.2.1"]  # which others reach
    with pytest.raises(JobError, match="variable TURNWISE_API_KEY is not set"):
        CliRunner().invoke(app, asked, catch_exceptions=False)
