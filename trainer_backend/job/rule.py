"""Rules between keys of a job, and the parser for tables of rules.

Each line of a table lists terms that may not all be true for a job. The indented text below the line gives
the reason, and says what is allowed:

    training.critic = "own" & lora
        it trains whole layers, and the policy's own are held; known there: head

    term                       is true if
    key                        its value differs from the default; for a table: the table is present
    key = "a", key = ["a"]     its value is this one; for a list: one of these
    key < 1, key < other.key   the comparison is true (<, >, >=, ==)
    algorithm.loss: clips      the plug-in that the job names under this key has this attribute
    no TERM                    TERM is false
    <words>                    the condition of this name in `rules.CONDITIONS` is true

The line `a | b & c` stands for two rules, `a & c` and `b & c`. A rule with a key of [rollout_only] is checked
for each fixed policy. A text may contain a value of the job, such as `{model.device}`.
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
# A rule that has only these keys is also checked for inactive tables of [rollout_only].
_SOURCE = {f"{_ONLY}.{key}" for key in ("model_path", "inference_url", "model", "api_key_env", "logprobs")}


class Finding(NamedTuple):
    """One sentence about a rule that a job breaks."""

    keys: tuple[str, ...]
    sentence: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Rule(Generic[Facts]):
    """A rule between keys of a job.

    `Facts` is what the rule is checked for: a job's config, or another object with tables of a job as
    attributes.
    """

    keys: tuple[str, ...]
    """Dotted keys that the rule is about. The first is the key to blame if an error can name only one."""
    holds: Callable[[Facts], bool]
    """Returns whether the job keeps the rule. If it returns False, `sentence` is asked for the findings, and
    may still return none."""
    sentence: str | Callable[[Facts], str | Iterable[str]]
    """Says what was found, what is allowed, and what was probably meant. In a text, `{model.device}` stands
    for the job's value. A function returns one sentence for each finding."""
    kind: Kind = "refusal"
    """refusal: the job cannot run; not read: a key has no effect, so the job is refused; advice: the job
    runs, but probably not as intended; bias: a setting biases the expected gradient."""
    needs: Need = "toml"
    """What a check of the rule requires: only the TOML, the plug-ins that the TOML names, or a task app."""

    def findings(self, facts: Facts) -> Iterator[Finding]:
        if self.holds(facts):
            return
        told = fill(self.sentence, facts) if isinstance(self.sentence, str) else self.sentence(facts)
        yield from (
            Finding(self.keys, line, self.kind) for line in ([told] if isinstance(told, str) else told)
        )


def fill(sentence: str, facts: object) -> str:
    """Replace each `{table.key}` in a text by the job's value."""
    return sentence.format_map(vars(facts))


def field_at(key: str) -> FieldInfo:
    """Return the pydantic field of a table or of a dotted key. Raises KeyError if jobs have no such key."""
    table, _, name = key.partition(".")
    field = JobConfig.model_fields[table]
    return table_model(field).model_fields[name] if name else field


def is_key(key: str) -> bool:
    """Return whether a dotted key is declared by its table. Raises KeyError if jobs have no such table."""
    table, _, name = key.partition(".")
    return name in table_model(JobConfig.model_fields[table]).model_fields


class Case(NamedTuple):
    """What a term is tested on: a job, and one of its fixed policies if the rule is about fixed policies."""

    config: JobConfig
    policy: RolloutOnlyTable | None = None

    def value(self, key: str) -> Any:
        """Return the value of a key or a table; None if the table is absent."""
        table, _, name = key.partition(".")
        home = self.policy if name and table == _ONLY else getattr(self.config, table)
        return getattr(home, name, None) if name else home

    def is_set(self, key: str) -> bool:
        """Return whether a key differs from its default, or whether an optional table is present.

        [rollout_only] counts as present only if one of its tables is active.
        """
        if "." not in key:
            return bool(self.config.fixed_policies) if key == _ONLY else self.value(key) is not None
        usual = field_at(key).get_default(call_default_factory=True)
        return self.value(key.partition(".")[0]) is not None and bool(self.value(key) != usual)

    def show(self, key: str) -> str:
        """Return the text that names a key in an error, in one of three forms.

        `key = value` if the value is a number, a text or a path; `without key` if it is absent or empty;
        `key` alone if it is of another type or may be secret.
        """
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
    """A condition on keys of a job, or on keys of one of its fixed policies."""

    keys: tuple[str, ...]
    test: Callable[[Case], bool]
    values: tuple[object, ...] = ()
    is_negated: bool = False
    shown: str = ""
    """Text for what was found, in an error. If it is empty, the error names the first key and its value."""
    needs: Need = "toml"

    def __str__(self) -> str:
        name = self.keys[0] if "." in self.keys[0] else f"[{self.keys[0]}]"
        values = f" = {' or '.join(map(show_value, self.values))}" if self.values else ""
        return f"{'no ' if self.is_negated else ''}{name}{values}"

    def show(self, case: Case) -> str:
        return fill(self.shown, case.config) if self.shown else case.show(self.keys[0])


def has(key: str, *values: object) -> Term:
    """Return a term that is true if the key has one of `values` or, without values, if the key is set."""
    return Term((key,), lambda case: case.value(key) in values if values else case.is_set(key), values)


def lacks(term: Term) -> Term:
    return replace(term, is_negated=not term.is_negated)


def that(test: Callable[[JobConfig], bool], *keys: str, shown: str = "", needs: Need = "toml") -> Term:
    """Return a term whose condition is the function `test` of the job; `shown` is as in `Term`."""
    return Term(keys, lambda case: test(case.config), shown=shown, needs=needs)


def never(*terms: Term, why: str, kind: Kind = "refusal") -> Rule[JobConfig]:
    """Return the rule that not all terms may be true at once. `why` says what is allowed, and the reason."""
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
    """Join phrases about what a job has and what it lacks, as in `a with b and c without d or e`.

    A phrase about what it lacks begins with "without ". These phrases come last in the result.
    """
    first, *others = parts
    there = [part for part in others if not part.startswith(_WITHOUT)]
    missing = [part.removeprefix(_WITHOUT) for part in others if part.startswith(_WITHOUT)]
    text = f"{first} with {' and '.join(there)}" if there else first
    joint = " or " if first.startswith(_WITHOUT) else f" {_WITHOUT}"
    return f"{text}{joint}{' or '.join(missing)}" if missing else text


def read_table(
    text: str, conditions: Mapping[str, Term], kind: Kind = "refusal"
) -> Iterator[Rule[JobConfig]]:
    """Parse a table in the format that the module docstring describes, and yield its rules."""
    for block in re.split(r"(?<![&|])\n(?=\S)", text.strip()):
        line, _, reason = block.partition("\n    ")
        first, *others = line.replace("\n", " ").split(" & ")
        for one in first.split(" | "):
            terms = [read_term(term, conditions) for term in (one, *others)]
            yield never(*terms, why=" ".join(reason.split()), kind=kind)


def read_readers(text: str, conditions: Mapping[str, Term]) -> Iterator[Rule[JobConfig]]:
    """Parse a table with lines `keys: terms`, and yield its rules.

    A line means that nothing reads these keys unless all of its terms are true.
    """
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
