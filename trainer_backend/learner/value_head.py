"""The critic as a head: V(s) is one linear layer on the policy's last hidden state h.

    V = w . (h - mean) / std + b          weights w [D] and bias b are float32, initially 0

The hidden states come from the policy's own forward pass. At the beginning of decisions they are nearly equal
(in the preset `tiny-0.3m` they have norm 11, but differ between states only by 2.2), so gradient descent
would learn little besides their mean. Therefore each input is standardised by its mean and std over the first
scored states; both then stay fixed. The head has its own AdamW, so it does not affect the policy's moments.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shared_schemas.rounding import TOLERANCE
from trainer_backend.core.critic import ValueLevel
from trainer_backend.errors import NonFiniteLoss
from trainer_backend.job.training_table import TrainingTable
from trainer_backend.learner.optimizer import named_state, restored
from trainer_backend.learner.ranks import Ranks
from trainer_backend.learner.scoring import Hidden
from trainer_backend.rundir.checkpoint_paths import TRAINING_FOLDER, VALUE_HEAD_FILE

# In a step, the bias moves V by at most this share of the distance by which the weights may move V.
_BIAS_SHARE = 0.1
# The std of an input is at least this share of the median, so that constant inputs are not amplified.
_LEAST_STD = 0.1


class ValueHead:
    """Predicts values from hidden states of width D = `width`. Not thread-safe."""

    def __init__(self, width: int, device: torch.device, table: TrainingTable, level: ValueLevel) -> None:
        self.level = level
        self._weight_D = nn.Parameter(torch.zeros(width, device=device))
        self._bias = nn.Parameter(torch.zeros((), device=device))
        self._mean_D, self._std_D = torch.zeros(width, device=device), torch.ones(width, device=device)
        self._seen: _Inputs | None = _Inputs(width)
        self._through, self._full_rate = table.value_trunk_gradient, table.learning_rate
        # A step of AdamW moves each weight by about the learning rate, and so V by about rate * D.
        rates = (table.value_learning_rate / width, table.value_learning_rate * _BIAS_SHARE)
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [weight], "lr": rate, "full_rate": rate}
                for weight, rate in zip(self.trained.values(), rates, strict=True)
            ],
            weight_decay=table.weight_decay,
            eps=table.adam_epsilon,
        )

    @property
    def trained(self) -> dict[str, Tensor]:
        return {"weight": self._weight_D, "bias": self._bias}

    def _read(self, states: Hidden) -> Tensor:
        """Return [N] bools: whether V is computed at each position (all, or the first of each decision)."""
        first_N = states.rows.first_N
        return first_N if self.level == "decision" else torch.ones_like(first_N)

    def values(self, states: Hidden) -> Tensor:
        """Compute V, [N], in reward units and float32; with one value per decision, other positions are 0.

        The gradient of V reaches the policy only if training.value_trunk_gradient is set.
        """
        hidden_RD = states.hidden_ND[self._read(states)].float()
        inputs_RD = ((hidden_RD if self._through else hidden_RD.detach()) - self._mean_D) / self._std_D
        values_N = inputs_RD.new_zeros(len(states.hidden_ND))
        values_N[self._read(states)] = inputs_RD @ self._weight_D + self._bias
        return values_N

    def scored(self, states: Hidden) -> Tensor:
        """Return `values`. Until the mean and std are fixed, also collect the hidden states for them."""
        if self._seen is not None:
            self._seen.add(states.hidden_ND[self._read(states)])
        return self.values(states)

    def settle(self, ranks: Ranks) -> None:
        """Fix the inputs' mean and std, from the states that all ranks have scored. Later calls do nothing.

        No value changes, because w is still 0.
        """
        if self._seen is None:
            return
        self._seen.sum_over(ranks)
        if self._seen.count:
            mean, std = self._seen.mean_and_std()
            self._mean_D.copy_(mean)
            self._std_D.copy_(std)
            self._seen = None

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def refuse_non_finite(self) -> None:
        """Raise NonFiniteLoss if the head's gradient is not finite."""
        for weight in self.trained.values():
            if weight.grad is not None and not torch.isfinite(weight.grad).all():
                raise NonFiniteLoss(
                    "the gradient of the value head is not finite; the weights before this step are kept",
                    hint="lower training.value_learning_rate",
                )

    def step(self, *, policy_rate: float) -> None:
        """Take an optimizer step without clipping; the learning rate is proportional to `policy_rate`."""
        for group in self._optimizer.param_groups:
            group["lr"] = group["full_rate"] * policy_rate / self._full_rate
        self._optimizer.step()

    def save(self, folder: Path, ranks: Ranks) -> None:
        """Write weights, mean, std and AdamW's moments to one file in `folder`; all ranks must call this."""
        inputs = {"mean": self._mean_D, "std": self._std_D} if self._seen is None else {}
        tensors = inputs | named_state(self._optimizer, self.trained)
        ranks.first_alone(lambda: save_file(tensors, folder / VALUE_HEAD_FILE))

    def restore(self, checkpoint: Path) -> None:
        """Load what `save` wrote; if the checkpoint has no such file, keep the initial weights."""
        path = checkpoint / TRAINING_FOLDER / VALUE_HEAD_FILE
        if not path.exists():
            return
        with restored(self._optimizer, self.trained, path, "the value head") as tensors:
            if "mean" in tensors:
                self._mean_D.copy_(tensors["mean"])
                self._std_D.copy_(tensors["std"])
                self._seen = None


class _Inputs:
    """Computes mean and std of hidden states.

    The sums are float64 on the CPU, so that the sizes of batches do not affect them.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self._sum_D, self._squares_D = (torch.zeros(width, dtype=torch.float64) for _ in range(2))

    def add(self, hidden_ND: Tensor) -> None:
        wide_ND = hidden_ND.detach().cpu().double()
        self.count += len(wide_ND)
        self._sum_D += wide_ND.sum(dim=0)
        self._squares_D += wide_ND.square().sum(dim=0)

    def sum_over(self, ranks: Ranks) -> None:
        (count,) = ranks.sums(self.count)
        self.count = int(count)
        ranks.sum_((self._sum_D, self._squares_D))

    def mean_and_std(self) -> tuple[Tensor, Tensor]:
        """Return mean and std [D]. Each std is at least _LEAST_STD * median; all are 1 if the median is 0."""
        mean_D = self._sum_D / self.count
        square_D = self._squares_D / self.count
        variance_D = square_D - mean_D.square()
        std_D = variance_D.where(variance_D > TOLERANCE * square_D, 0.0).sqrt()
        median = float(std_D.median())
        return mean_D, std_D.clamp(min=_LEAST_STD * median) if median else torch.ones_like(std_D)
