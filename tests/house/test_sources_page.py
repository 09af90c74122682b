"""docs/sources.md: every published word has a row, and what its second column names is there."""

import re
import typing
from functools import cache
from importlib import import_module
from typing import Any

import tomli
from pydantic import BaseModel

from shared_schemas.rewards import StepRewardKeys
from task_app.app import create_app
from task_app.settings import Settings
from tests.house.sources import PACKAGES, ROOT
from trainer_backend.job.schema import JobConfig

PAGE = (ROOT / "docs/sources.md").read_text(encoding="utf-8")
ROWS = [
    (number, *(cell.strip() for cell in line.strip("|").split(" | ", 2)))
    for number, line in enumerate(PAGE.replace("| |", "|  |").splitlines(), 1)
    if line.startswith("| ") and not line.startswith("| published")
]
METRICS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")

# Names in the code of the five sources, source by source.
PUBLISHED = (
    "ClusteredTrainerConfig ach_delta achievements_after achievements_before clustered_training "
    "decision_events decision_rewards decision_stepwise env_sparse env_steps episode_achievements_after "
    "episode_achievements_before event_kind event_rewards_kind indicator_flip_t interact_many new_unique "
    "outcome_reward r_1 r_T r_t reward_last_step step_rewards_beta step_rewards_enabled "
    "step_rewards_indicator_lambda step_rewards_mode synth_envs_hosted task_app trajectory_outcome_reward "
    "turned_true unique_delta warming_up_to_rl "
    "A_E A_GiG A_S AgentPolicy G_k GiGPO OpenAIAgentPolicy RLRolloutWorker StepData TaskDefinitionModel "
    "_check_termination _execute_action_in_environment _prepare_policy_observation action_execution_info "
    "action_structured action_taken agent_policy available_tools_specs base_reward "
    "batch_of_step_data_lists collected_step_data current_messages_history current_step_num "
    "default_step_reward final_score_for_rollout final_scores_for_rollouts get_action ground_truth "
    "is_done log_probs max_episode_steps new_assistant_message_content observation_data "
    "policy_action_structured policy_logprobs policy_value_estimate raw_policy_output "
    "resulting_messages_history reward_kit rl_helpers run_episode state_hashing_function step_info "
    "system_apply_gigpo_to_batch_steps system_step_counter system_step_index task_definition tool_call "
    "tool_name tool_response_messages value_estimate "
    "AgentData PROCESSING_TOOLS _call_tool _handle_generating_state _handle_pending_state "
    "_handle_processing_tools_state _render_message_view actor_rollout_ref assistant_turn_boundaries "
    "buildIndex context_length_exceeded context_length_penalty deleteContext deleted_msg_ids "
    "document_content emission_views extra_info full_history had_delete_operation invoking_assistant "
    "max_model_length message_ids msg_id msg_id_counter multi_turn prompt_ids raw_prompt readChunk "
    "response_ids response_length response_logprobs response_mask statelm_enabled tool_calls tool_name "
    "trajectory_snapshots "
    "ActorRollout ActorRolloutRefWorker DataProto RefPolicy RewardModel RolloutAllocationSchedule "
    "RolloutOnly _create_rollout_only_config _generate_actor_rollouts _generate_fixed_rollouts "
    "_generate_rollouts actor_rollout actor_rollout_ref actor_rollout_wg alpha_0 calculate_log_probs "
    "compute_log_prob fsdp_workers gen_batch get_policy_choice global_steps importance_sampling "
    "importance_weight_max importance_weight_mean importance_weight_min importance_weight_std "
    "init_resource_pool_mgr initial_policy main_ppo max_alpha meta_info mixture_rollout_models model_path "
    "old_log_probs policy_choice policy_type ppo_trainer ray_trainer ref_policy reward_model "
    "rollout_allocation_schedule rollout_only rollout_only_wg switch_steps top_k top_p using_actor "
    "using_fixed "
    "BaseInteraction Gsm8kInteraction VERL_LOGGING_LEVEL _instance_dict actor_rollout_ref adv_estimator "
    "calculate_score class_name compute_score finalize_interaction format_score generate_response "
    "ground_truth gsm8k_interaction gsm8k_interaction_config gsm8k_multiturn_grpo_w_interaction "
    "instance_id interaction_config_path interaction_kwargs main_ppo max_assistant_turns max_user_turns "
    "multi_turn non_tensor_batch return_raw_chat reward_score sandbox_fusion search_tool_example "
    "should_terminate start_interaction total_epochs train_batch_size "
)


