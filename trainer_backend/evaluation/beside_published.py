"""Pure: played episodes beside published rows, and where the protocols differ.

Nobody should compare an evaluation of 200 env steps with one of 10,000: every group of rows comes with what
keeps it from being comparable, read off the episodes themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared_schemas.trajectory import StopReason, Trajectory
from trainer_backend.evaluation.published_crafter import (
    PROTOCOLS,
    PUBLISHED,
    SOURCES,
    Figure,
    Protocol,
    ProtocolName,
)

ENVIRONMENT = "crafter"


@dataclass(frozen=True, slots=True)
class Row:
    """A published row as it is shown."""

    agent: str
    score: Figure | None
    reward: Figure | None
    progress: Figure | None
    learned_from: str
    source: str
    url: str


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that were measured alike.

    Attributes:
        title: what they have in common.
        comparable: no episode of ours was longer or shorter than theirs could be. What remains of
            `differences` is how episodes were chosen and what the policy saw.
        differences: how this evaluation was measured otherwise, a sentence each.
        rows: the published figures.
    """

    title: str
    comparable: bool
    differences: tuple[str, ...]
    rows: tuple[Row, ...]


def beside_published(episodes: Sequence[Trajectory]) -> tuple[Group, ...]:
    """All published rows, for episodes of Crafter; nothing for those of another environment."""
    if not episodes or any(episode.env_name != ENVIRONMENT for episode in episodes):
        return ()
    return tuple(_group(name, protocol, episodes) for name, protocol in PROTOCOLS.items())


def _group(name: ProtocolName, protocol: Protocol, episodes: Sequence[Trajectory]) -> Group:
    lengths = _length_differences(protocol, episodes)
    others = (
        f"episodes: {protocol.counted}; here one on each of {len(episodes)} worlds, the policy as it is",
        f"seen: {protocol.sees}; here this job's text",
    )
    rows = tuple(
        Row(
            item.agent, item.score, item.reward, item.progress, item.learned_from,
            SOURCES[item.source].title, SOURCES[item.source].url,
        )
        for item in PUBLISHED
        if item.protocol == name
    )  # fmt: skip
    return Group(protocol.title, not lengths, (*lengths, *others), rows)


def _length_differences(protocol: Protocol, episodes: Sequence[Trajectory]) -> tuple[str, ...]:
    limit, count = protocol.max_env_steps, len(episodes)
    longest = max(episode.env_steps for episode in episodes)
    cut = sum(not _whole(episode, limit) for episode in episodes)
    beyond = sum(episode.env_steps > limit for episode in episodes)
    found = []
    if cut:
        found.append(
            f"{cut} of {count} episodes here were cut short (longest: {longest:,} env steps), and would have "
            f"gone on to death or to {limit:,}: figures here are too low"
        )
    if beyond:
        found.append(
            f"{beyond} of {count} episodes here went on beyond {limit:,} env steps, where those end: figures "
            "here are too high"
        )
    return tuple(found)


def _whole(episode: Trajectory, limit: int) -> bool:
    """Whether it went on to its own end, or as far as published ones go."""
    died = episode.stop_reason is StopReason.ENVIRONMENT_DONE and episode.terminated
    return died or episode.env_steps >= limit
