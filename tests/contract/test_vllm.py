"""A job whose actor samples at vLLM servers (fakes, real weights): exact tokens, versions, a lost replica."""

import asyncio
import re
import socket
from pathlib import Path

import aiohttp
import pytest
from safetensors.torch import load_file

from task_app.policies.openai_config import OpenAIConfig
from tests.conftest import rows_of, train_job
from tests.contract.test_a_named_model import short_job
from tests.trainer_backend.inference.fake_vllm import fake_vllm
from tests.trainer_backend.inference.fake_vllm_environment import fake_environment, hosted
from trainer_backend import job_parts, learner_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.errors import EngineStopped, JobError, WeightsRefused
from trainer_backend.inference.vllm_engine import VllmEngine
from trainer_backend.job.tables import ClusterTable
from trainer_backend.job.training_table import LoraTable
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.state import read_state


def vllm_job(folder: Path, *urls: str, **keys):
    """Two iterations of 4 episodes of 3 decisions."""
    job = short_job(folder, None)
    inference = job.inference.model_copy(update={"engine": "vllm", "urls": urls, **keys})
    training = job.training.model_copy(update={"iterations": 2, "learning_rate": 1e-3})
    return job.model_copy(update={"inference": inference, "training": training})


def assert_newest_weights_sampled(directory: RunDirectory) -> None:
    for number in (1, 2):
        for rollout in read_rollouts(directory.rollouts_file(f"iteration_{number}")):
            for step in rollout.trajectory.steps:
                assert step.policy_logprobs.versions == ((0, number - 1),)


def test_two_replicas_sample_each_version_and_a_lost_one_loses_no_rollout(model_folders, tmp_path):
    folder = model_folders["qwen3"]
    with (
        fake_vllm(folder, max_model_len=640) as (_, first_url),
        fake_vllm(folder, max_model_len=640) as (second, second_url),
    ):
        second.down_after = 3
        directory, reporter, progress = train_job(vllm_job(folder, first_url, second_url), tmp_path / "run")
    assert (progress.iteration, progress.policy_version) == (2, 2)
    rows = rows_of(directory, "iteration")
    for row in rows:
        assert row["mismatch/logprob_max"] < 1e-4
        assert (row["rollout/finished"], row["inference/requests"]) == (4, 12)
    assert_newest_weights_sampled(directory)
    assert any("is lost" in line for line in reporter.lines)
    state = read_state(directory.path)
    assert state is not None
    app, first, other = state.processes
    assert (app.role, app.state, first.role, other.role) == ("task app", "serving", "replica", "replica")
    assert (first_url, first.state, first.version) == (f"http://{first.name}", "serving", 2)
    assert (second_url, other.state, other.version) == (f"http://{other.name}", "lost", 0)
    assert second_url in other.word
    # The last two versions, and the newest is what the last checkpoint holds.
    assert sorted(path.name for path in directory.weights.iterdir()) == ["version_1", "version_2"]
    saved = load_file(directory.checkpoints / "iteration_2" / "model.safetensors")
    served = load_file(directory.weights / "version_2" / "model.safetensors")
    assert saved.keys() == served.keys() and all((saved[name] == served[name]).all() for name in saved)


def test_servers_on_the_learners_gpu_sleep_during_each_update(model_folders, tmp_path):
    folder = model_folders["qwen3"]
    with fake_vllm(folder, max_model_len=640) as (fake, url):
        directory, _, progress = train_job(vllm_job(folder, url, sleep=True), tmp_path / "run")
    assert progress.policy_version == 2
    update = ["sleep 2", "wake weights", "load", "wake kv_cache"]
    assert fake.turns == ["load", *update, *update]
    for row in rows_of(directory, "iteration"):
        assert row["mismatch/logprob_max"] < 1e-4
        assert row["inference/sleep_s"] > 0 and row["inference/wake_s"] > 0


# With [cluster] the server lives and fails every sample; rollouts wait until it was killed and serves again.
# That job trains adapters, which the server merges into their base.
@pytest.mark.parametrize(("cluster", "code"), [(None, "exit code 9"), (ClusterTable(), r"SIGKILL \(.*\)")])
def test_a_server_that_the_run_starts_loses_no_rollout_when_it_dies_or_fails_and_ends_with_it(
    cluster, code, model_folders, tmp_path
):
    folder, environment = model_folders["qwen3"], tmp_path / "environment"
    python = fake_environment(environment)
    (environment / "deadly").write_text("" if cluster is None else "down")
    own = {
        # As long until a server that only fails is killed. One that has ended is started again at once.
        "replica_wait_s": 120.0 if cluster is None else 20.0,
        "replicas": 1,
        "vllm_python": python,
        "vllm": {"max_num_seqs": 8},
        "sleep": cluster is None,
    }
    lora = None if cluster is None else LoraTable(rank=2)
    job = vllm_job(folder, **own).model_copy(update={"cluster": cluster, "lora": lora})
    with hosted(environment):
        directory, reporter, progress = train_job(job, tmp_path / "run")
    assert progress.iteration == 2 and not (environment / "deadly").exists()
    for row in rows_of(directory, "iteration"):
        assert row["mismatch/logprob_max"] < 1e-4
        assert (row["rollout/finished"], row["rollout/failed"]) == (4, 0)
    assert_newest_weights_sampled(directory)
    state = read_state(directory.path)
    assert state is not None
    replicas = [(one.state, one.version) for one in state.processes if one.role == "replica"]
    assert replicas == [("serving", 2)], "a gateway's too"
    base = [] if lora is None else ["base"]
    found = sorted(path.name for path in directory.weights.iterdir())
    assert found == [*base, "start", "version_1", "version_2"]
    assert (directory.weights / "version_2" / "config.json").exists() == (lora is None)
    lines = "\n".join(reporter.lines)
    (url,) = set(re.findall(rf"vLLM server (\S+) ended with {code}; it is restarted", lines))
    assert f"replica {url} is lost" in lines
    for address in set(re.findall(r"http://127\.0\.0\.1:(\d+): vLLM 0\.32\.0", lines)):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(address)))


