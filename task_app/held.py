"""Limits the memory that rollouts and captures use."""

from task_app.errors import CapacityReached


class Held:
    """Counts, in `total`, the bytes of JSON of all stored rollouts and captures.

    Once `total` reaches `most`, the task app accepts no new rollouts, captures or model calls of a capture. A
    rollout that was accepted before is still played to its end.
    """

    def __init__(self, most: int) -> None:
        self.most, self.total = most, 0

    def check_room(self) -> None:
        """Raise CapacityReached if `total` has reached `most`."""
        if self.total >= self.most:
            raise CapacityReached(
                f"{self.total} bytes of rollouts and captures are held, of max_held_bytes = {self.most}",
                hint="acknowledge rollouts that have ended (POST /rollouts/ack), and delete captures "
                "(DELETE /captures/{capture_id})",
            )
