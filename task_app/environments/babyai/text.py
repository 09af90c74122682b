"""The two text styles of an observation, as pure functions of `Observation.data`.

The style `full` consists of sentences. The style `compact` consists of some 30 words of a closed vocabulary,
for models with under a million parameters. Both describe the view relative to the agent's position and
direction.
"""

from collections.abc import Iterator, Mapping
from typing import Any

SYSTEM = """\
You carry out a mission in a grid. You see 6 cells ahead and 3 to each side, not through walls and doors.
left and right turn you by 90 degrees, forward goes one cell. pickup takes the object in the cell ahead, drop
puts it there, toggle opens or closes the door or box there. To go to an object is to stand before it, facing
it.

Always answer with one `act` call of 1 to 5 actions (left, right, forward, pickup, drop, toggle), carried out
in order."""


def full_text(data: Mapping[str, Any]) -> str:
    room = data["room"]
    lines = [
        f"Mission: {data['mission']}. Step {data['step']} of {data['max_steps']}.",
        *(f"You see a {item['words']}: {', '.join(_legs(item, *_WAYS))}." for item in data["objects"]),
        f"Free cells: {room['ahead']} ahead, {room['left']} to the left, {room['right']} to the right.",
        f"You carry a {data['carrying']}." if data["carrying"] else "You carry nothing.",
    ]
    if data["last"]:
        lines.append(f"Your last actions: {', '.join(data['last'])}.")
    return "\n".join([*lines, *(sentence for word, sentence in _NEWS.items() if data[word])])


def compact_text(data: Mapping[str, Any]) -> str:
    """Describe the state in words of a closed vocabulary.

        go to the red ball goal red ball F3 R2 free F2 L0 R3 did left forward

    The mission comes first. Each visible object follows with its role in the mission, or `see` if it has
    none, and its distance (here 3 cells ahead and 2 to the right). `free` counts the free cells in each
    direction, and `did` lists the last actions. The roles are given because a model this small can hardly
    find the mission's objects by comparing words.
    """
    words = [data["mission"]]
    for item in data["objects"]:
        words += [item["role"] or "see", item["words"], *_legs(item, "F{}", "R{}", "L{}")]
    words.append("free")
    words += [f"{letter}{data['room'][side]}" for letter, side in zip("FLR", _ROOM, strict=True)]
    if data["carrying"]:
        words += ["carry", data["carrying"]]
    return " ".join([*words, "did", *data["last"], *(word for word in _NEWS if data[word])])


_ROOM = ("ahead", "left", "right")
_NEWS = {
    "no_effect": "The last actions changed nothing.",
    "invalid": "The last call was not carried out; it cost one step.",
}

_WAYS = ("{} ahead", "{} to the right", "{} to the left")


def _legs(item: Mapping[str, Any], ahead: str, right: str, left: str) -> Iterator[str]:
    """Yield an object's distances as texts, such as `F3` for the template `F{}`; leave out zeros."""
    if item["ahead"]:
        yield ahead.format(item["ahead"])
    if item["right"]:
        yield (right if item["right"] > 0 else left).format(abs(item["right"]))
