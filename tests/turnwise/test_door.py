"""The import package `turnwise`: every name of it, without torch, and as type checkers see it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import turnwise

ROOT = Path(__file__).parents[2]
PUBLISHED = {
    "RLRolloutWorker", "AgentPolicy", "OpenAIAgentPolicy", "StepData", "TaskDefinitionModel",
    "BaseInteraction", "Gsm8kInteraction", "RolloutAllocationSchedule", "ConstantSchedule", "LinearSchedule",
    "ExponentialSchedule", "StepSchedule", "system_apply_gigpo_to_batch_steps", "reward_function",
}  # fmt: skip
# A process in which nothing of what only the extra `trainer` installs can be imported.
WITHOUT_THE_TRAINER = """
import sys
for name in ("torch", "transformers", "sqlalchemy", "pyarrow", "safetensors", "tokenizers"):
    sys.modules[name] = None
import turnwise
assert not {"shared_schemas", "task_app", "trainer_backend", "pydantic"} & sys.modules.keys()
for name in turnwise.__all__:
    assert getattr(turnwise, name).__name__ == name, name
"""


def test_what_the_sources_publish_is_there():
    assert set(turnwise.__all__) >= PUBLISHED
    assert dir(turnwise) == sorted(turnwise.__all__)


def test_the_door_alone_imports_nothing_of_ours_and_every_name_comes_without_what_only_training_needs():
    subprocess.run([sys.executable, "-c", WITHOUT_THE_TRAINER], cwd=ROOT, check=True)


def test_type_checkers_are_told_of_the_same_names_from_the_same_modules():
    tree = ast.parse(Path(turnwise.__file__).read_text(encoding="utf-8"))
    told = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module not in ("importlib", "typing")
        for alias in node.names
    }
    assert told == {name: module for module, names in turnwise._HOMES.items() for name in names}


def test_another_name_is_refused_as_any_module_refuses_it():
    with pytest.raises(AttributeError, match="module 'turnwise' has no attribute 'RolloutWorker'"):
        turnwise.RolloutWorker  # noqa: B018
