"""Rules between keys of a job, and the format of a table of rules.

Each line of a table has terms that may not all hold. The indented text after it says why, and what is
allowed:

    training.critic = "own" & lora
        it trains whole layers, and the policy's own are held; known there: head

Terms: `key` (its value is not the default, or the table is there), `key = "a"` (its value is this, or one of
a list), `key < 1` and `key < other.key`, `algorithm.loss: clips` (an attribute of the plug that the job
names), `no TERM`, and `<words>` (a condition of `rules.CONDITIONS`). `a | b & c` are two rules: `a & c`, and
`b & c`. A rule with a key of [rollout_only] is checked for each fixed policy. The text may contain a value of
the job: `{model.device}`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import eq, ge, gt, lt
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from pydantic.fields import FieldInfo

from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import table_model
from trainer_backend.plugins import BOARDS

Facts = TypeVar("Facts")
Kind = Literal["refusal", "not read", "advice", "bias"]
Need = Literal["toml", "plugs", "task_app"]
_COMPARED = re.compile(r"(\S+) (<|>|>=|==) (\S+)")
_ONLY, _WITHOUT = "rollout_only", "without "
# Rules about only these keys also apply to inactive tables of [rollout_only].
_SOURCE = {f"{_ONLY}.{key}" for key in ("model_path", "inference_url", "model", "api_key_env", "logprobs")}


class Finding(NamedTuple):
    """A sentence about a rule that a job breaks."""

    keys: tuple[str, ...]
    sentence: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Rule(Generic[Facts]):
    """A rule between keys, for a job's config or for other facts that have its tables as attributes."""

    keys: tuple[str, ...]
    """Dotted keys that the rule is about; a finding is reported at the first."""
    holds: Callable[[Facts], bool]
    """Whether the job keeps the rule. If False, `sentence` may still return nothing."""
    sentence: str | Callable[[Facts], str | Iterable[str]]
    """What was found, what is allowed, the likely intent; `{model.device}` in a text is the job's value."""
    kind: Kind = "refusal"
    """refusal: the job cannot run; not read: a key has no effect; advice: a mistake; bias: of the credit"""
    needs: Need = "toml"
    """What the rule reads: the TOML alone, the plugs that it names, or the answers of a task app."""

    def findings(self, facts: Facts) -> Iterator[Finding]:
        if self.holds(facts):
            return
        told = fill(self.sentence, facts) if isinstance(self.sentence, str) else self.sentence(facts)
        yield from (
            Finding(self.keys, line, self.kind) for line in ([told] if isinstance(told, str) else told)
        )


def fill(sentence: str, facts: object) -> str:
    """Replace `{table.key}` by the job's value."""
    return sentence.format_map(vars(facts))


def field_at(key: str) -> FieldInfo:
    """Return the field of a table, or of a key in it; KeyError if the job has none."""
    table, _, name = key.partition(".")
    field = JobConfig.model_fields[table]
    return table_model(field).model_fields[name] if name else field


def is_key(key: str) -> bool:
    """Return whether a table of the job has this key."""
    table, _, name = key.partition(".")
    return name in table_model(JobConfig.model_fields[table]).model_fields


class Case(NamedTuple):
    """A job, and one of its fixed policies if the rule is about fixed policies."""

    config: JobConfig
    policy: RolloutOnlyTable | None = None

    def value(self, key: str) -> Any:
        """Return the value of a key; None if its table is absent."""
        table, _, name = key.partition(".")
        home = self.policy if name and table == _ONLY else getattr(self.config, table)
        return getattr(home, name, None) if name else home

    def is_set(self, key: str) -> bool:
        """Return whether a key differs from its default, or an optional table is present.

        [rollout_only] is present if one of its tables is active.
        """
        if "." not in key:
            return bool(self.config.fixed_policies) if key == _ONLY else self.value(key) is not None
        usual = field_at(key).get_default(call_default_factory=True)
        return self.value(key.partition(".")[0]) is not None and bool(self.value(key) != usual)

    def show(self, key: str) -> str:
        """Return `key = value`, `key` alone if the value may be secret or long, or `without key`."""
        table, _, name = key.partition(".")
        home = name if name and table == _ONLY else key if name else f"[{table}]"
        value = self.value(key) if key != _ONLY else self.config.fixed_policies
        if value in (None, (), {}, ""):
            return f"{_WITHOUT}{home}"
        value = str(value) if isinstance(value, Path) else value
        is_plain = isinstance(value, bool | int | float | str) and field_at(key).repr
        return f"{home} = {show_value(value)}" if is_plain else home


def show_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


@dataclass(frozen=True, slots=True)
class Term:
    """A condition on a key of a job, or of each of its fixed policies."""

    keys: tuple[str, ...]
    test: Callable[[Case], bool]
    values: tuple[object, ...] = ()
    is_negated: bool = False
    shown: str = ""
    """The text for what was found; empty: the first key and its value."""
    needs: Need = "toml"

    def __str__(self) -> str:
        name = self.keys[0] if "." in self.keys[0] else f"[{self.keys[0]}]"
        values = f" = {' or '.join(map(show_value, self.values))}" if self.values else ""
        return f"{'no ' if self.is_negated else ''}{name}{values}"

    def show(self, case: Case) -> str:
        return fill(self.shown, case.config) if self.shown else case.show(self.keys[0])


