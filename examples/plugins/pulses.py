"""pulses.py: a schedule in which fixed policies sample every tenth iteration, or every `window`-th."""

from trainer_backend.operator_plugins import schedule
from turnwise import RolloutAllocationSchedule


@schedule("pulses")
class Pulses(RolloutAllocationSchedule):
    def __init__(self, window=10):
        self.window = window

    def get_policy_choice(self, step):
        return "fixed" if step % self.window == 0 else "actor"
