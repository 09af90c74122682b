"""Maps the keys of other systems to our keys for the same settings, so that errors can suggest our keys.

Keys are spelled as in their own system. The entry for `rollout.n` also applies to longer keys that end with
it, such as `actor_rollout_ref.rollout.n`. An entry without a table applies in any table. The value of an
entry begins with our key. If the two keys differ in meaning, text after our key says how.

Sources: verl 0.9 (`ppo_trainer.yaml`), TRL 1.16 (`GRPOConfig`, `ModelConfig`), prime-rl of 2026-08 and of
2026-01 (`rl.toml`), and the TOML of synth-ai's launchers (trainer_backend.jobs.launcher translates that one).
"""

from collections.abc import Mapping
from functools import partial

from shared_schemas.rewards import WIRE_NAMES
from trainer_backend.job.rollout_table import SAMPLING_KEYS

# Tables for other backends, which launchers send and this trainer ignores. Each value names our table or key
# for the same settings; it is empty if there is none.
FOREIGN_TABLES = {
    "compute": "[learner] and [inference]",
    "topology": "[learner] and [inference]",
    "vllm": "[inference.vllm]",
    "reference": "training.kl_coef",
    "judge": "rollout.reward_function",
    "rubric": "rollout.reward_function",
    "policy": "[model]",
    "tags": "",
    "smoke": "",
}
# Published keys that have another name or table here. `jobs.launcher` renames the keys of a launcher's job.
NEW_NAMES = {
    "training.lora": "lora",
    "lora.r": "lora.rank",
    **{f"rollout.policy_config.{key}": f"rollout.{key}" for key in SAMPLING_KEYS},
    **{f"rollout.env_config.step_rewards.{name}": f"training.{key}" for key, name in WIRE_NAMES.items()},
}
_EPISODES = "rollout.episodes_per_batch, which counts episodes: prompts times training.group_size"
_DECISIONS = "training.batch_decisions, which counts the decisions of all processes"
_TOKENS = "training.micro_batch_tokens, which counts tokens"
_WINDOW = "inference.max_model_len, prompt and answer together"
_BOTH_CLIPS = "training.clip_low and training.clip_high"
_STD = "algorithm.advantage: grpo divides by the std, grpo_no_std and dr_grpo do not"
_RISE = "training.learning_rate_rise, a share of the run"
_ITERATIONS = "training.iterations, which counts updates with new episodes, not epochs of the data"
SYSTEMS: Mapping[str, Mapping[str, str]] = {
    "synth-ai": {
        **NEW_NAMES,
        "model.base": "model.name or model.path",
        "model.source": "model.name or model.path",
        "training.num_epochs": "training.iterations, num_epochs times iterations_per_epoch",
        "training.iterations_per_epoch": "training.iterations, num_epochs times iterations_per_epoch",
        "algorithm.type": "algorithm.advantage and algorithm.loss",
        "algorithm.method": "algorithm.advantage and algorithm.loss",
        "algorithm.variety": "algorithm.advantage and algorithm.loss",
    },
    "verl": {
        "algorithm.adv_estimator": "algorithm.advantage",
        "adv_estimator": "algorithm.advantage",
        "algorithm.lam": "algorithm.gae_lambda",
        "algorithm.kl_ctrl": "training.kl_reward_coef",
        "algorithm.use_kl_in_reward": "training.kl_reward_coef",
        "algorithm.kl_penalty": "training.kl_reward_kind",
        "algorithm.norm_adv_by_std_in_grpo": _STD,
        "algorithm.filter_groups": "training.skip_flat_groups",
        "algorithm.rollout_correction": "training.behaviour_weight_cap",
        "data.train_files": "data.path",
        "data.val_files": "data.evaluation_path",
        "data.train_batch_size": _EPISODES,
        "data.gen_batch_size": _EPISODES,
        "data.val_batch_size": "evaluation.instances",
        "data.max_prompt_length": _WINDOW,
        "data.max_response_length": "rollout.max_tokens, of one decision",
        "data.seed": "job.seed",
        "data.apply_chat_template_kwargs": "model.chat_template_kwargs",
        "model.enable_gradient_checkpointing": "training.gradient_checkpointing",
        "model.lora_rank": "lora.rank",
        "model.lora_alpha": "lora.alpha",
        "actor.optim.lr": "training.learning_rate",
        "actor.optim.lr_warmup_steps": _RISE,
        "actor.optim.lr_warmup_steps_ratio": "training.learning_rate_rise",
        "actor.optim.lr_scheduler_type": "training.learning_rate_schedule",
        "actor.optim.warmup_style": "training.learning_rate_schedule",
        "actor.optim.min_lr_ratio": "training.learning_rate_final",
        "actor.optim.weight_decay": "training.weight_decay",
        "actor.optim.clip_grad": "training.max_grad_norm",
        "actor.grad_clip": "training.max_grad_norm",
        "ppo_mini_batch_size": _DECISIONS,
        "ppo_micro_batch_size": _TOKENS,
        "ppo_micro_batch_size_per_gpu": _TOKENS,
        "ppo_max_token_len_per_gpu": "training.micro_batch_tokens",
        "log_prob_micro_batch_size_per_gpu": _TOKENS,
        "ppo_epochs": "training.update_passes",
        "clip_ratio": _BOTH_CLIPS,
        "clip_ratio_low": "training.clip_low",
        "clip_ratio_high": "training.clip_high",
        "clip_ratio_c": "training.clip_dual",
        "entropy_coeff": "training.entropy_coef",
        "use_kl_loss": "training.kl_coef",
        "kl_loss_coef": "training.kl_coef",
        "kl_loss_type": "training.kl_kind",
        "loss_agg_mode": "training.aggregation",
        "policy_loss.loss_mode": "algorithm.loss",
        "fsdp_config.param_offload": "learner.fsdp_cpu_offload",
        "fsdp_config.reshard_after_forward": "learner.fsdp_reshard_after_forward",
        "rollout.n": "training.group_size",
        "rollout.name": "inference.engine",
        "rollout.max_num_seqs": "inference.max_running",
        "rollout.prompt_length": _WINDOW,
        "rollout.response_length": "rollout.max_tokens, of one decision",
        "rollout.tensor_model_parallel_size": "inference.vllm.tensor_parallel_size",
        "rollout.gpu_memory_utilization": "inference.vllm.gpu_memory_utilization",
        "rollout.free_cache_engine": "inference.sleep",
        "rollout.val_kwargs": "evaluation.temperature",
        "multi_turn.tool_config_path": "rollout.env_name: tools are an environment's",
        "critic.optim.lr": "training.critic_learning_rate",
        "critic.ppo_epochs": "training.critic_passes",
        "critic.ppo_mini_batch_size": "training.critic_batch_decisions",
        "critic.cliprange_value": "training.value_clip",
        "reward_model": "rollout.reward_function",
        "custom_reward_function": "rollout.reward_function",
        "trainer.total_epochs": _ITERATIONS,
        "trainer.total_training_steps": "training.iterations",
        "trainer.save_freq": "training.checkpoint_every",
        "trainer.test_freq": "evaluation.every_n_iters",
        "trainer.max_actor_ckpt_to_keep": "training.keep_checkpoints",
        "trainer.default_local_dir": "job.runs_dir",
        "trainer.experiment_name": "job.name",
        "trainer.project_name": "sinks.wandb.project",
        "trainer.logger": "[sinks]",
        "trainer.n_gpus_per_node": "learner.nproc_per_node",
    },
    "TRL": {
        "model_name_or_path": "model.name or model.path",
        "dataset_name": "data.path",
        "shuffle_dataset": "data.shuffle",
        "output_dir": "job.runs_dir",
        "run_name": "job.name",
        "report_to": "[sinks]",
        "reward_funcs": "rollout.reward_function",
        "environment_factory": "rollout.env_name",
        "max_tool_calling_iterations": "rollout.max_turns",
        "num_generations": "training.group_size",
        "generation_batch_size": "rollout.episodes_per_batch",
        "per_device_train_batch_size": _DECISIONS,
        "gradient_accumulation_steps": _TOKENS,
        "steps_per_generation": _DECISIONS,
        "num_iterations": "training.update_passes",
        "num_train_epochs": _ITERATIONS,
        "max_completion_length": "rollout.max_tokens, of one decision",
        "max_prompt_length": _WINDOW,
        "beta": "training.kl_coef",
        "epsilon": _BOTH_CLIPS,
        "epsilon_high": "training.clip_high",
        "delta": "training.clip_dual",
        "loss_type": "algorithm.loss, with training.aggregation",
        "scale_rewards": _STD,
        "importance_sampling_level": "algorithm.ratio_level",
        "vllm_importance_sampling_mode": "training.behaviour_weight_mode",
        "vllm_importance_sampling_cap": "training.behaviour_weight_cap",
        "vllm_importance_sampling_clip_max": "training.behaviour_weight_cap",
        "vllm_importance_sampling_clip_min": "training.behaviour_weight_floor",
        "sapo_temperature_pos": "training.tau_pos",
        "sapo_temperature_neg": "training.tau_neg",
        "lr_scheduler_type": "training.learning_rate_schedule",
        "warmup_ratio": "training.learning_rate_rise",
        "warmup_steps": _RISE,
        "save_steps": "training.checkpoint_every",
        "save_total_limit": "training.keep_checkpoints",
        "eval_steps": "evaluation.every_n_iters",
        "use_vllm": "inference.engine = 'vllm'",
        "vllm_mode": "inference.engine = 'vllm', with inference.urls or inference.vllm_python",
        "vllm_server_base_url": "inference.urls",
        "vllm_server_host": "inference.urls",
        "vllm_max_model_length": "inference.max_model_len",
        "vllm_gpu_memory_utilization": "inference.vllm.gpu_memory_utilization",
        "vllm_enable_sleep_mode": "inference.sleep",
        "vllm_tensor_parallel_size": "inference.vllm.tensor_parallel_size",
        "use_peft": "[lora]",
        "lora_r": "lora.rank",
        "lora_alpha": "lora.alpha",
        "lora_dropout": "lora.dropout",
        "lora_target_modules": "lora.target_modules",
    },
    "prime-rl": {
        "max_steps": "training.iterations",
        "rollout.max_steps": "rollout.max_turns",
        "seq_len": _WINDOW,
        "batch_size": "rollout.episodes_per_batch",
        "rollouts_per_example": "training.group_size",
        "max_async_level": "training.max_staleness",
        "max_off_policy_steps": "training.max_staleness",
        "max_inflight": "rollout.max_concurrent_rollouts",
        "filter_zero_advantages": "training.skip_flat_groups",
        "sampling.temperature": "rollout.temperature",
        "sampling.max_tokens": "rollout.max_tokens",
        "max_completion_tokens": "rollout.max_tokens",
        "orchestrator.env": "rollout.env_name",
        "orchestrator.train.source": "rollout.env_name",
        "orchestrator.algo": "algorithm.advantage",
        "orchestrator.client.base_url": "inference.urls",
        "orchestrator.eval.env": "evaluation.instances",
        "eval.sampling.temperature": "evaluation.temperature",
        "eval.interval": "evaluation.every_n_iters",
        "eval.num_examples": "evaluation.instances",
        "optim.lr": "training.learning_rate",
        "lr": "training.learning_rate",
        "optim.weight_decay": "training.weight_decay",
        "optim.max_norm": "training.max_grad_norm",
        "scheduler.type": "training.learning_rate_schedule",
        "scheduler.warmup_steps": _RISE,
        "scheduler.min_lr": "training.learning_rate_final, a share of training.learning_rate",
        "loss.type": "algorithm.loss",
        "loss.ratio_type": "algorithm.ratio_level",
        "trainer.model.ac": "training.gradient_checkpointing",
        "optim_cpu_offload": "training.optimizer_offload",
        "dp_replicate": "learner.data_parallel_replicate_degree",
        "ckpt.interval": "training.checkpoint_every",
        "ckpt.keep_last": "training.keep_checkpoints",
        "weight_broadcast.type": "weight_transfer.backend",
        "monitors.wandb": "sinks.wandb",
        "wandb": "sinks.wandb",
        "deployment.num_train_gpus": "learner.nproc_per_node",
        "deployment.num_infer_gpus": "inference.replicas",
        "inference.parallel.tp": "inference.vllm.tensor_parallel_size",
        "inference.parallel.dp": "inference.replicas",
    },
}
# Keys of earlier versions that a stored job may contain, each with the reason why it is no longer needed.
DROPPED = dict.fromkeys(
    ("retention.decisions_iterations", "retention.decisions_days"),
    "the database holds no decisions; pages read them from the files of retention.rollout_files_iterations",
)
# Keys that have no counterpart here, each with the reason why none is needed.
NEEDLESS = {
    **DROPPED,
    "data.return_raw_chat": "messages reach the gateway as they are",
    "calculate_log_probs": "every sample has its log-probs",
}
_OURS = {name: ours for names in SYSTEMS.values() for name, ours in names.items()}


def _at_longest_end(dotted: str, names: Mapping[str, str]) -> str | None:
    parts = dotted.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((names[end] for end in ends if end in names), None)


# Both functions look up the longest end of a dotted key that the mapping contains. The first returns our key
# for another system's key, the second the reason why a key needs no counterpart here.
find_our_key = partial(_at_longest_end, names=_OURS)
find_why_needless = partial(_at_longest_end, names=NEEDLESS)
