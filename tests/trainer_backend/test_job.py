"""Reading a job: what is accepted, and the words in which everything else is refused."""

from pathlib import Path

import pytest

from shared_schemas.rollouts import RolloutLimits
from trainer_backend.errors import JobError
from trainer_backend.job.load import dump_job, load_job, parse_job
from trainer_backend.job.rollout_table import RolloutTable
from trainer_backend.rundir.new_job import load_new_job

MODEL = {"model": {"preset": "tiny-0.3m"}}


def refusal(document: dict[str, object]) -> str:
    with pytest.raises(JobError) as caught:
        parse_job({**MODEL, **document}, where="job.toml")
    return str(caught.value)


def test_a_job_needs_no_more_than_a_model():
    job = parse_job(MODEL, where="job.toml").config
    assert job.warmup is None
    assert not job.training.step_rewards_enabled  # absent switches mean off


def test_a_misspelt_key_is_refused_with_its_place_and_what_was_meant():
    message = refusal({"training": {"step_reward_mode": "off"}})
    meant = "training.step_reward_mode is not a key. Did you mean 'step_rewards_mode'? Known: aggregation, "
    assert message.startswith(f"job.toml: {meant}")


def test_a_misspelt_table_is_refused_with_what_was_meant():
    assert "Did you mean 'training'?" in refusal({"trainning": {}})


def test_a_misspelt_value_is_refused_with_the_known_ones():
    message = refusal({"training": {"step_rewards_mode": "decision_step"}})
    assert message == (
        "job.toml: training.step_rewards_mode is 'decision_step'. Did you mean 'decision_stepwise'? "
        "Known: decision_stepwise, env_sparse, off"
    )


def test_an_unknown_estimator_is_refused_before_anything_starts():
    message = refusal({"algorithm": {"advantage": "stepwize"}})
    assert "algorithm.advantage is 'stepwize'" in message
    assert "Did you mean 'stepwise'?" in message


def test_a_number_out_of_bounds_is_refused_with_the_bound():
    assert "algorithm.gamma is 1.5" in refusal({"algorithm": {"gamma": 1.5}})


def test_a_number_that_is_not_finite_is_refused():
    assert "training.learning_rate is inf" in refusal({"training": {"learning_rate": float("inf")}})


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"job": 5}, "job.toml: job is 5, but it is a table; write [job]"),
        ({"training": 5}, "job.toml: training is 5, but it is a table; write [training]"),
        ({"rollout": "x"}, "job.toml: rollout is 'x', but it is a table; write [rollout]"),
        (
            {"training": {"rewards": 3}},
            "job.toml: training.rewards is 3, but it is a table; write [training.rewards]",
        ),
    ],
)
def test_a_value_where_a_table_belongs_is_refused(document: dict[str, object], told: str):
    assert refusal(document) == told


@pytest.mark.parametrize("table", ["services", "model", "inference", "algorithm", "evaluation"])
def test_every_other_table_is_one_too(table: str):
    assert refusal({table: 5}).startswith(f"job.toml: {table} is 5: ")


