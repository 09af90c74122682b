"""The file of `turnwise truth`: what was measured, then a line for each measured decision."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from trainer_backend.core.truth import TrueAdvantage
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.files import append_line, read_lines, write_errors
from trainer_backend.rundir.layout import RunDirectory

_TRUTH = TypeAdapter(TrueAdvantage)


def truth_of(run: Path) -> Path:
    """The file of a run, unless another one is named."""
    return run / "truth.jsonl"


class TruthSetting(BaseModel):
    """What the measured advantages depend on, beside the rollouts.

    Attributes:
        run_id: of the run that stored them.
        checkpoint: name of the folder whose policy plays on.
        gamma: discount per decision.
        continuations: pairs of continuations for each decision.
        horizon: decisions that a continuation may take; None: as many as its episode has left.
        fresh_draws: whether each pair of continuations draws its own random numbers of the world; if not, all
            have those that the stored episode met.
        rewards: the reward switches of [training].
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    iteration: int
    checkpoint: str
    gamma: float
    continuations: int
    horizon: int | None
    fresh_draws: bool
    seed: int
    rewards: dict[str, Any]


class TruthFile:
    """Measured decisions, each of which is on disk once it is added: a kill loses those that are open.

    Attributes:
        truths: by rollout id and turn, in the order of the file.
    """

    def __init__(self, path: Path, setting: TruthSetting, truths: list[TrueAdvantage]) -> None:
        self.path, self.setting = path, setting
        self.truths = {(item.rollout_id, item.turn): item for item in truths}

    @classmethod
    def read(cls, path: Path, run: RunDirectory) -> Self:
        """
        Raises:
            RunDirectoryError: there is no such file, it is no truth, or that of another run.
        """
        if not path.exists():
            raise RunDirectoryError(f"{path}: no truth is measured; `turnwise truth {run.path}` measures it")
        file = cls._parse(path)
        if file.setting.run_id != run.run_id:
            raise RunDirectoryError(
                f"{path} is the truth of run {file.setting.run_id!r}, and {run.path} is run {run.run_id!r}"
            )
        return file

    @classmethod
    def open(cls, path: Path, setting: TruthSetting) -> Self:
        """The file to go on with, or a new one.

        Raises:
            RunDirectoryError: the file was measured with another setting.
        """
        if path.exists():
            file = cls._parse(path)
            if file.setting != setting:
                differs = _difference(file.setting, setting)
                raise RunDirectoryError(f"{path} was measured with {differs}; --out names another file")
            return file
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, setting.model_dump(mode="json"), durable=True)
        return cls(path, setting, [])

    def add(self, truth: TrueAdvantage) -> None:
        append_line(self.path, asdict(truth), durable=True)
        self.truths[truth.rollout_id, truth.turn] = truth

    @classmethod
    def _parse(cls, path: Path) -> Self:
        try:
            first, *rows = read_lines(path)
            return cls(
                path, TruthSetting.model_validate(first), [_TRUTH.validate_python(row) for row in rows]
            )
        except (ValueError, ValidationError) as error:
            raise RunDirectoryError(f"{path} is no file of `turnwise truth`") from error


def _difference(stored: TruthSetting, asked: TruthSetting) -> str:
    before, after = stored.model_dump(), asked.model_dump()
    others = [name for name in before if before[name] != after[name]]
    return ", ".join(f"{name} = {before[name]!r} instead of {after[name]!r}" for name in others)
