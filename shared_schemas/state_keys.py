"""Names and descriptions of the state keys (digests by which equal states are found), for jobs and pages.

`task_app/episode/state_keys.py` and the environments implement the keys; a test compares the names.
"""

import re
from collections.abc import Collection, Mapping, Sequence

DEFAULT = "default"
# Represents text_last_1, text_last_2, ... in lists of names; no episode needs more than nine digits.
TEXT_LAST_N = "text_last_n"
_LAST_N = re.compile(r"text_last_([1-9][0-9]{0,8})")

OF_EVERY_ENVIRONMENT: Mapping[str, str] = {
    DEFAULT: "the first of the environment's own keys, or `text` if it has none",
    "text": "the observation's text; in a conversation all messages of the prompt as they are shown, with "
    "the policy's own answers, and stubs for deleted ones",
    TEXT_LAST_N: "the last n observations, as in `text_last_2`, for any n from 1 on; in a conversation also "
    "the answers between them (an observation is then all that was said between two answers of the policy)",
    "text_history": "all observations of the episode; in a conversation all prompts so far, which differ "
    "from `text` only after an edit of the context",
}
# Keys of the environments that come with Turnwise; only the task app knows the keys of a plug-in, or of
# another environment that is not listed here.
OF_ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "babyai": {
        "grid": "the whole grid, the agent, what it carries and the mission's progress; BabyAI's default",
        "view": "the mission, what is in view, and what is carried",
    },
    "crafter": {
        "nearest": "the nearest of each kind in view, the faced cell, the items, a band of health, darkness "
        "and sleep; Crafter's default",
        "view": "all cells in view, the direction, and the items",
        "exact": "all of the observation except the time and the news",
        "coarse": "the faced cell, the items, and whether a table or a furnace is near",
    },
    "dialogue": {},
    "documents": {},
    "orders": {
        "database": "all tables by their digest, the requests, who was looked up, and the achievements; the "
        "default of orders"
    },
    "sokoban": {
        "board": "all cells, with the boxes and the player, and the achievements; Sokoban's default",
        "pushes": "the same, with the cells that the player reaches in place of its own",
    },
}


def list_state_keys(env_name: str) -> Sequence[str] | None:
    """Return the names of an environment's state keys; None if it is a plug-in or not listed above."""
    own = OF_ENVIRONMENT.get(env_name)
    return None if own is None else (*OF_EVERY_ENVIRONMENT, *own)


def read_last_n(name: str) -> int | None:
    """Return the number in a name like `text_last_4`; None for any other name, including `text_last_n`."""
    match = _LAST_N.fullmatch(name)
    return int(match[1]) if match else None


def is_state_key(name: str, known: Collection[str]) -> bool:
    """Whether `name` is in `known`, where `text_last_n` stands for `text_last_1`, `text_last_2` and so on."""
    if name == TEXT_LAST_N:
        return False
    return name in known or (TEXT_LAST_N in known and read_last_n(name) is not None)
