"""The file of `turnwise truth`: a line of settings, then a line per decision with its true advantage."""

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
    """Return the default path of a run's file of measured decisions."""
    return run / "truth.jsonl"


# The keys of [rollout] that affect what a policy sees and does; the others affect speed.
_PLAY = frozenset(
    {"env_name", "env_config", "policy_name", "policy_config", "max_turns", *SAMPLING_KEYS}
    | LimitKeys.model_fields.keys() - {"timeout_s"}
)


class TruthSetting(BaseModel):
    """The settings that affect the measured advantages, in addition to the rollouts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    """Id of the run that stored the rollouts."""
    iteration: int
    checkpoint: str
    """The policy that plays the continuations: the name of a checkpoint of the run, or a path."""
    digest: str | None = None
    """Digest of the checkpoint's weights; None for a model folder, or in a file of an earlier version."""
    gamma: float
    """Discount per decision."""
    continuations: int
    """Pairs of continuations for each decision."""
    horizon: int | None
    """Largest number of decisions in a continuation; None if continuations play to the end."""
    fresh_draws: bool
    """Whether the environment draws new random numbers for each pair of continuations; if not, it draws those
    of the stored episode."""
    seed: int
    rewards: dict[str, Any]
    """Keys of [training] that affect r_t."""
    play: dict[str, Any]
    """Keys of [rollout] that affect what the policy sees and does."""

    @field_validator("play")
    @classmethod
    def _fill_in_new_keys(cls, play: dict[str, Any]) -> dict[str, Any]:
        return CostKeys().model_dump() | play


def select_rewards(table: TrainingTable) -> dict[str, Any]:
    """Return the keys of [training] that affect r_t."""
    switches = table.step_rewards.model_dump(mode="json")
    return {**switches, "horizon": table.step_rewards_horizon, "kl_reward_coef": table.kl_reward_coef}


def select_play(table: RolloutTable) -> dict[str, Any]:
    """Return the keys of [rollout] that affect what the policy sees and does."""
    return table.model_dump(mode="json", include=set(_PLAY))


class TruthFile:
    """Holds measured decisions. `add` writes each to disk at once, so a kill loses only unfinished ones."""

    def __init__(self, path: Path, setting: TruthSetting, truths: list[TrueAdvantage]) -> None:
        self.path, self.setting = path, setting
        self.truths = {(item.rollout_id, item.turn): item for item in truths}

    @classmethod
    def read(cls, path: Path, run: RunDirectory) -> Self:
        """Read the file of a run; raise RunDirectoryError if it is missing, invalid or of another run."""
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
        """Open a file to continue it, or prepare a new file, which the first call of `add` creates.

        Raises RunDirectoryError if the file was measured with another setting.
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
        # The file is read again, because another command may have begun it.
        if not self.truths and not type(self).open(self.path, self.setting).truths:
            with write_errors(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_lines(self.path, [self.setting.model_dump(mode="json")], durable=True)
        append_line(self.path, asdict(truth), durable=True)
        self.truths[truth.rollout_id, truth.turn] = truth

    @classmethod
    def _parse(cls, path: Path) -> Self | None:
        """Read a file; None if it does not exist or contains no decision."""
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