def has(key: str, *values: object) -> Term:
    """Return a term: the key has one of these values; or, if none is given, not its default."""
    return Term((key,), lambda case: case.value(key) in values if values else case.is_set(key), values)


def lacks(term: Term) -> Term:
    return replace(term, is_negated=not term.is_negated)


def that(test: Callable[[JobConfig], bool], *keys: str, shown: str = "", needs: Need = "toml") -> Term:
    """Return a term whose condition is Python code; errors show `shown`, or the first key with its value."""
    return Term(keys, lambda case: test(case.config), shown=shown, needs=needs)


def never(*terms: Term, why: str, kind: Kind = "refusal") -> Rule[JobConfig]:
    """Return the rule that not all terms may hold at once; `why` gives the reason and what is allowed."""
    keys = tuple(dict.fromkeys(key for term in terms for key in term.keys))
    is_of_policies = any(key.startswith(f"{_ONLY}.") for key in keys)

    def broken(config: JobConfig) -> list[Case]:
        policies = config.rollout_only if _SOURCE.issuperset(keys) else config.fixed_policies
        cases = [Case(config, policy) for policy in policies] if is_of_policies else [Case(config)]
        return [case for case in cases if all(term.test(case) is not term.is_negated for term in terms)]

    def tell(config: JobConfig) -> Iterator[str]:
        reason = fill(why, config)
        for case in broken(config):
            place = "" if case.policy is None else f"[{_ONLY}] {case.policy.name!r}: "
            found = join_words(dict.fromkeys(term.show(case) for term in terms))
            yield f"{place}{found} ({reason})" if kind == "bias" else f"{place}{found}: {reason}"

    needs: Need = "plugs" if any(term.needs == "plugs" for term in terms) else "toml"
    return Rule(keys, lambda config: not broken(config), tell, kind, needs)


def join_words(parts: Iterable[str]) -> str:
    """Join what a job has and what it lacks: `a with b and c without d or e`."""
    first, *others = parts
    there = [part for part in others if not part.startswith(_WITHOUT)]
    missing = [part.removeprefix(_WITHOUT) for part in others if part.startswith(_WITHOUT)]
    text = f"{first} with {' and '.join(there)}" if there else first
    joint = " or " if first.startswith(_WITHOUT) else f" {_WITHOUT}"
    return f"{text}{joint}{' or '.join(missing)}" if missing else text


def read_table(
    text: str, conditions: Mapping[str, Term], kind: Kind = "refusal"
) -> Iterator[Rule[JobConfig]]:
    """Yield the rules of a table, whose format this module's docstring describes."""
    for block in re.split(r"(?<![&|])\n(?=\S)", text.strip()):
        line, _, reason = block.partition("\n    ")
        first, *others = line.replace("\n", " ").split(" & ")
        for one in first.split(" | "):
            terms = [read_term(term, conditions) for term in (one, *others)]
            yield never(*terms, why=" ".join(reason.split()), kind=kind)


def read_readers(text: str, conditions: Mapping[str, Term]) -> Iterator[Rule[JobConfig]]:
    """Yield the rules of a table `keys: terms`, about keys that nothing reads unless each term is met."""
    for line in text.strip().splitlines():
        keys, _, readers = line.partition(": ")
        terms = [read_term(reader, conditions) for reader in readers.split(" & ")]
        why = f"it is read only with {' and '.join(map(str, terms))}"
        for key in keys.split():
            yield from (never(has(key), lacks(term), why=why, kind="not read") for term in terms)


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {"<": lt, ">": gt, ">=": ge, "==": eq}


def read_term(text: str, conditions: Mapping[str, Term]) -> Term:
    if text.startswith("no "):
        return lacks(read_term(text.removeprefix("no "), conditions))
    if text.startswith("<"):
        return conditions[text[1:-1]]
    if compared := _COMPARED.fullmatch(text):
        return _compare(*compared.groups())
    key, equals, value = text.partition(" = ")
    values = json.loads(value) if equals else []
    values = tuple(values) if isinstance(values, list) else (values,)
    key, is_plug, attribute = key.partition(": ")
    if not is_plug:
        return has(key, *values)

    def test(case: Case) -> bool:
        name = case.value(key)
        found = name is not None and getattr(BOARDS[key][name], attribute)
        return found in values if values else bool(found)

    return Term((key,), test, needs="plugs")


def _compare(key: str, sign: str, other: str) -> Term:
    def test(case: Case) -> bool:
        one, two = case.value(key), float(other) if is_number else case.value(other)
        return None not in (one, two) and _COMPARE[sign](one, two)

    is_number = other.replace(".", "").isdecimal()
    shown = "" if is_number else f"{key} ({{{key}!r}}) {sign} {other} ({{{other}!r}})"
    return Term((key,) if is_number else (key, other), test, shown=shown)