def member(owner: Any, name: str) -> Any:
    """An attribute, or a field of a body or dataclass, which the class itself does not have."""
    fields = getattr(owner, "model_fields", {}) | getattr(owner, "__dataclass_fields__", {})
    return fields[name] if name in fields else getattr(owner, name)


def named(dotted: str) -> Any:
    """What a dotted name stands for: module by module, then attribute by attribute."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not ".".join(parts).startswith(str(error.name)):
                raise
            continue
        for name in parts[end:]:
            found = member(found, name)
        return found
    raise ModuleNotFoundError(dotted)


def table_of_job(name: str) -> type[BaseModel]:
    annotation = JobConfig.model_fields[name].annotation
    inner = [annotation, *typing.get_args(annotation)]
    return next(one for one in inner if isinstance(one, type) and issubclass(one, BaseModel))


@cache
def operations() -> set[str]:
    paths = create_app(Settings(api_keys=("a-key",))).openapi()["paths"]
    return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


def is_there(entry: str) -> bool:
    if key := re.fullmatch(r"\[(\w+)\] (\w+)", entry):
        return key[1] in JobConfig.model_fields and key[2] in table_of_job(key[1]).model_fields
    if re.match(r"[A-Z]+ /", entry):
        return entry in operations()
    if entry.split(".")[0] in PACKAGES and "/" not in entry:
        try:
            named(entry)
        except (AttributeError, ModuleNotFoundError):
            return False
        return True
    if (ROOT / entry).exists():
        return True
    return "/" in entry and f"`{entry}`" in METRICS


def test_each_source_has_its_table():
    assert re.findall(r"^## Source (\d)", PAGE, re.M) == ["1", "2", "3", "4", "5"]
    assert len(ROWS) > 120
    assert all(len(row) == 4 for row in ROWS)


def test_every_row_says_where_the_word_is_or_why_there_is_none():
    for number, published, where, why in ROWS:
        entries = re.findall(r"`([^`]+)`", where)
        assert published, number
        assert where == ", ".join(f"`{entry}`" for entry in entries), f"line {number}: {where}"
        assert entries or why, f"line {number}: {published} is nowhere, for no reason"


def test_every_name_in_the_code_of_a_source_is_on_the_page():
    words = set(re.findall(r"\w+", PAGE))
    assert [name for name in PUBLISHED.split() if name not in words] == []


def test_what_the_page_names_is_there():
    entries = {entry for row in ROWS for entry in re.findall(r"`([^`]+)`", row[2])}
    assert sorted(entry for entry in entries if not is_there(entry)) == []


def test_every_config_sets_the_published_switches_with_a_reason_for_each():
    for path in (ROOT / "configs").glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        assert StepRewardKeys.model_fields.keys() <= tomli.loads(text)["training"].keys(), path
        for key in StepRewardKeys.model_fields:
            assert re.search(rf"^{key} = \S+ +# \w", text, re.MULTILINE), f"{path}: {key} has no reason"


def test_a_name_that_is_not_there_is_told_apart():
    wrong = [
        "[training] step_reward_mode", "[train] seed", "POST /env/creat", "configs/none.toml", "reward/summ",
        "turnwise.RolloutWorker", "shared_schemas.rewards.DecisionRewards.turns", "task_app.episod",
    ]  # fmt: skip
    assert [entry for entry in wrong if is_there(entry)] == []
