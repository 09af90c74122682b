"""Reading a job: what is accepted, the words in which all else is refused, the names on the plug boards."""

from pathlib import Path

import pytest

from shared_schemas.rollouts import RolloutLimits
from trainer_backend import plugins
from trainer_backend.errors import JobError
from trainer_backend.job.load import dump_job, load_job, parse_job
from trainer_backend.job.rollout_table import RolloutTable
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import table_model
from trainer_backend.rundir.new_job import load_new_job

MODEL = {"model": {"preset": "tiny-0.3m"}}


def refusal(document: dict[str, object]) -> str:
    with pytest.raises(JobError) as caught:
        parse_job({**MODEL, **document}, where="job.toml")
    return str(caught.value)


def test_weights_go_by_folder_where_the_engine_is_in_another_process():
    def by_folder(**tables: dict[str, object]) -> bool:
        return parse_job({**MODEL, **tables}, where="x").config.weights_by_folder

    assert not by_folder()
    assert by_folder(weight_transfer={"backend": "folder"})
    assert by_folder(cluster={})
    assert by_folder(inference={"engine": "vllm", "urls": ["http://h:1"]})


def test_a_job_may_ask_for_as_many_turns_as_a_task_app_accepts_decisions():
    ours, theirs = RolloutTable.model_fields["max_turns"], RolloutLimits.model_fields["max_decisions"]
    assert set(ours.metadata) == set(theirs.metadata)


def test_a_job_may_name_text_last_n_with_any_n():
    rollout = {"env_name": "crafter", "state_keys": ["text_last_1", "text_last_40"]}
    job = {"rollout": rollout, "algorithm": {"advantage": "gigpo", "state_hashing_function": "text_last_7"}}
    assert parse_job({**MODEL, **job}, where="").config.algorithm.state_hashing_function == "text_last_7"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("temperature", "rollout.temperature"),
        ("top_p", "rollout.top_p"),
        ("top_k", "rollout.top_k"),
        ("max_tokens", "rollout.max_tokens"),
        ("seed", "job.seed"),
        ("model", "job.name"),
        ("inference_url", "services.gateway_host"),
        ("exact_tokens", "nothing: the gateway tells them"),
        ("processed_logprobs", "logprobs of [rollout_only]"),
        ("chat_template_kwargs", "model.chat_template_kwargs"),
        ("step_rewards", "the step_rewards_* keys of [training]"),
    ],
)
def test_a_policy_config_cannot_go_past_what_the_job_checks(key: str, meant: str):
    message = refusal({"rollout": {"policy_config": {key: 1}}})
    assert f"rollout.policy_config: {key!r} is set by the job itself; use {meant}" in message


def test_a_new_job_needs_its_model_folder_with_a_config_and_a_stored_one_does_not(tmp_path: Path):
    path, folder = tmp_path / "job.toml", tmp_path / "models" / "smoll"
    path.write_text(f'[model]\npath = "{folder}"\n')
    assert load_job(path).config.model.path == folder
    with pytest.raises(JobError, match=r"which is no folder$"):
        load_new_job(path)
    folder.with_name("small").mkdir(parents=True)
    with pytest.raises(JobError, match=r"no folder\. Did you mean '.*/models/small'\?$"):
        load_new_job(path)
    folder.mkdir()
    with pytest.raises(JobError, match=r"config\.json is missing"):
        load_new_job(path)
    (folder / "config.json").write_text("{}")
    assert load_new_job(path).config.model.path == folder


@pytest.mark.parametrize("value", [12345, ["hush-12345"], {"key": "hush-12345"}])
def test_a_key_of_the_wrong_type_is_not_repeated(value: object):
    message = refusal({"services": {"task_api_key": value}})
    assert "services.task_api_key" in message
    assert "12345" not in message


@pytest.mark.parametrize("home", ["training", "rollout", "training.rewards"])
def test_the_switches_are_read_from_each_of_their_published_homes(home: str):
    switches = {"step_rewards_enabled": True, "step_rewards_mode": "env_sparse"}
    document = {"training": {"rewards": switches}} if home == "training.rewards" else {home: switches}
    training = parse_job({**MODEL, **document}, where="job.toml").config.training
    assert (training.step_rewards_enabled, training.step_rewards_mode) == (True, "env_sparse")
    assert not parse_job(MODEL, where="x").config.training.step_rewards_enabled, "absent ones mean off"


def test_a_file_that_is_no_toml_is_refused_with_its_path(tmp_path: Path):
    path = tmp_path / "job.toml"
    for content, told in (
        (None, "no such file"),
        (b"[model\n", "not valid TOML"),
        (b"\xff\xfe", "cannot be read"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(JobError, match=told) as caught:
            load_job(path)
        assert str(caught.value).startswith(str(path))


def test_a_resolved_job_reads_back_as_itself_and_holds_no_key(tmp_path: Path):
    job = parse_job({**MODEL, "services": {"task_url": "http://h:1", "task_api_key": "hush-hush"}}, where="x")
    path = tmp_path / "job.toml"
    path.write_text(dump_job(job.config))
    assert "hush" not in path.read_text()
    assert load_job(path).config.model_dump(exclude={"services"}) == job.config.model_dump(
        exclude={"services"}
    )
    assert load_job(path).config.services.task_url == ("http://h:1",)


def test_every_key_of_a_board_is_a_key_of_a_job_whose_default_is_on_it():
    for dotted, board in plugins.BOARDS.items():
        table, key = dotted.split(".")
        default = table_model(JobConfig.model_fields[table]).model_fields[key].default
        assert default is None or default in board


@pytest.mark.parametrize("key", plugins.BOARDS)
def test_a_job_with_a_name_that_no_board_has_is_refused_where_it_stands(key: str):
    table, name = key.split(".")
    document = {
        "model": {"path": "m"},
        table: {name: "none_of_them", **({"path": "m"} if table == "model" else {})},
    }
    if key == "model.preset":
        del document["model"]["path"]
    with pytest.raises(JobError, match=rf"^here: {key} is 'none_of_them'; known: "):
        parse_job(document, where="here")


def test_a_sentence_ends_before_its_hint_begins():
    assert str(JobError("x is 3")) == "x is 3"
    for detail in ("x is 3", "x is 3."):
        assert str(JobError(detail, where="job.toml", hint="Take 2.")) == "job.toml: x is 3. Take 2."
    assert str(JobError("is it 2?", hint="Take 2.")) == "is it 2? Take 2."
