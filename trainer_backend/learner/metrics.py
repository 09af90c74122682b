"""Declares the metrics of the learner. Web pages can import these declarations without importing torch."""

from trainer_backend.core.metric import Metric, Panel, Row

UPDATE_METRICS = (
    Row(
        Metric("loss/policy", "loss of the policy", "loss", "policy"),
        Metric("loss/entropy", "entropy, in nats per token", "entropy", "entropy"),
        Metric("loss/approx_kl", "KL from the proximal policy to the policy in training, by the tokens' own "
               "log-probs whatever `ratio_level` is", "kl", "of an update"),
        when="means over the iteration's steps, tokens weighted as in the loss",
    ),
    Row(
        Metric("loss/kl_to_proximal", "distance of the last checked step from the proximal policy: nats, "
               "plain mean over its tokens", "kl", "to the proximal policy"),
        note="`training.target_kl` bounds it; every loss, `ratio_level` and aggregation computes it alike. "
        "What `skip_certain_above` omits counts as 0 in the mean",
    ),
    Row(
        Metric("loss/kl", "KL to the reference, mean over the steps as above", "kl", "in the loss"),
        when="only with `kl_coef` above 0",
    ),
)  # fmt: skip
MISMATCH_METRICS = (
    Row(
        Metric("mismatch/logprob_max", "difference between the sampler's and the learner's log-prob under "
               "the same weights, the largest", "mismatch", "largest"),
        Metric("mismatch/logprob_mean", "its mean", "mismatch", "mean"),
        note="Above `training.mismatch_limit` the run ends before the update",
    ),
    Row(
        Metric("mismatch/checked_share", "share of the actor's tokens that the current weights sampled"),
        when="only with `training.max_staleness`",
        note="Only these are compared, because older versions may differ",
    ),
)  # fmt: skip
STEP_METRICS = (
    Row(
        Metric("optim/steps", "optimizer steps of the iteration"),
        Metric("optim/steps_skipped", "steps that `target_kl` left out"),
        Metric("optim/lr", "learning rate of the last step", "rate", "rate"),
        Metric("optim/grad_norm", "mean gradient norm before clipping", "gradient", "norm"),
    ),
    Row(
        Metric("kl/decision", "how far the iteration's steps moved the policy, in nats per decision of the "
               "actor that was not certain (`skip_certain_above`, else 0.99): KL(before, after) by k3 of "
               "each token summed over a decision, on at most 1,000 decisions", "decision_kl", "moved"),
        when='only with `learning_rate_schedule = "desired_kl"`',
        note="It moves the rate of the next iteration",
    ),
    Row(
        Metric("optim/certain_frac", "share of the sampled tokens that the policy's update left out"),
        when="only with `skip_certain_above`",
    ),
    Row(
        Metric("learner/tokens", "tokens of the segments in the iteration's optimizer steps"),
        Metric("learner/tokens_computed",
               "tokens that were computed: a beginning that segments share, once (`training."
               "share_prefixes`)"),
    ),
    Row(
        Metric("learner/ranks", "number of ranks"),
        Metric(
            "learner/tokens_imbalance",
            "the most tokens that one rank had in the iteration's steps, over the mean",
            Panel("ranks", "System", "Ranks of the learner",
                  "Most tokens of a rank over the mean; the others wait for it."),
            "most over mean",
        ),
        when="only with several ranks",
        note="The other ranks wait for that one",
    ),
    Row(
        Metric("learner/padding_share", "share of padding in what the steps computed"),
        when="only where segments have rows of their own ([models.md](models.md#how-updates-are-computed))",
    ),
    Row(
        Metric("loss/router_aux", "the loss that spreads tokens over the experts, before it is weighted"),
        when="only with experts and a `router_aux_coef`",
        note="With an even load it is the number of experts of a token",
    ),
)  # fmt: skip
VALUE_METRICS = (
    Row(
        Metric("value/loss", "half the mean squared distance between values and targets, mean over the "
               'iteration\'s steps; with `critic = "own"` over those of its last pass', "loss", "value"),
        when="only with a critic",
    ),
)  # fmt: skip
WARMUP_METRICS = (
    Row(
        Metric("warmup/examples", "examples of the warm-up"),
        Metric("warmup/steps", "its steps"),
        Metric("warmup/loss", "its loss in nats per token over the last epoch"),
    ),
    Row(
        Metric("warmup/answer_tokens_max",
               "tokens of the longest imitated answer, with its stop token. If "
               "`rollout.max_tokens` cuts what the policy needs of it, the run warns"),
    ),
)  # fmt: skip
WEIGHT_METRICS = (
    Row(Metric("actor/importance_sampling", "1 where a fixed policy's samples were trained on")),
    Row(
        Metric("actor/importance_weight_mean", "mean p/mu of those samples before truncation"),
        Metric("actor/importance_weight_std", "standard deviation"),
        Metric("actor/importance_weight_min", "the least"),
        Metric("actor/importance_weight_max", "the largest"),
        note="One for each token, decision or episode by their level. Where supports agree the mean is 1 in "
        "expectation; far from 1, a few samples carry all weight, or the policies hardly overlap. At level "
        "`token`, with `top_p` or `top_k` of the fixed policy, it is 1 - `lost_mass`",
    ),
    Row(
        Metric("mixture/ess",
               "their effective sample size after truncation, (sum w)² / (n sum w²), as a share"),
        note="It shows how unequal the weights are, not how large: at 1 all count the same, possibly next to "
        "nothing",
    ),
    Row(
        Metric("mixture/counted_share", "how much a fixed sample counts, where the actor's counts 1: the "
               "smaller of `ess` and the mean truncated weight"),
        note="At 0.1, ten of them are worth one of the actor's. Near 0 they teach nothing: warm the actor "
        "up, raise `alpha`, or take a policy nearer to the actor",
    ),
)  # fmt: skip