def test_what_contradicts_the_processes_of_a_job_is_refused():
    cluster: dict[str, object] = {"cluster": {"launcher": "local"}}
    memory: dict[str, object] = {"weight_transfer": {"backend": "memory"}}
    assert "weight_transfer.backend = 'memory' copies weights within one process, and with" in refusal(
        cluster | memory
    )
    vllm = {"inference": {"engine": "vllm", "urls": ["http://h:1"]}}
    assert "and inference.engine = 'vllm' samples in others" in refusal(vllm | memory)
    nccl: dict[str, object] = {"weight_transfer": {"backend": "nccl"}}
    assert "known there: memory, folder. Did you mean inference.engine = 'vllm'?" in refusal(nccl)
    assert "known there: folder. Did you mean inference.engine = 'vllm'?" in refusal(nccl | cluster)
    assert "with [lora] the adapters alone change" in refusal(nccl | vllm | {"lora": {}})
    placed = {"cluster": {"launcher": "ray"}, "inference": {"engine": "vllm", "vllm_python": "p"}}
    assert "needs servers that reach the learner's machine" in refusal(nccl | placed)
    told = refusal({"learner": {"timeout_s": 30}})
    assert "learner.timeout_s is of the learner's own process, and without [cluster] it has none" in told
    assert refusal({"cluster": {"launcher": "locl"}}).endswith(
        "cluster.launcher is 'locl'. Did you mean 'local'? Known: external, local, ray"
    )
    external: dict[str, object] = {"cluster": {"launcher": "external"}}
    assert "cluster.launcher = 'external' needs learner.url, the address of" in refusal(external)
    vllm = {"inference": {"engine": "vllm", "vllm_python": "python"}, "learner": {"url": "http://h:9000"}}
    assert "'external' starts no vLLM server: give inference.urls" in refusal(external | vllm)
    assert "Did you mean launcher = 'external'?" in refusal(cluster | {"learner": {"url": "http://h:9000"}})
    for key, value, reader in (("ray_address", "h:6379", "'ray'"), ("wait_s", 5.0, "'ray' or 'external'")):
        told = refusal({"cluster": {key: value}})
        assert f"cluster.{key} is read with launcher = {reader}, and cluster.launcher is 'local'. Did" in told
    for port in (0, 65536):
        told = refusal({"cluster": {"launcher": "ray", "ray_address": f"h:{port}"}})
        assert f"ray_address is 'h:{port}', and ports are from 1 to 65535" in told
    assert "starts nothing on another machine" in refusal(cluster | {"learner": {"nnodes": 2}})
    assert "learner.url: url may not hold a user name" in refusal(
        external | {"learner": {"url": "http://k@h"}}
    )


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            {"learner": {"nproc_per_node": 6, "data_parallel_replicate_degree": 4}},
            "is 4, and the learner has 6 ranks (nproc_per_node times nnodes), which cannot be cut into so "
            "many equal groups; possible: 1, 2, 3, 6",
        ),
        (
            {"learner": {"nproc_per_node": 2}, "training": {"optimizer_offload": True}},
            "training.optimizer_offload is of one process, and the learner has 2 ranks (nproc_per_node times "
            "nnodes). Did you mean learner.fsdp_cpu_offload = true?",
        ),
        (
            {"learner": {"nproc_per_node": 2}, "model": {"preset": "tiny-0.3m", "device": "mps"}},
            "model.device is 'mps', and the learner has 2 ranks",
        ),
        (
            {"learner": {"fsdp_cpu_offload": True}},
            "learner.fsdp_cpu_offload is read by several ranks, and the learner has one. Did you mean to set "
            "learner.nproc_per_node?",
        ),
        ({"learner": {"fsdp_reshard_after_forward": False}}, "is read by several ranks"),
        ({"learner": {"data_parallel_replicate_degree": 2}}, "is read by several ranks"),
    ],
)
def test_what_the_ranks_of_a_learner_cannot_do_is_refused(tables: dict[str, dict[str, object]], told: str):
    assert told in refusal({"cluster": {}, **tables})


def test_several_ranks_need_a_cluster():
    told = refusal({"learner": {"nproc_per_node": 2}})
    assert "learner.nproc_per_node is of the learner's own process, and without [cluster] it has none" in told


def test_collecting_ahead_is_refused_where_the_order_of_things_counts():
    ahead = {"training": {"max_staleness": 2}}
    assert "training.max_staleness = 2 with inference.deterministic: which version samples" in refusal(
        ahead | {"inference": {"deterministic": True}}
    )
    schedule = {"type": "adaptive"}
    fixed = {"rollout_only": {"name": "t", "model_path": "m"}, "rollout_allocation_schedule": schedule}
    told = "[rollout_allocation_schedule] type = 'adaptive' looks back on those; set max_staleness = 0"
    assert told in refusal(ahead | fixed)
    assert "training.max_staleness" in refusal({"training": {"max_staleness": -1}})


def test_weights_go_by_folder_where_the_engine_is_in_another_process():
    def by_folder(**tables: dict[str, object]) -> bool:
        return parse_job({**MODEL, **tables}, where="x").config.weights_by_folder

    assert not by_folder()
    assert by_folder(weight_transfer={"backend": "folder"})
    assert by_folder(cluster={})
    assert by_folder(inference={"engine": "vllm", "urls": ["http://h:1"]})


@pytest.mark.parametrize(
    ("seeds", "told"),
    [
        ([-1], "evaluation.seeds.0 is -1"),
        ([2**31 - 1], f"evaluation.seeds.0 is {2**31 - 1}"),
        ([1, 2.0], "evaluation.seeds.1 is 2.0"),
        ([True], "evaluation.seeds.0 is True"),
        (["7"], "evaluation.seeds.0 is '7'"),
        ([4, 5, 4], "4 is given twice"),
    ],
)
def test_an_evaluation_world_is_a_seed_and_comes_once(seeds: list[object], told: str):
    assert told in refusal({"evaluation": {"seeds": seeds}})


