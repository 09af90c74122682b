"""The state keys by name, with what each compares: for jobs, which name them, and for pages.

`task_app/episode/state_keys.py` and the environments make them; a test holds the names against those.
"""

from collections.abc import Mapping, Sequence

DEFAULT = "default"

OF_EVERY_ENVIRONMENT: Mapping[str, str] = {
    DEFAULT: "the first of the environment's own keys; `text` where it has none",
    "text": "the text of the observation; of a conversation every message of the prompt, as it is shown: "
    "the policy's own answers too, and stubs in place of what was deleted",
    "text_last_2": "the texts of the last 2 observations; of a conversation also the answer between them, an "
    "observation being all that was said between two answers of the policy",
    "text_last_3": "the same of the last 3, and the 2 answers between them",
    "text_history": "the texts of all observations of the episode; of a conversation all prompts so far, "
    "which differs from `text` only where the context was edited",
}
# Of the environments that come with Turnwise; those of a plug-in are known to its task app alone.
OF_ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "crafter": {
        "nearest": "the nearest of each kind in view, what is faced, the items, a band of health, darkness "
        "and sleep; Crafter's default",
        "view": "all cells in view, the direction, and the items",
        "exact": "all that the observation tells but the time and what just happened",
        "coarse": "what is faced, the items, and whether a table or a furnace is near",
    },
    "dialogue": {},
    "documents": {},
}


def state_keys_of(env_name: str) -> Sequence[str] | None:
    """All names of an environment's state keys; None of one that does not come with Turnwise."""
    own = OF_ENVIRONMENT.get(env_name)
    return None if own is None else (*OF_EVERY_ENVIRONMENT, *own)
