"""What the core refuses: the branch of the trainer's error tree about credit and tokens.

    TrainerError (trainer_backend.errors)
    └── CreditError          also a ValueError; `where` is the rollout, turn and token
        ├── RewardError      r_t cannot be built (stop 9 of the route)
        ├── AdvantageError   an advantage cannot be computed (stop 10)
        ├── SegmentError     the tokens of a decision do not fit together (stop 7)
        └── BatchError       segments cannot be packed or weighted (stop 11)

What is wrong with an argument that a job sets (gamma, a clip range) is a plain ValueError.
"""

from trainer_backend.errors import TrainerError


class CreditError(TrainerError, ValueError):
    code = "credit_failed"
    title = "A trajectory cannot be credited"


class RewardError(CreditError):
    code = "reward_undefined"
    title = "The rewards of an episode are not defined"


class AdvantageError(CreditError):
    code = "advantage_undefined"
    title = "An advantage is not defined"


class SegmentError(CreditError):
    code = "tokens_do_not_fit"
    title = "The tokens of a decision do not fit together"


class BatchError(CreditError):
    code = "batch_invalid"
    title = "Segments cannot be packed or weighted"


def place(rollout_id: str, turn: int | None = None, token: int | None = None) -> str:
    """`rollout r-3, turn 5, token 2`: turn counts from 1, token from 0."""
    parts = [f"rollout {rollout_id or '(unnamed)'}"]
    parts += [] if turn is None else [f"turn {turn}"]
    parts += [] if token is None else [f"token {token}"]
    return ", ".join(parts)
