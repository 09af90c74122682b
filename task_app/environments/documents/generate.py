"""Generates a document of any length, and a question about it, from a seed.

The document consists of filler sentences, the facts that answer the question, and distractors: similar facts
about other names. `GenerateConfig.kind` chooses the kind of facts:

needle  One fact is hidden in the text: "The code of Amber Harbour is 48213."
keeper  As needle, but the value is one of 16 names: "The keeper of Amber Harbour is Mira." This kind is for
        small models, to which a number is an unknown sequence of tokens.
hops    A parcel changes hands `hops` times; the question asks for the last owner's locker.
count   Deliveries are listed; the question asks how many crates of one product arrived at one place.
"""

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pydantic import Field

from shared_schemas.base import Body

Kind = Literal["needle", "hops", "count", "keeper"]

# fmt: off
_FIRST = (
    "Amber", "Birch", "Cedar", "Dover", "Ember", "Flint", "Grove", "Hazel",
    "Ivory", "Jade", "Kelp", "Larch", "Maple", "North", "Olive", "Pearl",
)
_SECOND = (
    "Bridge", "Castle", "Dock", "Farm", "Gate", "Harbour", "Inlet",
    "Junction", "Mill", "Orchard", "Quay", "Ridge", "Station", "Tower",
)
_PEOPLE = (
    "Ada", "Boris", "Clara", "David", "Elena", "Farid", "Greta", "Hugo",
    "Iris", "Jonas", "Karin", "Leon", "Mira", "Nils", "Olga", "Pavel",
)
_THINGS = (
    "apples", "bricks", "candles", "drums", "engines", "flour",
    "grain", "hats", "ink", "jars", "kettles", "lamps",
)
# fmt: on
_FILLER = (
    "The {thing} were counted before noon.",
    "{person} walked along the river and said little.",
    "Rain fell on {place} for most of the day.",
    "Nobody at {place} remembered who had ordered the {thing}.",
    "{person} wrote a letter about {thing} and did not send it.",
    "The road to {place} was closed for a week.",
)
_PARAGRAPH = 6  # sentences


class GenerateConfig(Body):
    """Settings of a generated document and its question."""

    kind: Kind = "needle"
    chars: int = Field(
        default=20_000, ge=500, le=10_000_000, description="approximate length of the document"
    )
    hops: int = Field(default=2, ge=1, le=12, description="for kind hops: how often the parcel changes hands")
    distractors: int = Field(
        default=8, ge=0, le=150, description="similar facts about other names; for kind hops at most 15"
    )


@dataclass(frozen=True, slots=True)
class Task:
    """A document, a question about it, and the accepted answers."""

    document: str
    question: str
    answers: tuple[str, ...]


def generate_task(settings: GenerateConfig, seed: int) -> Task:
    """Generate a task. Equal settings and seeds give equal tasks in every process."""
    source = random.Random(seed)
    names = [f"{first} {second}" for first in _FIRST for second in _SECOND]
    if settings.kind == "hops":
        facts, question, answer = _make_hops(settings, source)
    else:
        places = source.sample(names, 1 + settings.distractors)
        if settings.kind == "count":
            facts, question, answer = _make_count(places, source)
        elif settings.kind == "keeper":
            keepers = source.choices(_PEOPLE, k=len(places))
            facts, question, answer = _make_facts("keeper", "Who", places, keepers, source)
        else:
            codes = map(str, source.sample(range(10_000, 100_000), len(places)))
            facts, question, answer = _make_facts("code", "What", places, list(codes), source)
    sentences = _make_filler(settings.chars - sum(len(fact) + 1 for fact in facts), source)
    indices = sorted(source.randint(0, len(sentences)) for _ in facts)
    for index, fact in zip(reversed(indices), reversed(facts), strict=True):
        sentences.insert(index, fact)
    paragraphs = (sentences[i : i + _PARAGRAPH] for i in range(0, len(sentences), _PARAGRAPH))
    return Task("\n".join(map(" ".join, paragraphs)), question, (answer,))


def _make_facts(
    what: str, which: str, names: list[str], values: list[str], source: random.Random
) -> tuple[list[str], str, str]:
    """Return one fact per name in random order, a question about the first name, and its answer."""
    facts = [f"The {what} of {name} is {value}." for name, value in zip(names, values, strict=True)]
    source.shuffle(facts)
    return facts, f"{which} is the {what} of {names[0]}?", values[0]


def _make_hops(settings: GenerateConfig, source: random.Random) -> tuple[list[str], str, str]:
    people = source.sample(_PEOPLE, settings.hops + 1)
    others = [person for person in _PEOPLE if person not in people]
    lockers = source.sample(range(100, 1_000), 1 + settings.distractors)
    facts = [f"{giver} gave the parcel to {taker}." for giver, taker in pairwise(people)]
    # The lockers of earlier owners are wrong answers.
    holders = [people[-1], *(people[:-1] + others)[: settings.distractors]]
    facts += [f"{person} has locker {locker}." for person, locker in zip(holders, lockers, strict=False)]
    source.shuffle(facts)
    question = f"{people[0]} had the parcel first. Which locker has the person who holds it in the end?"
    return facts, question, str(lockers[0])


def _make_count(places: list[str], source: random.Random) -> tuple[list[str], str, str]:
    place, *others = places
    thing, *rest = source.sample(_THINGS, 3)
    count = source.randint(2, 9)
    facts = [f"Delivery {{}}: a crate of {thing} arrived at {place}."] * count
    facts += [f"Delivery {{}}: a crate of {thing} arrived at {other}." for other in others]
    facts += [f"Delivery {{}}: a crate of {other} arrived at {place}." for other in rest]
    source.shuffle(facts)
    deliveries = [fact.format(number) for number, fact in enumerate(facts, start=1)]
    return deliveries, f"How many crates of {thing} arrived at {place}?", str(count)


def _make_filler(chars: int, source: random.Random) -> list[str]:
    sentences = []
    while chars > 0:
        sentence = source.choice(_FILLER).format(
            thing=source.choice(_THINGS),
            person=source.choice(_PEOPLE),
            place=f"{source.choice(_FIRST)} {source.choice(_SECOND)}",
        )
        sentences.append(sentence)
        chars -= len(sentence) + 1
    return sentences
