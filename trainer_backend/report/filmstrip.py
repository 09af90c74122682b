"""The best held-out episode: pictures of what it unlocked, and what each decision saw, did and earned."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.sources import row_of
from trainer_backend.dashboard.episode_view import DecisionLine, decision_lines
from trainer_backend.dashboard.figures import spaced
from trainer_backend.errors import TrainerError
from trainer_backend.evaluation.outcome import outcome_name
from trainer_backend.report.replay import Frame, FrameSource
from trainer_backend.report.seen import last_seen, news
from trainer_backend.report.stored_episodes import best_episode
from trainer_backend.report.story import Story

_CLIP = 700


@dataclass(frozen=True, slots=True)
class Shot:
    """A frame of the strip, ready for an <img>."""

    caption: str
    alt: str
    uri: str


@dataclass(frozen=True, slots=True)
class Filmstrip:
    """The best episode of the best evaluation.

    Attributes:
        headline: which episode it is.
        lines: its decisions, each with what it saw.
        shots: empty when no task app drew it.
        missing: why there are none, where there could be some.
    """

    headline: str
    lines: Sequence[tuple[DecisionLine, str]]
    shots: Sequence[Shot] = ()
    missing: str = ""


def filmstrip(story: Story, frames: FrameSource) -> Filmstrip | None:
    """None when no evaluation has stored an episode."""
    best = story.best_evaluation
    path = story.rollouts_file(f"evaluation_{best['iteration']}") if best else None
    rollout = best_episode(path) if path else None
    episode = rollout.trajectory if rollout else None
    if best is None or rollout is None or episode is None or not episode.steps:
        return None
    lines = list(zip(decision_lines(episode, []), _saw(episode), strict=True))
    row_id, count = row_of(rollout.group_id), len(lines)
    headline = (
        f"{f'Row {row_id}' if row_id else f'World {episode.seed}'}, evaluation after iteration "
        f"{best['iteration']}: {episode.outcome_reward:g} {outcome_name(best)} in {count} "
        f"decision{'s' * (count > 1)} ({episode.env_steps} env steps); ended by "
        f"{spaced(episode.stop_reason)}."
    )
    if row_id or not episode.achievements_counts:
        return Filmstrip(headline, lines)
    earned = {line.turn: ", ".join(line.unlocked) for line, _ in lines if line.unlocked}
    try:
        taken = frames(story.job, episode, {0, count, *earned})
    except TrainerError as error:
        return Filmstrip(headline, lines, missing=f"No pictures: {error}")
    return Filmstrip(headline, lines, [_shot(frame, earned, last=count) for frame in taken])


def _saw(episode: Trajectory) -> list[str]:
    """Of each decision of a conversation what is new in its prompt; else the last message of its prompt."""
    talks = bool(episode.full_history)
    texts = ["\n".join(news(step)) if talks else last_seen(step) for step in episode.steps]
    return [text if len(text) <= _CLIP else text[: _CLIP - 1] + "…" for text in texts]


def _shot(frame: Frame, earned: dict[int, str], *, last: int) -> Shot:
    said = earned.get(frame.turn, "the end" if frame.turn == last else "the start")
    uri = "data:image/png;base64," + base64.b64encode(frame.png).decode("ascii")
    return Shot(f"{frame.turn}: {said}", f"The game after decision {frame.turn}: {said}.", uri)
