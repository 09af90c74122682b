"""riddles.py: a simulated user who gives a hint after each wrong guess, and stops after `most_guesses`."""

from task_app.protocols import BaseInteraction


class RiddleInteraction(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self._most = config.get("most_guesses", 3)
        self._guesses = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, hints=(), **kwargs):
        if not ground_truth:
            raise ValueError("a row needs ground_truth")
        self._guesses[instance_id] = []
        return instance_id

    async def generate_response(self, instance_id, messages, ground_truth=None, hints=(), **kwargs):
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        guesses = self._guesses[instance_id]
        guesses.append(ground_truth.lower() in answers[-1].lower())
        score = await self.calculate_score(instance_id)
        if guesses[-1]:
            return True, "That is it!", score, {"guesses": len(guesses)}
        if len(guesses) >= self._most:
            return True, "No. Let us stop here.", score, {"guesses": len(guesses)}
        hint = hints[len(guesses) - 1] if len(guesses) <= len(hints) else "Think again."
        return False, f"No. {hint}", score, {}

    async def calculate_score(self, instance_id, **kwargs):
        guesses = self._guesses[instance_id]
        return 1.0 / len(guesses) if guesses and guesses[-1] else 0.0

    async def finalize_interaction(self, instance_id, **kwargs):
        del self._guesses[instance_id]
