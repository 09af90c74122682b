"""Stores rollouts as Parquet: one row per rollout, readable by pandas, DuckDB and `datasets`.

The flat columns and `decisions` are for people and queries. The column `rollout` contains the rollout as
JSON, from which segments, rewards and advantages can be recomputed exactly (`read_rollouts`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepData
from trainer_backend.core.advantages.derivation import PARTS
from trainer_backend.core.critic import ByToken, OfEpisode
from trainer_backend.core.kl_reward import ScoredTokens
from trainer_backend.core.statistics import step_deltas, unique_achievements
from trainer_backend.errors import RunDirectoryError
from trainer_backend.garbage import while_a_batch_grows
from trainer_backend.rundir.files import replace_text, replacement

# Parts of an advantage with a column of their own: `read_values` reads the column of the critic's values.
_OWN_COLUMNS = ("value",)
_TEXT, _INT, _LONG, _BOOL, _FLOAT = pa.string(), pa.int32(), pa.int64(), pa.bool_(), pa.float64()
_TEXTS, _FLOATS = pa.list_(_TEXT), pa.list_(_FLOAT)
_PARTS = pa.struct([(name, _FLOAT) for name in PARTS if name not in _OWN_COLUMNS])
_DECISION = pa.struct([
    ("turn", _INT), ("action", _TEXT), ("unique", _TEXTS), ("unique_delta", _INT), ("ach_delta", _INT),
    ("env_reward", _FLOAT), ("env_steps", _INT), ("invalid_reason", _TEXT), ("reward", _FLOAT),
    ("return_to_go", _FLOAT), ("advantage", _FLOAT), ("advantage_parts", _PARTS), ("state_key", _TEXT),
    ("value", _FLOAT), ("branch_returns", _FLOATS), ("token_advantages", _FLOATS),
    ("token_values", _FLOATS), ("token_logprobs", _FLOATS), ("token_reference_logprobs", _FLOATS),
])  # fmt: skip
_SCHEMA = pa.schema([
    ("rollout_id", _TEXT), ("run_id", _TEXT), ("iteration", _INT), ("group_id", _TEXT), ("sibling", _INT),
    ("attempt", _INT), ("instance_id", _TEXT), ("status", _TEXT), ("seed", _LONG), ("policy_name", _TEXT),
    ("model", _TEXT), ("outcome_reward", _FLOAT), ("unique_achievements", _INT), ("decision_count", _INT),
    ("env_steps", _INT), ("stop_reason", _TEXT), ("terminated", _BOOL), ("truncated", _BOOL),
    ("failure_code", _TEXT), ("value_after", _FLOAT), ("estimator", _TEXT),
    ("decisions", pa.list_(_DECISION)), ("rollout", _TEXT),
])  # fmt: skip
# Rollouts per row group. To show one rollout, a page reads a whole group; each group takes 4 ms to write.
_AT_ONCE = 256
# Split of the data set -> prefix of its files.
_SPLITS = {"train": "iteration", "test": "evaluation"}
_CARD_TEXT = """
Rollouts of a Turnwise run, a row an episode: `train` is what the policy was trained on, `test` the held-out
episodes of its evaluations. `warmup.parquet`, where there is one, holds the teacher's episodes.
"""
# A snapshot takes 8 kB that do not compress. It can be reproduced from the rollout's world and actions.
_WITHOUT_SNAPSHOTS: Any = {"trajectory": {"steps": {"__all__": {"snapshot": True}}}}
# The experts that each token was routed to take much more space than the tokens. Only the update needs them.
_UNTRAINED: Any = {"trajectory": {"steps": {"__all__": {"snapshot": True, "policy_logprobs": {"experts"}}}}}


@dataclass(frozen=True, slots=True)
class Credit:
    """The credit that training assigned to the decisions of one episode; each list is [T].

    rewards_T: r_t.
    advantages_T: the advantages of the update. If advantages differ by token: their mean over each decision.
    returns_T: G_t, the discounted sum of r from t on. With a critic: its training target for the decision, or
        for the decision's first token if targets are by token. Empty if not computed.
    estimator: `algorithm.advantage`.
    parts: the terms of the advantages, by the names of `core.advantages.derivation.PARTS`.
    state_keys_T: keys of the states, if the estimator compared decisions by state; otherwise empty.
    branch_returns_T: the returns of the branches that start before each decision; empty without branches.
    token_advantages, token_values: advantage and value of each sampled token, if they differ by token.
    value_after: V of the state after the last decision, if it was used as a bootstrap.
    """

    rewards_T: Sequence[float]
    advantages_T: Sequence[float]
    returns_T: Sequence[float] = ()
    estimator: str | None = None
    parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    state_keys_T: Sequence[str] = ()
    branch_returns_T: Sequence[Sequence[float]] = ()
    token_advantages: ByToken | None = None
    token_values: ByToken | None = None
    value_after: float | None = None

    def of(self, t: int) -> dict[str, Any]:
        parts = {name: values[t] for name, values in self.parts.items()}
        columns: dict[str, Any] = {name: parts.pop(name) for name in _OWN_COLUMNS if name in parts}
        if parts:
            columns["advantage_parts"] = parts
        for name, column in (("state_key", self.state_keys_T), ("return_to_go", self.returns_T)):
            if column:
                columns[name] = column[t]
        if self.branch_returns_T:
            columns["branch_returns"] = list(self.branch_returns_T[t])
        by_token = (("token_advantages", self.token_advantages), ("token_values", self.token_values))
        columns |= {name: list(column.rows_T[t]) for name, column in by_token if column is not None}
        return columns | {"reward": self.rewards_T[t], "advantage": self.advantages_T[t]}


def write_rollouts(
    path: Path,
    rollouts: Sequence[Rollout],
    credits: Sequence[Credit] | None = None,
    scored: Mapping[str, ScoredTokens] = MappingProxyType({}),
) -> None:
    """Write all rollouts of a stage, failed ones included, and flush them before task apps delete theirs.

    `scored` contains, by rollout id, the log-probs of tokens under the policy and the reference policy.
    """
    rows = [
        _row(rollout, credits[index] if credits is not None and index < len(credits) else None)
        for index, rollout in enumerate(rollouts)
    ]
    for row in rows:
        if tokens := scored.get(row["rollout_id"]):
            columns = zip(row["decisions"], tokens.policy_T, tokens.reference_T, strict=True)
            for decision, own, other in columns:
                decision["token_logprobs"], decision["token_reference_logprobs"] = list(own), list(other)
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    with replacement(path, pa.ArrowException) as aside:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, aside, compression="zstd", row_group_size=_AT_ONCE)
    _write_card(path.parent)


def _write_card(folder: Path) -> None:
    """Write the README.md that tells `datasets.load_dataset` which files belong to which split.

    Without it, `load_dataset` loads only the evaluation's files, as split test. It refuses a README.md that
    names a split without files.
    """
    splits = [
        f"  - split: {split}\n    path: {stage}_*.parquet\n"
        for split, stage in _SPLITS.items()
        if any(folder.glob(f"{stage}_*.parquet"))
    ]
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{''.join(splits)}---\n{_CARD_TEXT}"
    path = folder / "README.md"
    if splits and not (path.exists() and path.read_text(encoding="utf-8") == card):
        replace_text(path, card, durable=False)


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Convert the errors that pyarrow and pydantic raise about a damaged file to RunDirectoryError."""
    try:
        yield
    except FileNotFoundError:
        raise
    # ValueError includes the errors of pydantic.
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError) as error:
        message = (str(error) or type(error).__name__).splitlines()[0]
        raise RunDirectoryError(f"{path} cannot be read: {message}") from error


