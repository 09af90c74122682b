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
from trainer_backend.core.statistics import step_deltas, unique_achievements
from trainer_backend.errors import TrainerError
from trainer_backend.report.charts import Picture, Theme, picture
from trainer_backend.report.learning_charts import spaced
from trainer_backend.report.replay import Frame, FrameSource
from trainer_backend.report.stored_episodes import best_episode
from trainer_backend.report.story import Story

_COLUMNS = 4
_CLIP = 700


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A line of the table: what a decision saw, did and earned."""

    turn: int
    saw: str
    did: str
    earned: str
    invalid: str
    unlocked: bool


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
        missing: why there are none; else empty.
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
    episode = best_episode(path) if path else None
    if best is None or episode is None or not episode.steps:
        return None
    rows = [_decision_row(step) for step in episode.steps]
    headline = (
        f"World {episode.seed}, evaluation after iteration {best['iteration']}: "
        f"{unique_achievements(episode)} unique achievements in {len(rows)} decisions "
        f"({episode.env_steps} env steps); ended by {spaced(episode.stop_reason)}."
    )
    turns = {0, len(rows), *(row.turn for row in rows if row.unlocked)}
    try:
        taken = frames(story.job, episode, turns)
    except TrainerError as error:
        return Filmstrip(headline, rows, missing=f"No pictures: {error}")
    captions = {row.turn: row.earned for row in rows if row.unlocked}
    shots = [_shot(frame, captions, last=len(rows)) for frame in taken]
    return Filmstrip(headline, rows, shots, picture=_strip(taken, shots))


def _decision_row(step: StepData) -> DecisionRow:
    messages = step.observation_data.messages
    saw = (messages[-1].content or "") if messages else ""
    unique = step_deltas(step).unique
    return DecisionRow(
        turn=step.turn,
        saw=saw if len(saw) <= _CLIP else saw[: _CLIP - 1] + "…",
        did=" ".join(step.step_info.executed_actions),
        earned=", ".join(map(spaced, unique)),
        invalid=step.step_info.invalid_reason or "",
        unlocked=bool(unique),
    )


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
