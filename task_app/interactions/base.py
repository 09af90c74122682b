"""The published base class of interactions; `task_app.protocols` has it beside the other interfaces."""

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """Answers the model as its user. A class of the operator's file; an object of it lives for one episode.

    What is not overridden does what the published base class does: `generate_response` is content with every
    answer and scores it 0.8.

    Its methods and their signatures are published, and classes written for them run unmodified. They run in
    a thread of their own, on an event loop of their own, so that one that blocks stalls nobody else; a class
    attribute `never_blocks = True` promises that they do not, and they run on the service's event loop.

    Source: 5-interactions.md; DESIGN.md 4.11.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode.

        Args:
            instance_id: unique to the episode.
            kwargs: the row's `interaction_kwargs` with its `name`, and `ground_truth` where there is one.

        Returns:
            The id that the other methods are called with.
        """
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the last assistant message, and score it.

        Args:
            messages: the conversation in OpenAI's form, a copy; `content` is always text.
            kwargs: those of the start.

        Returns:
            should_terminate: whether the episode ends with this.
            response: the user's next message; not shown to the model at the end.
            score: reward of the decision that is answered, in reward units; None for none.
            metadata: anything, for the record.
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of now; a helper of `generate_response`, asked over HTTP alone."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Release what the episode held; called once for every start that was begun, however it ended."""