def _read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    # Not pq.read_table, which imports pyarrow.dataset: that takes as long as the import of pyarrow.
    with pq.ParquetFile(path) as file:
        return file.read(columns=list(columns))


def _read_row(path: Path, rollout_id: str, columns: Sequence[str]) -> pa.Table:
    """Read these columns of one rollout as a table of one row. Raise LookupError if the file lacks it."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            ids = file.read_row_group(group, columns=["rollout_id"]).column("rollout_id").to_pylist()
            if rollout_id in ids:
                table = file.read_row_group(group, columns=list(columns))
                return table.slice(ids.index(rollout_id), 1)
    raise LookupError(f"it holds no rollout {rollout_id!r}")


def read_rollouts(path: Path) -> list[Rollout]:
    """Read the rollouts of a file as they were collected, but without the snapshots taken before decisions.

    Rollouts without credit, such as an evaluation's, also lack the experts that their tokens were routed to.
    """
    with _read_errors(path), while_a_batch_grows():
        column = _read_columns(path, ["rollout"]).column("rollout")
        return [Rollout.model_validate_json(text) for text in column.to_pylist()]


def read_rollout(path: Path, rollout_id: str) -> Rollout:
    with _read_errors(path):
        table = _read_row(path, rollout_id, ["rollout"])
        return Rollout.model_validate_json(table.column("rollout")[0].as_py())


def rollout_ids(path: Path) -> list[str]:
    """Return the ids of all rollouts of a file, failed ones included."""
    with _read_errors(path):
        ids: list[str] = _read_columns(path, ["rollout_id"]).column("rollout_id").to_pylist()
        return ids


def read_decisions(path: Path, rollout_id: str) -> list[dict[str, Any]]:
    """Return the columns and the estimator of each decision; an empty list if the rollout failed."""
    with _read_errors(path):
        columns = [name for name in ("decisions", "estimator") if name in pq.read_schema(path).names]
        table = _read_row(path, rollout_id, columns)
        (row,) = table.to_pylist()
        return [{**decision, "estimator": row.get("estimator")} for decision in row["decisions"] or ()]


def read_values(path: Path) -> dict[str, OfEpisode]:
    """Read the critic's values that credit used, by rollout id; rollouts without values are absent."""
    found: dict[str, OfEpisode] = {}
    for name, decisions in _decisions_with(path, "value"):
        found[name] = [decision["value"] for decision in decisions]
        if all(decision["token_values"] is not None for decision in decisions):
            found[name] = ByToken([decision["token_values"] for decision in decisions])
    return found


