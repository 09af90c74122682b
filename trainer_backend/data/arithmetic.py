"""Generates a data set of short arithmetic problems in the layout of GSM8K.

    python -m trainer_backend.data.arithmetic --rows 1000 --steps 2 --seed 0 > sums.jsonl

A row is `{"question", "answer"}`. As in GSM8K, the answer shows each calculation and ends in `#### n`.
"""

import argparse
import json
from collections.abc import Iterator
from random import Random

_NAMES = ("Ada", "Ben", "Chi", "Dora", "Emil", "Fay", "Gus", "Hana")
_THINGS = ("shells", "stamps", "marbles", "plums", "coins", "beads", "nails", "cards")


def sums(rows: int, *, steps: int, seed: int, largest: int = 20) -> Iterator[dict[str, str]]:
    """Yield rows whose problems take one to `steps` additions, subtractions and multiplications.

    No question occurs twice. With equal seeds, a larger `rows` only adds rows at the end.
    `largest` is the largest number in a question; multipliers are 2 or 3.
    """
    random, questions = Random(seed), set[str]()
    for _ in range(rows):
        for _ in range(1000):
            question, answer = _sum(random, steps, largest)
            if question not in questions:
                break
        else:
            raise ValueError(f"{len(questions)} different questions were found, and {rows} are asked for")
        questions.add(question)
        yield {"question": question, "answer": answer}


def _sum(random: Random, steps: int, largest: int) -> tuple[str, str]:
    name, thing = random.choice(_NAMES), random.choice(_THINGS)
    have = random.randint(2, largest)
    sentences, calculations = [f"{name} has {have} {thing}."], []
    for _ in range(random.randint(1, steps)):
        sentence, calculation, have = _step(random, name, have, largest)
        sentences.append(sentence)
        calculations.append(calculation)
    question = " ".join([*sentences, f"How many {thing} does {name} have now?"])
    return question, "\n".join([*calculations, f"#### {have}"])


def _step(random: Random, name: str, have: int, largest: int) -> tuple[str, str, int]:
    """Return a sentence of the question, its calculation, and the result, which is never negative."""
    kind = random.choice(("more", "fewer", "times") if have else ("more",))
    if kind == "more":
        count = random.randint(1, largest)
        return f"{name} finds {count} more.", f"{have} + {count} = {have + count}", have + count
    if kind == "fewer":
        count = random.randint(1, have)
        return f"{name} gives away {count}.", f"{have} - {count} = {have - count}", have - count
    count = random.choice((2, 3))
    verb = "doubles" if count == 2 else "triples"
    return f"{name} {verb} them.", f"{have} * {count} = {have * count}", have * count


def main() -> None:
    parser = argparse.ArgumentParser(description="Short sums in the layout of GSM8K, as JSONL.")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2, help="the most steps of a sum")
    parser.add_argument("--largest", type=int, default=20, help="number that a question names")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for row in sums(options.rows, steps=options.steps, seed=options.seed, largest=options.largest):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
