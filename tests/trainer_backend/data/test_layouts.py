"""Files and folders: the same rows whatever holds them, and what cannot be read told by its place."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer_backend.data.folders import jsonl, parquet, saved, saved_dict
from trainer_backend.data.dataset import read_split
from trainer_backend.errors import DataError

TRAIN = [
    {
        "question": f"What is {n} + 1?",
        "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}",
        "extra_info": {"interaction_kwargs": {"name": "gsm8k", "hint": "think" if n else None}},
    }
    for n in range(7)
]
TEST = [{**row, "question": row["question"].replace("+", "plus")} for row in TRAIN[:3]]


def hub(folder: Path, inside: str = "data") -> Path:
    parquet(folder / inside / "train-00000-of-00002.parquet", TRAIN[:4])
    parquet(folder / inside / "train-00001-of-00002.parquet", TRAIN[4:])
    parquet(folder / inside / "test-00000-of-00001.parquet", TEST)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


def converted(folder: Path) -> Path:
    parquet(folder / "train" / "0000.parquet", TRAIN[:5])
    parquet(folder / "train" / "0001.parquet", TRAIN[5:])
    parquet(folder / "test" / "0000.parquet", TEST)
    return folder


LAYOUTS = {
    "jsonl": lambda folder: jsonl(folder / "sums.jsonl", TRAIN),
    "parquet": lambda folder: parquet(folder / "sums.parquet", TRAIN),
    "save_to_disk of a split": lambda folder: saved(folder / "saved", TRAIN, split="train"),
    "save_to_disk without a name": lambda folder: saved(folder / "saved", TRAIN, split=None),
    "save_to_disk of all": lambda folder: saved_dict(folder / "all", {"train": TRAIN, "test": TEST}),
    "hub": hub,
    "a configuration of the hub": lambda folder: hub(folder, inside="main") / "main",
    "the hub's conversion": converted,
    "jsonl by split": lambda folder: jsonl(folder / "train.jsonl", TRAIN).parent,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_rows_do_not_depend_on_what_holds_them(layout, tmp_path):
    expected = read_split(jsonl(tmp_path / "as-lines.jsonl", TRAIN), "train")
    found = read_split(layout(tmp_path / "set"), "train")
    assert found.rows == expected.rows
    assert found.used == expected.used


@pytest.mark.parametrize("name", ["save_to_disk of all", "hub", "the hub's conversion"])
def test_another_split_has_its_own_rows_and_one_that_is_not_there_is_told_with_those_that_are(name, tmp_path):
    folder = LAYOUTS[name](tmp_path / "set")
    found = read_split(folder, "test", by_position=True)
    assert [row.id for row in found.rows] == ["test/0", "test/1", "test/2"]
    with pytest.raises(DataError, match=r"has no split 'trian'\. Did you mean 'train'\? Known: test, train"):
        read_split(folder, "trian")


def refused(path: Path, split: str = "train") -> str:
    with pytest.raises(DataError) as found:
        read_split(path, split)
    return str(found.value)


def test_a_folder_of_configurations_asks_which_one_is_meant(tmp_path):
    hub(tmp_path, inside="main")
    hub(tmp_path, inside="socratic")
    told = refused(tmp_path)
    assert "holds several data sets (main, socratic)" in told
    assert f"Did you mean '{tmp_path / 'main'}'?" in told


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('{"question": "a"}\n{"question": "b"\n', "line 2: no JSON: Expecting ',' delimiter, in column 17"),
        ('{"question": "a"}\n\n["b"]\n', "line 3: a list; a row is a JSON object"),
        ('{"question": "a", "ground_truth": NaN}\n', "line 1: no JSON: NaN is no JSON"),
        ('{"question": "a", "question": "b"}\n', "line 1: no JSON: the key 'question' comes twice"),
        ('{"id": 1, "question": "a"}\n{"id": "1", "question": "b"}\n', "line 2: id '1' is also that of"),
        ('{"id": 1, "question": "a"}\n{"question": "b"}\n', "line 2: id comes from nowhere"),
        ('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "2"}\n', "from answer, but in"),
        ('{"question": "a \\ud83d b"}\n', "line 1: \\ud83d is half a character"),
        ("", "split 'train' has no rows"),
        ("\n \n", "split 'train' has no rows"),
        ("[" * 100_000 + "\n", "line 1: no JSON"),
    ],
)
def test_a_bad_line_is_told_with_its_number(lines, told, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines)
    assert told in refused(path)
    assert str(path) in refused(path)


def test_a_file_with_a_byte_order_mark_is_read_and_one_in_another_encoding_refused(tmp_path):
    marked, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    marked.write_text('{"question": "für"}\n', encoding="utf-8-sig")
    assert read_split(marked, "train").rows[0].prompt == "für"
    other.write_text('{"question": "fur"}\n{"question": "für"}\n', encoding="latin-1")
    told = f"{other}: line 2: column 16 is no UTF-8"
    assert refused(other).startswith(told)


def test_files_that_are_not_what_their_names_say_are_refused(tmp_path):
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_text("no such thing")
        assert f"cannot be read as {name[2:]}" in refused(tmp_path / name)
    (tmp_path / "a.csv").write_text("question\n2+2?\n")
    assert "its name ends in '.csv'; known: .jsonl, .parquet, .arrow" in refused(tmp_path / "a.csv")
    assert f"no such file or folder. Did you mean '{tmp_path / 'a.csv'}'?" in refused(tmp_path / "a.cvs")
    assert "no such file or folder" in refused(tmp_path / "nowhere" / "a.jsonl")


def test_a_file_with_one_name_for_two_columns_is_refused(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["question", "question"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "has 2 columns 'question'; each has its own name" in refused(tmp_path / "a.parquet")


def test_a_bad_row_of_a_parquet_file_is_told_with_its_number(tmp_path):
    path = parquet(tmp_path / "a.parquet", [{"question": "a"}, {"question": "b"}, {"question": ""}])
    assert f"{path}: row 2: question is '' (str)" in refused(path)
    numbers = parquet(tmp_path / "b.parquet", [{"question": "a", "ground_truth": float("nan")}])
    assert "row 0: ground_truth is nan (float)" in refused(numbers)


def test_folders_that_hold_nothing_to_read_are_refused(tmp_path):
    assert "holds no data" in refused(tmp_path)
    jsonl(tmp_path / "train.jsonl", TRAIN)
    parquet(tmp_path / "train.parquet", TRAIN)
    assert "split 'train' is there as .jsonl and as .parquet; keep one" in refused(tmp_path)


def test_a_saved_folder_that_is_incomplete_is_told_by_the_file_that_is_missing(tmp_path):
    folder = saved_dict(tmp_path / "all", {"train": TRAIN})
    state = folder / "train" / "state.json"
    document = json.loads(state.read_text())
    state.write_text(json.dumps({**document, "_data_files": [{"filename": "gone.arrow"}]}))
    assert "gone.arrow: cannot be read as arrow" in refused(folder)
    for outside in ("../../x.arrow", "/etc/passwd", "..", "", 3, "a\0"):
        state.write_text(json.dumps({**document, "_data_files": [{"filename": outside}]}))
        assert "which is no name of a file in its folder" in refused(folder)
    state.write_text(json.dumps({**document, "_data_files": ["gone.arrow"]}))
    assert "has no list `_data_files`" in refused(folder)
    state.write_text(json.dumps({**document, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    assert "picks rows by an index of its own" in refused(folder)
    state.write_text("[]")
    assert "is a list; it is a JSON object" in refused(folder)
    state.unlink()
    assert "state.json: is missing" in refused(folder)
    (folder / "dataset_dict.json").write_text('{"splits": ["../train"]}')
    assert "names '../train' (str), which is no name" in refused(folder)
    (folder / "dataset_dict.json").write_text('{"splits": "train"}')
    assert "has no list `splits`" in refused(folder)


def test_a_stream_that_breaks_off_is_refused(tmp_path):
    folder = saved(tmp_path / "saved", TRAIN, split="train", shards=1)
    file = folder / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:700])
    assert "cannot be read as arrow" in refused(folder)
