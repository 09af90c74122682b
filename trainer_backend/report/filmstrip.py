"""The best held-out episode: pictures of what it unlocked, and what each decision saw, did and earned."""

import base64
import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from PIL import Image

from shared_schemas.trajectory import StepData
from trainer_backend.collect.sources import row_of
from trainer_backend.core.statistics import step_deltas
from trainer_backend.errors import TrainerError
from trainer_backend.evaluation.outcome import outcome_name
from trainer_backend.report.charts import Picture, Theme, picture
from trainer_backend.report.learning_charts import spaced
from trainer_backend.report.replay import Frame, FrameSource
from trainer_backend.report.seen import did, last_seen, news, parts_earned
from trainer_backend.report.stored_episodes import best_episode
from trainer_backend.report.story import Story

_COLUMNS = 4
_CLIP = 700


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A line of the table: what a decision saw, did and earned; `shown` where it earned something."""

    turn: int
    saw: str
    did: str
    earned: str
    invalid: str
    shown: bool


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
        shots: empty when no task app drew it.
        missing: why there are none, where there could be some.
        picture: the strip as one picture, for the file beside the page.
    """

    headline: str
    rows: Sequence[DecisionRow]
    shots: Sequence[Shot] = ()
    missing: str = ""
    picture: Picture | None = None


def filmstrip(story: Story, frames: FrameSource) -> Filmstrip | None:
    """None when no evaluation has stored an episode."""
    best = story.best_evaluation
    path = story.rollouts_file(f"evaluation_{best['iteration']}") if best else None
    rollout = best_episode(path) if path else None
    episode = rollout.trajectory if rollout else None
    if best is None or rollout is None or episode is None or not episode.steps:
        return None
    talks = bool(episode.full_history)
    rows = [(_conversation_row if talks else _decision_row)(step) for step in episode.steps]
    row_id = row_of(rollout.group_id)
    played = f"Row {row_id}" if row_id else f"World {episode.seed}"
    headline = (
        f"{played}, evaluation after iteration {best['iteration']}: "
        f"{episode.outcome_reward:g} {outcome_name(best)} in {len(rows)} decision{'s' * (len(rows) > 1)} "
        f"({episode.env_steps} env steps); ended by {spaced(episode.stop_reason)}."
    )
    if row_id or not episode.achievements_counts:
        return Filmstrip(headline, rows)
    turns = {0, len(rows), *(row.turn for row in rows if row.shown)}
    try:
        taken = frames(story.job, episode, turns)
    except TrainerError as error:
        return Filmstrip(headline, rows, missing=f"No pictures: {error}")
    captions = {row.turn: row.earned for row in rows if row.shown}
    shots = [_shot(frame, captions, last=len(rows)) for frame in taken]
    return Filmstrip(headline, rows, shots, picture=_strip(taken, shots))


def _decision_row(step: StepData) -> DecisionRow:
    unique = step_deltas(step).unique
    return DecisionRow(
        turn=step.turn,
        saw=_clipped(last_seen(step)),
        did=" ".join(step.step_info.executed_actions),
        earned=", ".join(map(spaced, unique)),
        invalid=step.step_info.invalid_reason or "",
        shown=bool(unique),
    )


def _conversation_row(step: StepData) -> DecisionRow:
    paid = [value for value in step.env_rewards or () if value]
    earned = [*(f"environment {value:+g}" for value in paid), *parts_earned(step)]
    return DecisionRow(
        turn=step.turn,
        saw=_clipped("\n".join(news(step))),
        did=_clipped(did(step)),
        earned=", ".join(earned),
        invalid=step.step_info.invalid_reason or "",
        shown=bool(paid) or any(part.value for part in step.reward_parts),
    )


def _clipped(text: str) -> str:
    return text if len(text) <= _CLIP else text[: _CLIP - 1] + "…"


def _shot(frame: Frame, captions: dict[int, str], *, last: int) -> Shot:
    earned = captions.get(frame.turn, "the end" if frame.turn == last else "the start")
    caption = f"{frame.turn}: {earned}"
    uri = "data:image/png;base64," + base64.b64encode(frame.png).decode("ascii")
    return Shot(caption, f"The game after decision {frame.turn}: {earned}.", uri)


def _strip(frames: Sequence[Frame], shots: Sequence[Shot]) -> Picture | None:
    if not frames:
        return None
    lines = math.ceil(len(frames) / _COLUMNS)

    def draw(figure: Figure, theme: Theme) -> None:
        cells = figure.subplots(lines, _COLUMNS, squeeze=False).flat
        for axes in cells:
            axes.axis("off")
        for axes, frame, shot in zip(figure.axes, frames, shots, strict=False):
            axes.imshow(Image.open(io.BytesIO(frame.png)).convert("RGB"), interpolation="nearest")
            axes.set_title(textwrap.fill(shot.caption, 22), fontsize=7, loc="center")

    alt = "Pictures of the game: " + "; ".join(shot.caption for shot in shots)
    return picture("filmstrip", alt, draw, height_in=1.75 * lines)
