"""Which line a message is about."""

import pytest

from trainer_backend.api.checking import checked
from trainer_backend.api.settings import Bounds
from trainer_backend.api.toml_lines import line_of, lines_of

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
"""


def test_keys_and_tables_stand_on_their_lines():
    assert lines_of(TEXT) == {
        "model": 2, "model.preset": 3, "training": 5, "training.iterations": 6, "training.group_size": 7,
        "training.rewards.step_rewards_mode": 8, "rollout.env_config": 10, "rollout.env_config.length": 11,
        "more": 12, "more.x": 13, "sinks": 14, "sinks.wandb": 15,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("training.iterations is 'x': not a number", 6),
        ("sinks.wandb.entity is not a key", 15),
        ("training.nothing is not a key; known: iterations", 5),
        ("data.path names a file outside", None),
        ("not valid TOML: Expected '=' after a key (at line 4, column 9)", 4),
        ("not valid TOML: Unterminated string (at end of document)", 15),
        ("model: exactly one of 'preset', 'path' and 'name' must be given", 2),
    ],
)
def test_a_message_is_about_the_first_key_in_it_that_is_there(message, line):
    assert line_of(message, lines_of(TEXT), TEXT) == line


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[model]\npreset = "tiny-0.3m"\n', []),
        ("[model]\npreset = \n", [("error", 2, "not valid TOML")]),
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
    told = checked(text, Bounds(data_dir=tmp_path))
    assert told.ok == all(severity == "warning" for severity, _, _ in found)
    assert [(one.severity, one.line) for one in told.findings] == [item[:2] for item in found]
    for one, (_, _, part) in zip(told.findings, found, strict=True):
        assert part in one.text