def test_an_update_that_no_server_takes_is_saved_before_the_run_ends(model_folders, tmp_path):
    folder = model_folders["qwen3"]
    with fake_vllm(folder, max_model_len=640) as (fake, url):
        fake.loads_at_most = 2  # the weights of the start, and those of iteration 1
        job = vllm_job(folder, url, replica_wait_s=2.0)
        with pytest.raises(WeightsRefused, match=r"no replica serves version 2: .* no space left"):
            train_job(job, tmp_path / "run")
    directory = open_run(tmp_path / "run")
    assert [row["iteration"] for row in rows_of(directory, "iteration")] == [1, 2]
    assert (directory.checkpoints / "iteration_2").is_dir()


def test_an_address_that_is_no_vllm_is_refused_before_anything_is_played(model_folders, tmp_path):
    folder = model_folders["qwen3"]
    with pytest.raises(JobError, match=r"no vLLM server answered within 0\.1 s"):
        train_job(vllm_job(folder, "http://127.0.0.1:9", replica_wait_s=0.1), tmp_path / "run")
    with (
        fake_vllm(folder, max_model_len=64) as (_, url),
        pytest.raises(JobError, match=r"inference\.max_model_len is 640"),
    ):
        train_job(vllm_job(folder, url), tmp_path / "other")


@pytest.mark.parametrize(
    ("cluster", "keys", "timeout_s"),
    [
        (None, {"urls": ("http://h:1",)}, 480),
        (ClusterTable(), {"urls": ("http://h:1",)}, 480),
        (None, {"vllm_python": "python"}, 780),  # a server of the run's own may be restarted
        (None, {"urls": ("http://h:1",), "replica_wait_s": 86_400}, 3600),
    ],
)
def test_a_policy_waits_longer_than_a_replica_may_be_gone(
    cluster, keys, timeout_s, model_folders, tmp_path: Path
):
    """300 s by default, 60 s in which a wedged one is found, and 120 s for the sample itself."""
    job = vllm_job(model_folders["qwen3"], **keys).model_copy(update={"cluster": cluster})
    with job_parts.gateways(job, FixedSetup(), RunDirectory(tmp_path, "run"), print) as gateways:
        request = job_parts.planner(job, "run", gateways.inference).training(1)[0]
    assert OpenAIConfig.model_validate(request.policy.config).request_timeout_s == timeout_s
    assert 2 * VllmEngine.silence_s < OpenAIConfig.model_fields["request_timeout_s"].default


async def played(inference: Inference) -> None:
    """A sample that gets no answer, and an iteration that does not end without it."""
    assert inference.key is not None
    headers = {"Authorization": f"Bearer {inference.key.get_secret_value()}"}
    messages = [{"role": "user", "content": "tree left"}]
    body = {"model": inference.model, "messages": messages, "max_tokens": 4}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{inference.url}/v1/chat/completions", json=body) as reply,
    ):
        assert reply.status >= 500
    await asyncio.Event().wait()


async def test_a_gateway_without_any_server_left_ends_the_run_with_the_reason(model_folders, tmp_path: Path):
    folder = model_folders["qwen3"]
    with fake_vllm(folder, max_model_len=640) as (fake, url):
        job = vllm_job(folder, url, replica_wait_s=2.0, sleep=True)
        job = job.model_copy(update={"cluster": ClusterTable()})
        learner = LocalLearner.fresh(learner_parts.learner_config(job), [])
        directory = create_run(job, tmp_path / "run")
        with job_parts.gateways(job, FixedSetup(), directory, print) as gateways:
            async with gateways.serving(learner) as server:
                await server.publish(0)
                await server.release()  # its process has the servers sleep
                assert not server.gateways[0].may_start.is_set(), "another process would wake them"
                await server.resume()  # an update without a step
                assert server.gateways[0].may_start.is_set()
                assert fake.turns == ["load", "sleep 2", "wake weights", "load", "wake kv_cache"]
                await server.publish(1)
                fake.down, fake.loads_at_most = True, 0
                with pytest.raises(
                    EngineStopped, match=r"gateway_0: no replica has served for 2 s"
                ) as caught:
                    await server.while_serving(played(gateways.inference))
    assert f"{url}: " in str(caught.value)
    assert [Path(load).name for load in fake.loads] == ["version_0", "version_0", "version_1"]
    log = (tmp_path / "run" / "gateway_0.log").read_text(encoding="utf-8")
    assert log.splitlines()[-1].startswith("no replica has served for 2 s")