def read_values_after(path: Path) -> dict[str, float] | None:
    """Read V of the states in which a limit cut an episode, by rollout id; None if none is stored."""
    with _read_errors(path):
        if "value_after" not in pq.read_schema(path).names:
            return None  # written by an earlier version
    rows = finished_rows(path, ["rollout_id", "value_after"])
    return {row["rollout_id"]: row["value_after"] for row in rows if row["value_after"] is not None} or None


def _decisions_with(path: Path, column: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield id and decisions of each finished rollout whose decisions all have a value in `column`."""
    with _read_errors(path):
        there = {child.name for child in pq.read_schema(path).field("decisions").type.value_type}
    for row in finished_rows(path, ["rollout_id", "decisions"]) if column in there else ():
        if all(decision[column] is not None for decision in row["decisions"]):
            yield row["rollout_id"], row["decisions"]


def read_token_scores(path: Path) -> dict[str, ScoredTokens]:
    """Read the log-probs of tokens under the policy and the reference policy, by rollout id.

    Rollouts whose log-probs were not stored are absent.
    """
    return {
        name: ScoredTokens(
            [decision["token_logprobs"] for decision in decisions],
            [decision["token_reference_logprobs"] for decision in decisions],
        )
        for name, decisions in _decisions_with(path, "token_logprobs")
    }


def finished_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return these columns, and `status`, of each finished rollout."""
    with _read_errors(path):
        table = _read_columns(path, [*columns, "status"])
        return [row for row in table.to_pylist() if row["status"] == "finished"]


def _row(rollout: Rollout, credit: Credit | None) -> dict[str, Any]:
    trajectory = rollout.trajectory
    row = {name: getattr(rollout, name) for name in _SCHEMA.names[:8]}
    row |= {
        "failure_code": rollout.failure.code if rollout.failure else None,
        "rollout": rollout.model_dump_json(
            exclude_unset=True, exclude=_UNTRAINED if credit is None else _WITHOUT_SNAPSHOTS
        ),
    }
    if trajectory is None:
        return row
    for name in ("seed", "policy_name", "model", "outcome_reward", "env_steps", "terminated", "truncated"):
        row[name] = getattr(trajectory, name)
    row |= {
        "unique_achievements": unique_achievements(trajectory),
        "decision_count": len(trajectory.steps),
        "stop_reason": str(trajectory.stop_reason),
        "value_after": credit.value_after if credit else None,
        "estimator": credit.estimator if credit else None,
        "decisions": [_decision(step, credit) for step in trajectory.steps],
    }
    return row


def _decision(step: StepData, credit: Credit | None) -> dict[str, Any]:
    delta = step_deltas(step)
    rewards = step.env_rewards or ()
    return {
        "turn": step.turn,
        "action": " ".join(step.step_info.executed_actions),
        "unique": list(delta.unique),
        "unique_delta": delta.unique_delta,
        "ach_delta": delta.ach_delta,
        "env_reward": float(sum(rewards)),
        "env_steps": len(rewards),
        "invalid_reason": step.step_info.invalid_reason,
        **(credit.of(step.turn - 1) if credit else {}),
    }
