"""The file of `turnwise truth`: what was measured, then a line for each measured decision."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, field_validator

from shared_schemas.rollouts import CostKeys, LimitKeys
from trainer_backend.core.truth import TrueAdvantage
from trainer_backend.errors import RunDirectoryError
from trainer_backend.job.rollout_table import SAMPLING_KEYS, RolloutTable
from trainer_backend.job.training_table import TrainingTable
from trainer_backend.rundir.files import append_line, read_lines, replace_lines, write_errors
from trainer_backend.rundir.layout import RunDirectory

_TRUTH = TypeAdapter(TrueAdvantage)


def locate_truth(run: Path) -> Path:
    """The file of a run, unless another one is named."""
    return run / "truth.jsonl"


# What of [rollout] decides what a policy sees and does; the rest is about speed.
_PLAY = frozenset(
    {"env_name", "env_config", "policy_name", "policy_config", "max_turns", *SAMPLING_KEYS}
    | LimitKeys.model_fields.keys() - {"timeout_s"}
)


class TruthSetting(BaseModel):
    """What the measured advantages depend on, in addition to the rollouts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    """Id of the run that stored them."""
    iteration: int
    checkpoint: str
    """Name of the run's checkpoint that plays on, or the path of another one."""
    digest: str | None = None
    """Digest of its weights; None: it has none (a model folder, or a file of an earlier version)."""
    gamma: float
    """Discount per decision."""
    continuations: int
    """Pairs of continuations for each decision."""
    horizon: int | None
    """Decisions that a continuation may take; None: as many as its episode has left."""
    fresh_draws: bool
    """Whether each pair of continuations draws its own random numbers of the world; if not, all have those
    that the stored episode met."""
    seed: int
    rewards: dict[str, Any]
    """What r_t depends on in [training]."""
    play: dict[str, Any]
    """What the policy sees and may do by [rollout]."""

    @field_validator("play")
    @classmethod
    def _of_earlier_files(cls, play: dict[str, Any]) -> dict[str, Any]:
        return CostKeys().model_dump() | play


def select_rewards(table: TrainingTable) -> dict[str, Any]:
    """What r_t depends on."""
    switches = table.step_rewards.model_dump(mode="json")
    return {**switches, "horizon": table.step_rewards_horizon, "kl_reward_coef": table.kl_reward_coef}


def select_play(table: RolloutTable) -> dict[str, Any]:
    """What the policy sees and may do."""
    return table.model_dump(mode="json", include=set(_PLAY))


class TruthFile:
    """Measured decisions, each of which is on disk once it is added: a kill loses those that are open."""

    def __init__(self, path: Path, setting: TruthSetting, truths: list[TrueAdvantage]) -> None:
        self.path, self.setting = path, setting
        self.truths = {(item.rollout_id, item.turn): item for item in truths}

    @classmethod
    def read(cls, path: Path, run: RunDirectory) -> Self:
        """Read the file of a run; RunDirectoryError: it is not there, is no truth, or that of another run."""
        file = cls._parse(path)
        if file is None:
            raise RunDirectoryError(f"{path}: no truth is measured; `turnwise truth {run.path}` measures it")
        if file.setting.run_id != run.run_id:
            raise RunDirectoryError(
                f"{path} is the truth of run {file.setting.run_id!r}, and {run.path} is run {run.run_id!r}"
            )
        return file

    @classmethod
    def open(cls, path: Path, setting: TruthSetting) -> Self:
        """The file to continue, or a new one, which is written with its first decision.

        RunDirectoryError: the file was measured with another setting.
        """
        file = cls._parse(path)
        if file is None:
            return cls(path, setting, [])
        known = setting if file.setting.digest else setting.model_copy(update={"digest": None})
        if file.setting != known:
            before, after = _flat(file.setting), _flat(known)
            difference = ", ".join(
                f"{name} = {before.get(name)!r} instead of {after.get(name)!r}"
                for name in before | after
                if before.get(name) != after.get(name)
            )
            raise RunDirectoryError(f"{path} was measured with {difference}; --out names another file")
        return file

    def add(self, truth: TrueAdvantage) -> None:
        if not self.truths and not type(self).open(self.path, self.setting).truths:  # nor by another command
            with write_errors(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_lines(self.path, [self.setting.model_dump(mode="json")], durable=True)
        append_line(self.path, asdict(truth), durable=True)
        self.truths[truth.rollout_id, truth.turn] = truth

    @classmethod
    def _parse(cls, path: Path) -> Self | None:
        """None where nothing is measured: there is no file, or no decision in it."""
        if not path.exists():
            return None
        try:
            lines = read_lines(path)
            if not lines or (len(lines) == 1 and "run_id" in lines[0]):
                return None
            first, *rows = lines
            truths = [_TRUTH.validate_python(row) for row in rows]
            return cls(path, TruthSetting.model_validate(first), truths)
        except (OSError, ValidationError) as error:
            raise RunDirectoryError(f"{path} is no file of `turnwise truth`") from error


def _flat(setting: TruthSetting) -> dict[str, Any]:
    return setting.model_dump(exclude={"rewards", "play"}) | setting.rewards | setting.play
