"""What `turnwise check` prints in addition to the job; it refuses a fixed model that is too large."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainer_backend.__main__ import app
from trainer_backend.errors import JobError, ModelFolderError
from trainer_backend.job.load import parse_job
from trainer_backend.job.rules import biases


@pytest.fixture
def mixed(trained, tmp_path) -> Path:
    """A job with a fixed policy."""
    file = tmp_path / "job.toml"
    file.write_text(
        f'model.preset = "tiny-0.3m"\nrollout_only.model_path = "{trained[0].path}"\n'
        "rollout_allocation_schedule.alpha = 0.5\n"
    )
    return file


def test_a_fixed_policy_that_fits_is_told_with_its_folder(trained, mixed):
    found = CliRunner().invoke(app, ["check", "--no-trial", str(mixed)])
    assert found.exit_code == 0
    checkpoint = f"{trained[0].path}/checkpoints/iteration_"
    assert f"fixed policy 'fixed': {checkpoint}" in found.stderr.replace("\n", "")


@pytest.mark.usefixtures("own_boards")
def test_check_takes_the_schedule_of_the_page_as_the_page_says(mixed, monkeypatch):
    tree = Path(__file__).parents[3]
    (command,) = re.findall(r"\$ turnwise (check .*)", (tree / "docs/mixture.md").read_text("utf-8"))
    shutil.copy(tree / "examples/plugins/pulses.py", mixed.parent)
    monkeypatch.chdir(mixed.parent)
    found = CliRunner().invoke(app, [*command.split(), "--no-trial"])
    assert found.exit_code == 0
    assert re.search(r'type = "pulses" +# default: "constant"', found.stdout)
    key = "rollout_allocation_schedule"
    assert f"{key}.alpha is not read by {key}.type = 'pulses'" in found.stderr


def test_adapters_of_layers_that_a_model_lacks_are_told_without_its_weights(tmp_path, model_folders):
    file = tmp_path / "job.toml"
    file.write_text('lora = { target_modules = ["q_proj", "query_proj"] }\n')
    for model in ('preset="tiny-0.3m"', f"path={model_folders['llama']}"):
        with pytest.raises(
            JobError, match=r"^lora\.target_modules: .*'query_proj'\. Did you mean .* Known: all-linear, down"
        ):
            CliRunner().invoke(app, ["check", str(file), "--set", f"model.{model}"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("family", "name", "told"),
    [
        ("qwen3", "enable_thinkin", "Did you mean 'enable_thinking'. Known: .*enable_thinking"),
        ("llama", "date_strin", "Did you mean 'date_string'"),
        ("qwen3", "chat_template", "reads no 'chat_template'; known: "),
    ],
)
def test_settings_that_a_chat_template_does_not_read_are_told(tmp_path, model_folders, family, name, told):
    file = tmp_path / "job.toml"
    file.write_text(
        f'model = {{ path = "{model_folders[family]}", chat_template_kwargs = {{ {name} = "1" }} }}'
    )
    with pytest.raises(ModelFolderError, match=rf"^model\.chat_template_kwargs: .*{told}"):
        CliRunner().invoke(app, ["check", "--no-trial", str(file)], catch_exceptions=False)


def test_rows_that_do_not_fit_are_told_by_the_tokenizer_of_a_named_model_without_its_weights(
    tmp_path: Path, model_folders: dict[str, Path]
):
    rows = [{"id": "long", "prompt": "wood 2 " * 40}, {"id": "short", "prompt": "wood"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({**row, "answer": "4"}) for row in rows))
    folder = shutil.copytree(model_folders["qwen3"], tmp_path / "qwen3")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    file = tmp_path / "job.toml"
    file.write_text(
        f'[model]\npath = "{folder}"\n[rollout]\nenv_name = "dialogue"\n[multi_turn]\nenable = true\n'
        "max_model_length = 100\n"
        f'[data]\npath = "{tmp_path}/a.jsonl"\nevaluation_path = "{tmp_path}/a.jsonl"\n'
        'interaction = "gsm8k"\n'
    )

    def told() -> str:
        found = CliRunner().invoke(app, ["check", "--no-trial", str(file)])
        assert found.exit_code == 0
        return " ".join(found.stderr.split())

    assert "data.path: 1 of 2 training rows do not fit the model: long (" in told()
    assert "tool calls: hermes; reasoning is dropped behind the user's next question" in told()
    (folder / "tokenizer.json").unlink()  # perhaps it is on the machine that will train
    assert "rows are not measured: " in told()


@pytest.mark.parametrize(
    ("algorithm", "training", "keys"),
    [
        ({}, {"aggregation": "constant"}, []),
        ({"advantage": "rloo"}, {"aggregation": "constant"}, []),
        ({"advantage": "branch"}, {"aggregation": "constant"}, []),
        ({"advantage": "gae", "gae_lambda": 1.0}, {"aggregation": "constant"}, []),
        ({"advantage": "gae"}, {"aggregation": "constant"}, ["algorithm.gae_lambda"]),
        ({"advantage": "gigpo"}, {}, ["algorithm.advantage", "training.aggregation"]),
        ({}, {"aggregation": "constant", "skip_certain_above": 0.98}, ["training.skip_certain_above"]),
        (
            {"gamma": 0.9},
            {"aggregation": "episode_equal", "skip_flat_groups": True, "refill_rounds": 1},
            ["training.aggregation", "algorithm.gamma", "training.refill_rounds"],
        ),
    ],
)
def test_what_biases_the_gradient_of_a_job_is_named_by_its_keys(algorithm, training, keys):
    tables = {
        "model": {"preset": "tiny-0.3m"},
        "algorithm": {"gamma": 1.0, **algorithm},
        "training": training,
    }
    found = biases(parse_job(tables, where="tests").config)
    assert [line.partition(" ")[0] for line in found] == keys