@pytest.mark.parametrize(
    ("key", "limit"),
    [
        ("max_turns", "max_decisions"),
        ("max_invalid_decisions", "max_invalid_decisions"),
        ("timeout_s", "timeout_s"),
    ],
)
def test_what_a_job_may_ask_for_is_what_a_task_app_accepts(key: str, limit: str):
    ours, theirs = RolloutTable.model_fields[key], RolloutLimits.model_fields[limit]
    assert set(ours.metadata) == set(theirs.metadata)


@pytest.mark.parametrize(
    ("env_name", "keys", "told"),
    [
        ("crafter", {"rollout": {"state_keys": ["text", "nearst"]}}, "rollout.state_keys: 'crafter' has no"),
        (
            "dialogue",
            {"algorithm": {"advantage": "gigpo", "state_hashing_function": "text_last_0"}},
            "algorithm.state_hashing_function: 'dialogue' has no state key 'text_last_0'. Did you mean "
            "'text_last_n'? Known: default, text, text_history, text_last_n",
        ),
    ],
)
def test_a_state_key_that_an_environment_has_not_is_refused_with_what_was_meant(env_name, keys, told):
    def document(name):
        return {**keys, "rollout": {"env_name": name, **keys.get("rollout", {})}}

    assert told in refusal(document(env_name))
    parse_job({**MODEL, **document("of_a_plug_in")}, where="whose keys its task app alone knows")


def test_a_job_may_name_text_last_n_with_any_n():
    rollout = {"env_name": "crafter", "state_keys": ["text_last_1", "text_last_40"]}
    job = {"rollout": rollout, "algorithm": {"advantage": "gigpo", "state_hashing_function": "text_last_7"}}
    assert parse_job({**MODEL, **job}, where="").config.algorithm.state_hashing_function == "text_last_7"


def test_an_unknown_preset_is_refused_with_what_was_meant():
    message = refusal({"model": {"preset": "tiny-0.3"}})
    assert message.startswith("job.toml: model.preset is 'tiny-0.3'. Did you mean 'tiny-0.3m'?")


def test_a_response_must_leave_room_for_a_prompt():
    message = refusal({"rollout": {"max_tokens": 64}, "inference": {"max_model_len": 64}})
    assert "rollout.max_tokens (64) must be below inference.max_model_len (64)" in message


def test_a_response_must_leave_room_for_a_prompt_in_a_conversation_too():
    message = refusal({"rollout": {"max_tokens": 64}, "multi_turn": {"enable": True, "max_model_length": 64}})
    assert "rollout.max_tokens (64) must be below multi_turn.max_model_length (64)" in message


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


def test_what_is_the_policy_s_own_may_be_configured():
    job = parse_job({**MODEL, "rollout": {"policy_config": {"max_attempts": 2}}}, where="x").config
    assert job.rollout.policy_config == {"max_attempts": 2}


@pytest.mark.parametrize("place", ["rollout.env_config", "rollout.policy_config", "warmup.policy_config"])
def test_the_switches_are_the_job_s_and_stand_in_no_config(place: str):
    table, key = place.split(".")
    message = refusal({table: {key: {"step_rewards": {"enabled": True}}}})
    told = "'step_rewards' is set by the job itself; use the step_rewards_* keys of [training]"
    assert message == f"job.toml: {place}: {told}"


