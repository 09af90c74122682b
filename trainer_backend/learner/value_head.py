"""The critic as a head: V(s) by one linear layer on the policy's last hidden state, with its own optimizer.

    V = w . (h - mean) / std + b          w [D] and b are float32, and 0 at first

It reads the hidden states of the policy's forward pass, so it needs no second pass. At the beginning of
decisions, hidden states are nearly the same vector (on `tiny-0.3m` of length 11, of which 2.2 differ between
states), and gradient descent would learn little else. So inputs are standardised by mean and std [D] of the
first scored states, then fixed. With a separate AdamW, the head does not change the policy's moments.
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

# In a step, the bias may move a value by at most this share of what all weights together may.
_BIAS_SHARE = 0.1
# The std of an input is at least this share of the median, so that constant inputs are not amplified.
_LEAST_STD = 0.1


class ValueHead:
    """Predicts values from hidden states of width D = `width`. Not thread-safe, like its learner."""

    def __init__(self, width: int, device: torch.device, table: TrainingTable, level: ValueLevel) -> None:
        self.level = level
        self._weight_D = nn.Parameter(torch.zeros(width, device=device))
        self._bias = nn.Parameter(torch.zeros((), device=device))
        self._mean_D, self._std_D = torch.zeros(width, device=device), torch.ones(width, device=device)
        self._seen: _Inputs | None = _Inputs(width)
        self._through, self._full_rate = table.value_trunk_gradient, table.learning_rate
        # A step of AdamW moves a weight by about its rate, and so V by about rate * D.
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
        """Return [N] bools: whether the value of each state is read."""
        first_N = states.rows.first_N
        return first_N if self.level == "decision" else torch.ones_like(first_N)

    def values(self, states: Hidden) -> Tensor:
        """Compute V, [N], in reward units and float32; 0 where no value is read.

        With training.value_trunk_gradient its gradient reaches the policy.
        """
        hidden_RD = states.hidden_ND[self._read(states)].float()
        inputs_RD = ((hidden_RD if self._through else hidden_RD.detach()) - self._mean_D) / self._std_D
        values_N = inputs_RD.new_zeros(len(states.hidden_ND))
        values_N[self._read(states)] = inputs_RD @ self._weight_D + self._bias
        return values_N

    def scored(self, states: Hidden) -> Tensor:
        """Compute `values`; before `settle`, also measure the inputs' mean and spread."""
        if self._seen is not None:
            self._seen.add(states.hidden_ND[self._read(states)])
        return self.values(states)

    def settle(self, ranks: Ranks) -> None:
        """Fix mean and std from the states that all ranks have scored; w is still 0, so no value changes."""
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
        """Raise NonFiniteLoss if the gradient is not finite; call it before any step."""
        for weight in self.trained.values():
            if weight.grad is not None and not torch.isfinite(weight.grad).all():
                raise NonFiniteLoss(
                    "the gradient of the value head is not finite; the weights before this step are kept",
                    hint="lower training.value_learning_rate",
                )

    def step(self, *, policy_rate: float) -> None:
        """Take a step, at a rate that falls with the policy's. The gradient is not clipped."""
        for group in self._optimizer.param_groups:
            group["lr"] = group["full_rate"] * policy_rate / self._full_rate
        self._optimizer.step()

    def save(self, folder: Path, ranks: Ranks) -> None:
        """Write weights, mean and std, and moments to one file of a checkpoint; all ranks call this."""
        inputs = {"mean": self._mean_D, "std": self._std_D} if self._seen is None else {}
        tensors = inputs | named_state(self._optimizer, self.trained)
        ranks.first_alone(lambda: save_file(tensors, folder / VALUE_HEAD_FILE))

    def restore(self, checkpoint: Path) -> None:
        """Load what `save` wrote; without such a file the head stays new."""
        path = checkpoint / TRAINING_FOLDER / VALUE_HEAD_FILE
        if not path.exists():
            return
        with restored(self._optimizer, self.trained, path, "the value head") as tensors:
            if "mean" in tensors:
                self._mean_D.copy_(tensors["mean"])
                self._std_D.copy_(tensors["std"])
                self._seen = None


class _Inputs:
    """Mean and spread of hidden states, summed on the CPU in float64, so that batches do not affect them."""

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
        """Return mean and std [D]; the std is at least _LEAST_STD of the median, and 1 if nothing varies."""
        mean_D = self._sum_D / self.count
        square_D = self._squares_D / self.count
        variance_D = square_D - mean_D.square()
        std_D = variance_D.where(variance_D > TOLERANCE * square_D, 0.0).sqrt()
        median = float(std_D.median())
        return mean_D, std_D.clamp(min=_LEAST_STD * median) if median else torch.ones_like(std_D)
