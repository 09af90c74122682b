"""Names under which other systems publish what we measure, for dashboards that ask for those. Data alone.

Each is a number of the last row of a run, by its own name in docs/metrics.md; a `*` stands for whatever is
there. What is not the same thing there and here is not in this table.
"""

from collections.abc import Mapping

# verl's names (prior art: verl HEAD), `/` written as `_`.
OF_ITERATIONS: Mapping[str, str] = {
    "critic_score_mean": "episode/outcome_reward",
    "critic_rewards_mean": "reward/mean",
    "critic_vf_explained_var": "value/explained_variance",
    "critic_vf_loss": "value/loss",
    "critic_values_mean": "value/mean",
    "actor_pg_loss": "loss/policy",
    "actor_entropy": "loss/entropy",
    "actor_kl_loss": "loss/kl",
    "actor_ppo_kl": "loss/approx_kl",
    "actor_grad_norm": "optim/grad_norm",
    "actor_lr": "optim/lr",
    "actor_reward_kl_penalty": "kl/reference",
    "num_turns_mean": "episode/decisions",
    "timing_s_gen": "time/collect_s",
    "timing_s_update_actor": "time/update_s",
    "timing_s_update_weights": "time/publish_s",
    "timing_s_save_checkpoint": "time/checkpoint_s",
    "training_global_step": "iteration",
    # Of source 4.
    "rollout_policy_choice": "rollout/policy_choice",
    "rollout_using_actor": "rollout/using_actor",
    "rollout_using_fixed": "rollout/using_fixed",
    "actor_importance_sampling": "actor/importance_sampling",
    "actor_importance_weight_mean": "actor/importance_weight_mean",
    "actor_importance_weight_std": "actor/importance_weight_std",
    "actor_importance_weight_min": "actor/importance_weight_min",
    "actor_importance_weight_max": "actor/importance_weight_max",
    # prime-rl's and others' (prior art: peers, section 4).
    "entropy_mean": "loss/entropy",
    "importance_ratio_mean": "loss/ratio_mean",
    "importance_ratio_min": "loss/ratio_min",
    "importance_ratio_max": "loss/ratio_max",
    "off_policy_mean": "policy/staleness_mean",
    "off_policy_max": "policy/staleness_max",
    "stop_*": "stop/*",
    "optim_lr": "optim/lr",
    "optim_grad_norm": "optim/grad_norm",
    "errored_rollouts": "rollout/failed",
    "decision_count": "decision/count",
    "decision_nonzero_frac": "decision/nonzero_frac",
    "decision_unique_sum": "decision/unique_sum",
    "decision_ach_sum": "decision/ach_sum",
    "gigpo_anchor_groups": "anchors/groups",
    "gigpo_singleton_frac": "anchors/singleton_frac",
}
OF_EVALUATIONS: Mapping[str, str] = {
    "val_core_reward_mean": "eval/outcome_reward",
    "timing_s_testing": "time/evaluate_s",
}
