"""A job's data: held-out rows that are the same for every job, and what a person is told of it."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_backend.data.folders import jsonl, parquet
from trainer_backend.data.dataset import Split, first_instances, read_data, read_split, split_rows
from trainer_backend.data.rows import Row
from trainer_backend.data.truths import number_interactions
from trainer_backend.errors import DataError
from trainer_backend.job.rollout_table import DataTable


def questions(count: int, **more: object) -> list[dict[str, object]]:
    return [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}", **more} for n in range(count)]


def ids(rows) -> list[str]:
    return [row.id for row in rows]


def shared(path: Path, share: float = 0.2, seed: int = 0, instances: int = 1000):
    return read_data(DataTable(path=path, held_out_share=share, held_out_seed=seed), instances=instances)


def test_a_held_out_share_parts_the_rows_and_is_a_function_of_seed_and_id_alone(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", questions(400))
    data = shared(path)
    assert len({*ids(data.training), *ids(data.evaluation)}) == 400
    assert 50 <= len(data.evaluation) <= 110  # 80 expected, standard deviation 8
    again = shared(parquet(tmp_path / "b.parquet", questions(400)))
    assert (again.training, again.evaluation) == (data.training, data.evaluation)
    assert set(ids(shared(path, seed=1).evaluation)) != set(ids(data.evaluation))
    # A larger share holds out the same rows and more; so does a longer file.
    assert set(ids(data.evaluation)) <= set(ids(shared(path, share=0.4).evaluation))
    longer = shared(jsonl(tmp_path / "c.jsonl", questions(600)[::-1]))
    assert set(ids(data.evaluation)) <= set(ids(longer.evaluation))


@settings(max_examples=30)
@given(
    st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=30),
    st.integers(0, 40),
    st.integers(0, 99),
)
def test_the_instances_of_an_evaluation_do_not_depend_on_the_order_of_the_file(names, instances, seed):
    rows = [Row(name, "?") for name in names]
    chosen = first_instances(rows, instances, seed=3)
    assert len(chosen) == min(instances, len(rows)) == len(set(ids(chosen)))
    mixed = Random(seed).sample(rows, len(rows))
    assert first_instances(mixed, instances, seed=3) == chosen
    assert first_instances(rows, instances + 1, seed=3)[:instances] == chosen


def test_an_evaluation_split_is_read_from_its_own_file_or_folder(tmp_path):
    train, test = jsonl(tmp_path / "a.jsonl", questions(5)), jsonl(tmp_path / "b.jsonl", questions(4))
    data = read_data(DataTable(path=train, evaluation_path=test), instances=3)
    # The same rows as in another file have the same ids.
    assert set(ids(data.evaluation)) < set(ids(data.training)[:4])
    assert data.notes[0] == "data: 5 rows to train on, 3 of 4 held-out rows played"
    assert data.notes[1] == (
        f"train of {train}: 5 rows, prompt from question, ground_truth from answer after ####"
    )
    assert data.notes[-1] == "warning: 4 held-out rows ask what a training row asks " + (
        f"({test}: line 1 = {train}: line 1)"
    )


def test_a_row_without_an_id_has_the_digest_of_its_content(tmp_path):
    rows = [*questions(3), *questions(2)]
    first, second, third, *again = ids(read_split(jsonl(tmp_path / "a.jsonl", rows), "train").rows)
    # Other digests would move rows between training and held-out in every run that is resumed.
    assert first == "b3eea39bd4508b30"
    assert len({first, second, third}) == 3
    assert again == [f"{first}-2", f"{second}-2"]
    changed = jsonl(tmp_path / "b.jsonl", [{**rows[0], "answer": "#### 7"}])
    assert ids(read_split(changed, "train").rows) != [first]


def test_equal_questions_are_on_one_side_unless_their_own_ids_part_them(tmp_path):
    def sides(rows) -> tuple[set[str], set[str], bool]:
        data = shared(jsonl(tmp_path / "a.jsonl", rows), share=0.5)
        asked = [{row.question for row in side} for side in (data.training, data.evaluation)]
        return *asked, any("ask what a training row asks" in note for note in data.notes)

    rows = [{"question": f"{n}?", "answer": f"#### {truth}"} for n in range(20) for truth in (1, 2)]
    # a list of one message asks what its text asks
    rows += [{"question": [{"role": "user", "content": f"{n}?"}], "answer": "#### 3"} for n in range(20)]
    training, evaluation, is_warned = sides(rows)
    assert training and evaluation and not training & evaluation and not is_warned
    training, evaluation, is_warned = sides([{**row, "id": n} for n, row in enumerate(rows)])
    assert training & evaluation and is_warned


@settings(max_examples=20)
@given(st.lists(st.integers(0, 40), min_size=5, max_size=60), st.data())
def test_rows_that_go_or_are_equal_move_no_other_row_between_training_and_held_out(numbers, draw):
    rows = [Row(str(number), f"What is {number}?") for number in numbers]

    def held_out(rows) -> tuple[set[str], set[str]]:
        keys = tuple(row.id for row in rows)
        training, evaluation = split_rows(Split("train", tuple(rows), keys, {}), 0.3, 0)
        return {row.question for row in training}, {row.question for row in evaluation}

    training, evaluation = held_out(rows)
    assert not training & evaluation, "equal rows are on one side"
    left = draw.draw(st.lists(st.sampled_from(rows), unique_by=id, min_size=1))
    training_left, evaluation_left = held_out(left)
    assert training_left <= training and evaluation_left <= evaluation


def test_a_known_column_that_another_one_made_needless_is_told_too(tmp_path):
    more = {"interaction_kwargs": {"query": "?"}, "extra_info": {"index": 3}, "ground_truth": "4"}
    data = shared(jsonl(tmp_path / "a.jsonl", questions(20, **more)))
    assert data.notes[1].endswith("; not read: answer, extra_info")


def test_a_split_may_use_the_ids_of_another_one(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", [{"id": 0, "question": "1?"}, {"id": 1, "question": "2?"}])
    test = jsonl(tmp_path / "b.jsonl", [{"id": 0, "question": "3?"}])
    data = read_data(DataTable(path=train, evaluation_path=test), instances=3)
    assert (data.by_id["0"].question, data.evaluation[0].question) == ("1?", "3?")


def test_a_share_that_leaves_nothing_on_one_side_is_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", questions(3))
    with pytest.raises(DataError, match=r"held_out_share = 0.001 leaves no row to evaluate on of 3"):
        shared(path, share=0.001)
    with pytest.raises(DataError, match=r"held_out_share = 0.999 leaves no row to train on of 3"):
        shared(path, share=0.999)


def with_interaction(path: Path, name: str | None = "gsm8k") -> DataTable:
    test = jsonl(path.parent / "test.jsonl", questions(2))
    return DataTable(path=path, evaluation_path=test, interaction=name)


def refused(table: DataTable, **numbers: object) -> str:
    with pytest.raises(DataError) as error:
        read_data(table, instances=3, **numbers)
    return str(error.value)


@pytest.mark.parametrize("truth", ["5 apples", "", True, ["5"], {"a": 5}, "NaN", "1,00"])
def test_truths_that_no_answer_can_equal_are_refused_with_the_places_of_all_rows(tmp_path, truth):
    rows = [{"prompt": f"{n}?", "ground_truth": truth if n % 2 else "5"} for n in range(6)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    message = refused(with_interaction(path))
    assert message.startswith(
        f"{path}: lines 2, 4, 6: 3 rows have no ground truth that an answer can equal: in the first it is "
        f"{truth!r}"
    )
    # without the interaction any ground truth will do
    assert len(read_data(with_interaction(path, None), instances=2).training) == 6


def test_a_truth_that_is_missing_is_refused_with_a_hint_at_the_columns_of_verl_and_skyrl(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", [{"prompt": f"{n}?", "reward_spec": "rule"} for n in range(12)])
    test = parquet(tmp_path / "b.parquet", [{"prompt": "?", "reward_model": {"style": "rule"}}])
    message = refused(DataTable(path=train, evaluation_path=test, interaction="gsm8k"))
    assert message.startswith(f"{train}: lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 3 more: ")
    assert "13 rows have no ground truth that an answer can equal: in the first it is missing" in message
    assert "and the interaction 'gsm8k' needs one number, such as 42, -1,000 or 3/4" in message
    assert "reward_model.ground_truth, reward_spec.ground_truth" in message


@pytest.mark.parametrize(
    "truth", ["", "  ", "...", "\u2014", True, {"a": 1}, None, [], ["", "?!"], ["Ada", ""], [None]]
)
def test_answers_about_documents_that_nothing_can_equal_are_refused_with_the_places_of_all_rows(
    tmp_path, truth
):
    rows = [
        {"question": f"{n}?", "document_content": "Ada did.", "ground_truth": truth if n % 2 else ["Ada", 3]}
        for n in range(4)
    ]
    table = with_interaction(jsonl(tmp_path / "a.jsonl", rows), None)
    message = refused(table)
    assert message.startswith(f"{table.path}: lines 2, 4: 2 rows have no ground truth")
    assert "every accepted answer about a document needs a word or a number" in message


def test_a_missing_truth_among_others_is_refused_where_something_gets_it_and_else_told(tmp_path):
    rows = [{"prompt": f"{n}?", "ground_truth": "5" if n in (2, 3) else None} for n in range(6)]
    table = with_interaction(jsonl(tmp_path / "a.jsonl", rows), None)
    data = read_data(table, instances=2)
    text = "4 of 6 rows have no ground truth, and the others have one"
    places = f"{table.path}: lines 1, 2, 5, 6"
    assert f"warning: train of {table.path}: {text} ({places})" in data.notes
    assert "ground_truth from ground_truth" in data.notes[1]
    assert refused(table, has_reward=True).startswith(
        f"{places}: {text}. It is read from ground_truth, reward"
    )
    quiz = with_interaction(table.path, "quiz")
    assert refused(quiz).startswith(f"{places}: {text}")
    # an interaction that needs a number needs it in every row
    assert refused(quiz, numbers=frozenset({"quiz"})).startswith(
        f"{places}: 4 rows have no ground truth that"
    )


def test_the_truth_that_the_interaction_gets_and_the_name_of_the_row_s_own_interaction_count(tmp_path):
    own = {"name": "gsm8k", "ground_truth": "Paris"}
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "?", "ground_truth": "5", "interaction_kwargs": own}])
    assert "line 1: the row has no ground truth" in refused(with_interaction(path, "quiz"))
    path.write_text(path.read_text().replace("gsm8k", "maths"))
    assert "the interaction 'maths' needs" in refused(with_interaction(path), numbers=frozenset({"maths"}))


OURS = "turnwise.Gsm8kInteraction"


@pytest.mark.parametrize(
    ("file", "numbers"),
    [
        # None: rows that name none get the only one
        (f'interaction:\n# - class_name: "mine.Gsm8kInteraction"\n- class_name: {OURS}', {"gsm8k", None}),
        (f'interaction:\n# - class_name: "{OURS}"\n- class_name: mine.OtherInteraction', set()),
        (f"interaction: [{{class_name: {OURS}, name: maths}}, {{class_name: mine.Gsm8k}}]", {"maths"}),
        (f"interaction: [{{class_name: {OURS}, name: gsm8k}}, {{class_name: mine.Own}}]", {"gsm8k"}),
        ("interaction: [", set()),
        ("- 1", set()),
        ("[" * 10_000, set()),
        (
            "interaction: [{class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction}]",
            {"gsm8k", None},
        ),
        (f'[[interaction]]\nclass_name = "{OURS}"', {"gsm8k", None}),
        ("interaction: [{class_name: mine.Gsm8kInteraction}]", set()),
    ],
)
def test_a_file_names_the_interactions_that_need_a_number_and_a_class_of_the_user_s_own_needs_none(
    tmp_path, file, numbers
):
    interactions = tmp_path / ("interactions.toml" if file.startswith("[[") else "interactions.yaml")
    interactions.write_text(file)
    assert number_interactions(interactions) == numbers
