"""What the gateway remembers of each rollout: the exact ids of its last prompt and response."""

from collections import OrderedDict
from collections.abc import Sequence


class Conversations:
    """A bounded memory, least recently used first out. Forgetting one costs a full prompt, no more."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._ids: OrderedDict[str, list[int]] = OrderedDict()

    def reused(self, rollout_id: str, prompt_ids: Sequence[int]) -> int:
        """How many ids of the last prompt + response the new prompt starts with: all of them, or 0."""
        known = self._ids.get(rollout_id)
        if not known or len(prompt_ids) < len(known) or list(prompt_ids[: len(known)]) != known:
            return 0
        return len(known)

    def remember(self, rollout_id: str, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> None:
        self._ids[rollout_id] = [*prompt_ids, *response_ids]
        self._ids.move_to_end(rollout_id)
        if len(self._ids) > self._most:
            self._ids.popitem(last=False)
