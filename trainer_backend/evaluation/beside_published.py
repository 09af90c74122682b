"""Played episodes beside published rows, and the differences between the protocols. Pure.

An evaluation of 200 env steps must not be compared with one of 10,000: every group of rows lists what makes
it incomparable, derived from the episodes themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared_schemas.trajectory import StopReason, Trajectory
from trainer_backend.core.statistics import CRAFTER
from trainer_backend.evaluation.published_crafter import (
    PROTOCOLS,
    PUBLISHED,
    SOURCES,
    Figure,
    Protocol,
    ProtocolName,
)


@dataclass(frozen=True, slots=True)
class Row:
    """A published row for display."""

    agent: str
    score: Figure | None
    reward: Figure | None
    progress: Figure | None
    learned_from: str
    source: str
    url: str


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that were measured in the same way."""

    title: str
    """Their common protocol."""
    comparable: bool
    """Whether our episodes could be as long as theirs. Then `differences` only concern the choice of episodes
    and the policy's observations."""
    differences: tuple[str, ...]
    """How this evaluation differs, a sentence each."""
    rows: tuple[Row, ...]
    """The published figures."""


# What the policy saw here, by `env_config.text`.
_TEXTS = {
    "full": "a text with the map of the view",
    "compact": "the compact text, which finds paths for the policy",
    "balrog": "BALROG's text, as it is since August 2025",
}


def beside_published(episodes: Sequence[Trajectory], *, text: str) -> tuple[Group, ...]:
    """Return all published rows for episodes of Crafter; none for other environments.

    Args:
        text: `env_config.text` of the episodes.
    """
    if not episodes or any(episode.env_name != CRAFTER for episode in episodes):
        return ()
    return tuple(_group(name, protocol, episodes, text) for name, protocol in PROTOCOLS.items())


def _group(name: ProtocolName, protocol: Protocol, episodes: Sequence[Trajectory], text: str) -> Group:
    lengths = _length_differences(protocol, episodes)
    here = _TEXTS.get(text, f"text {text!r}")
    others = (
        f"episodes: {protocol.counted}; here one on each of {len(episodes)} worlds, the policy as it is",
        f"seen: {protocol.sees}; here {here}",
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
    short_count = sum(not _is_whole(episode, limit) for episode in episodes)
    beyond = sum(episode.env_steps > limit for episode in episodes)
    differences = []
    if short_count:
        differences.append(
            f"{short_count} of {count} episodes here were cut short (longest: {longest:,} env steps), and "
            f"would have gone on to death or to {limit:,}: figures here are too low"
        )
    if beyond:
        differences.append(
            f"{beyond} of {count} episodes here went on beyond {limit:,} env steps, where those end: figures "
            "here are too high"
        )
    return tuple(differences)


def _is_whole(episode: Trajectory, limit: int) -> bool:
    """Return whether an episode reached its own end, or the length of published ones."""
    died = episode.stop_reason is StopReason.ENVIRONMENT_DONE and episode.terminated
    return died or episode.env_steps >= limit