def job_of_a_folder(tmp_path: Path, folder: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(f'[model]\npath = "{folder}"\n')
    return path


def test_a_new_job_needs_its_model_folder_and_a_stored_one_does_not(tmp_path: Path):
    path = job_of_a_folder(tmp_path, tmp_path / "models" / "smoll")
    assert load_job(path).config.model.path == tmp_path / "models" / "smoll"
    with pytest.raises(JobError, match=r"which is no folder$"):
        load_new_job(path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    with pytest.raises(JobError, match=r"no folder\. Did you mean '.*/models/small'\?$"):
        load_new_job(path)


def test_a_model_folder_holds_a_config(tmp_path: Path):
    path = job_of_a_folder(tmp_path, tmp_path / "m")
    (tmp_path / "m").mkdir()
    with pytest.raises(JobError, match=r"config\.json is missing"):
        load_new_job(path)
    (tmp_path / "m" / "config.json").write_text("{}")
    assert load_new_job(path).config.model.path == tmp_path / "m"


@pytest.mark.parametrize("value", [12345, ["hush-12345"], {"key": "hush-12345"}])
def test_a_key_of_the_wrong_type_is_not_repeated(value: object):
    message = refusal({"services": {"task_api_key": value}})
    assert "services.task_api_key" in message
    assert "12345" not in message


def test_groups_must_fill_a_batch():
    message = refusal({"rollout": {"episodes_per_batch": 10}, "training": {"group_size": 4}})
    assert "must be a multiple of training.group_size (4)" in message


def test_truncated_sampling_must_be_asked_for():
    assert "allow_truncated_sampling" in refusal({"rollout": {"top_p": 0.9}})
    accepted = parse_job(
        {**MODEL, "rollout": {"top_p": 0.9, "allow_truncated_sampling": True}}, where="job.toml"
    )
    assert accepted.config.rollout.top_p == 0.9


@pytest.mark.parametrize("home", ["training", "rollout", "training.rewards"])
def test_the_switches_are_read_from_each_of_their_published_homes(home: str):
    switches = {"step_rewards_enabled": True, "step_rewards_mode": "env_sparse"}
    document = {"training": {"rewards": switches}} if home == "training.rewards" else {home: switches}
    training = parse_job({**MODEL, **document}, where="job.toml").config.training
    assert (training.step_rewards_enabled, training.step_rewards_mode) == (True, "env_sparse")


def test_two_homes_may_agree_but_not_differ():
    both = {"training": {"step_rewards_beta": 0.1}, "rollout": {"step_rewards_beta": 0.1}}
    assert parse_job({**MODEL, **both}, where="job.toml").config.training.step_rewards_beta == 0.1
    message = refusal({"training": {"step_rewards_beta": 0.1}, "rollout": {"step_rewards_beta": 0.2}})
    assert "training.step_rewards_beta = 0.1, rollout.step_rewards_beta = 0.2" in message


def test_beta_that_looks_into_the_future_is_told():
    warnings = parse_job({**MODEL, "training": {"step_rewards_beta": 0.1}}, where="job.toml").warnings
    assert any('step_rewards_horizon = "max_decisions"' in line for line in warnings)


def test_a_kl_in_loss_and_reward_and_one_that_hardly_pulls_are_told():
    alone = parse_job({**MODEL, "training": {"kl_reward_coef": 0.1}}, where="x")
    assert not any("kl_" in line for line in alone.warnings)
    both = {"kl_coef": 0.1, "kl_reward_coef": 0.1, "kl_reward_kind": "k3"}
    told = " ".join(parse_job({**MODEL, "training": both}, where="x").warnings)
    assert "pull to the same model twice" in told
    assert "training.kl_reward_kind = 'k3' hardly holds a policy" in told


def warnings_of(**tables: dict[str, object]) -> str:
    return " ".join(parse_job({**MODEL, **tables}, where="x").warnings)


@pytest.mark.parametrize(("name", "divides"), [("grpo", True), ("gigpo", True), ("stepwise", False)])
def test_a_kl_reward_that_an_estimator_blows_up_is_told(name: str, divides: bool):
    paid = {"kl_reward_coef": 0.1}
    told = "divides by a standard deviation"
    assert (told in warnings_of(training=paid, algorithm={"advantage": name})) is divides
    assert told not in warnings_of(algorithm={"advantage": name})
    assert told not in warnings_of(training=paid, algorithm={"advantage": "gigpo", "fnorm": "one"})


def test_episodes_without_siblings_learn_from_their_branches_and_of_one_decision_there_are_none():
    alone, branch = {"group_size": 1}, {"advantage": "branch"}
    assert "nothing will be learned" in warnings_of(training=alone, algorithm={"advantage": "stepwise"})
    assert "nothing will be learned" not in warnings_of(training=alone, algorithm=branch)
    short = {"max_turns": 1}
    assert "asks for no branches" in warnings_of(rollout=short, algorithm=branch)
    assert "asks for no branches" not in warnings_of(rollout=short, training=alone, algorithm=branch)
    assert "asks for no branches" not in warnings_of(rollout={"max_turns": 2}, algorithm=branch)


@pytest.mark.parametrize(
    ("text", "told"),
    [(None, "no such file"), ("[model\n", "not valid TOML"), (b"\xff\xfe", "cannot be read")],
)
def test_a_file_that_is_no_toml_is_refused_with_its_path(tmp_path: Path, text: str | bytes | None, told: str):
    path = tmp_path / "job.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
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
