"""Which line a message is about."""

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.jobs.posted import check, find_line, list_lines
from trainer_backend.jobs.settings import Bounds

TEXT = """\
# a job
[model]
preset = "tiny-0.3m"

[training]
iterations = 3
"group_size" = 4
rewards.step_rewards_mode = "off"  # deep

[ rollout . env_config ]
length = 100
[[more]]
x = 1
[sinks]
wandb = { project = "p" }
[long]
list = [  # [fake]
  ["]"],
  2,
] # end
text = '''
last = 1
'''
last = 2
"""


def test_keys_and_tables_stand_on_their_lines():
    assert list_lines(TEXT) == {
        "model": 2, "model.preset": 3, "training": 5, "training.iterations": 6, "training.group_size": 7,
        "training.rewards": 8, "training.rewards.step_rewards_mode": 8, "rollout": 10,
        "rollout.env_config": 10, "rollout.env_config.length": 11, "more": 12, "more.x": 13, "sinks": 14,
        "sinks.wandb": 15, "sinks.wandb.project": 15, "long": 16, "long.list": 17, "long.text": 21,
        "long.last": 24,
    }  # fmt: skip


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters='"\\.', exclude_categories=["Cc"]), min_size=1
)
VALUES = st.integers(-9, 9) | st.booleans() | st.text() | st.lists(st.text() | st.dates(), max_size=3)


@given(st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES, max_size=3), max_size=4), st.booleans())
def test_whatever_stands_in_values_the_keys_of_a_text_are_those_that_a_parser_has(document, multiline):
    text = tomli_w.dumps(document, multiline_strings=multiline)
    names = {name for name, value in document.items()}
    names |= {f"{name}.{key}" for name, value in document.items() if isinstance(value, dict) for key in value}
    lines, rows = list_lines(text), text.split("\n")
    assert lines.keys() == names
    for name, line in lines.items():
        row = rows[line - 1].strip("[").replace('"', "")
        assert row.startswith((name, name.partition(".")[2])), (name, line)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("training.iterations is 'x': not a number", 6),
        ("sinks.wandb.entity is not a key", 15),
        ("sinks.wandb.project is 'p'", 15),
        ("training.nothing is not a key; known: iterations", 5),
        ("data.path names a file outside", None),
        ("model: exactly one of 'preset', 'path' and 'name' must be given", 2),
    ],
)
def test_a_message_is_about_the_first_key_in_it_that_is_there(message, line):
    assert find_line(message, list_lines(TEXT)) == line


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[model]\npreset = "tiny-0.3m"\n', []),
        ("[model]\npreset = \n", [("error", 2, "not valid TOML")]),
        ('[model]\npreset = """\n\n', [("error", 3, "Unterminated string (at end of document)")]),
        ('[model]\npreset = "tiny-0.3"\n', [("error", 2, "model.preset")]),
        (
            '[model]\npreset = "tiny-0.3m"\n[training]\nitrations = 3\ngroup_sise = 2\n',
            [("error", 4, "Did you mean 'iterations'?"), ("error", 5, "Did you mean 'group_size'?")],
        ),
        ('[model]\npreset = "tiny-0.3m"\n[vllm]\nx = 1\n', [("warning", 3, "[vllm] is for other backends")]),
        (
            '[model]\npreset = "tiny-0.3m"\n[services]\ntask_url = "http://far:1"\n',
            [("error", 4, "--allow-task-url")],
        ),
        ("", [("error", None, "model is required")]),
    ],
)
def test_findings_of_a_job_with_their_lines(tmp_path, text, found):
    told = check(text.encode(), Bounds(data_dir=tmp_path))
    assert told.ok == all(severity == "warning" for severity, _, _ in found)
    assert [(one.severity, one.line) for one in told.findings] == [item[:2] for item in found]
    for one, (_, _, part) in zip(told.findings, found, strict=True):
        assert part in one.text
