"""Limits the memory for rollouts and captures."""

from task_app.errors import CapacityReached


class Held:
    """Counts the bytes of JSON that rollouts and captures hold.

    From `most` bytes on, nothing new is accepted; an accepted rollout is still played to its end.
    """

    def __init__(self, most: int) -> None:
        self.most, self.total = most, 0

    def check_room(self) -> None:
        """Raise CapacityReached if no more bytes fit."""
        if self.total >= self.most:
            raise CapacityReached(
                f"{self.total} bytes of rollouts and captures are held, of max_held_bytes = {self.most}",
                hint="acknowledge rollouts that have ended (POST /rollouts/ack), and delete captures "
                "(DELETE /captures/{capture_id})",
            )
