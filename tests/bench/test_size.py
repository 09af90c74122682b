"""What `make size` counts in a tree small enough to count by hand."""

from bench.size import measure, table

CALLER = '''"""Says what it is."""

from task_app.small import CONSTANT


def run(numbers):  # read by nobody
    """Doc."""

    return helper(numbers) + CONSTANT


def helper(numbers):
    # a comment
    return sum(numbers)
'''
TREE = {"task_app/caller.py": CALLER, "task_app/small.py": "CONSTANT = 1\n", "docs/a.md": "# A\n\nText\n"}


def test_code_leaves_out_blank_lines_comments_and_docstrings():
    assert measure(TREE).rows["task_app"] == {
        "files": 2, "lines": 15, "code": 6, "functions": 2, "classes": 0, "inline": 1, "one-reader": 1,
    }  # fmt: skip


def test_the_candidates_are_named():
    found = measure(TREE)
    assert found.inline == ["task_app/caller.py: helper"]
    assert found.one_reader == ["task_app/small.py: read by task_app/caller.py"]


def test_a_difference_stands_next_to_its_number():
    changed = {**TREE, "task_app/rollouts/new.py": "class A: ...\n"}
    lines = [line.split() for line in table(measure(changed), measure(TREE))]
    assert ["task_app/rollouts", "1", "+1", "1", "+1", "1", "+1", "1", "+1", "0", "0", "0"] in lines
    assert lines[-1][:4] == ["all", "4", "+1", "19"]
