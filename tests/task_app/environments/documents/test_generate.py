"""Documents and questions made from a seed: the answer follows from the text alone."""

import re

import pytest

from task_app.environments.documents.generate import GenerateConfig, generate_task

SEEDS = range(40)


def test_the_needle_stands_in_the_document_once():
    for seed in SEEDS:
        task = generate_task(GenerateConfig(kind="needle", chars=3_000), seed)
        name = re.fullmatch(r"What is the code of (.+)\?", task.question).group(1)
        assert re.findall(rf"The code of {name} is (\d+)\.", task.document) == list(task.answers)


def test_the_keeper_is_named_once_and_others_keep_other_places():
    for seed in SEEDS:
        task = generate_task(GenerateConfig(kind="keeper", chars=3_000, distractors=5), seed)
        name = re.fullmatch(r"Who is the keeper of (.+)\?", task.question).group(1)
        kept = re.findall(r"The keeper of ([\w ]+) is (\w+)\.", task.document)
        assert len(kept) == len(dict(kept)) == 6
        assert (dict(kept)[name],) == task.answers


@pytest.mark.parametrize("hops", [1, 3, 12])
def test_following_the_parcel_from_hand_to_hand_leads_to_the_locker(hops):
    for seed in SEEDS:
        task = generate_task(GenerateConfig(kind="hops", hops=hops, chars=3_000), seed)
        taker = dict(re.findall(r"(\w+) gave the parcel to (\w+)\.", task.document))
        locker = dict(re.findall(r"(\w+) has locker (\d+)\.", task.document))
        holder = task.question.split()[0]
        assert len(taker) == hops
        while holder in taker:
            holder = taker[holder]
        assert (locker[holder],) == task.answers
        assert len(set(locker.values())) == len(locker)


def test_counting_the_deliveries_gives_the_answer():
    for seed in SEEDS:
        task = generate_task(GenerateConfig(kind="count", chars=3_000), seed)
        thing, place = re.fullmatch(r"How many crates of (\w+) arrived at (.+)\?", task.question).groups()
        count = task.document.count(f"a crate of {thing} arrived at {place}.")
        assert (str(count),) == task.answers and 2 <= count <= 9


@pytest.mark.parametrize("chars", [500, 20_000, 1_000_000])
def test_a_document_is_as_long_as_was_asked_for(chars):
    task = generate_task(GenerateConfig(chars=chars, distractors=3), 5)
    # A sentence at most is too much.
    assert chars <= len(task.document) + 1 and len(task.document) <= chars + 100


def test_equal_seeds_make_equal_documents_and_other_seeds_others():
    tasks = [generate_task(GenerateConfig(), seed) for seed in (1, 1, 2)]
    assert tasks[0] == tasks[1] != tasks[2]
