"""A name of a plug-in that another one has already: the refusal says who."""

from pathlib import Path

import pytest

from trainer_backend.errors import JobError
from trainer_backend.operator_plugins import _load_packages_once, load_packages, load_plugins

pytestmark = pytest.mark.usefixtures("own_boards")
HEAD = "from trainer_backend.operator_plugins import aggregation, estimator, loss, schedule\n"
MINE = HEAD + "@estimator('mine')\ndef mine(*_): return []\n"


def refusal(*codes: str, folder: Path) -> str:
    files = [folder / f"{name}.py" for name, _ in zip("ab", codes, strict=False)]
    for file, code in zip(files, codes, strict=True):
        file.write_text(code)
    with pytest.raises(JobError) as refused:
        load_packages()
        load_plugins(files)
    return str(refused.value).removeprefix(f"job.trainer_plugins, {files[-1]}: ")


@pytest.mark.parametrize(
    ("mark", "key"),
    [
        ("@estimator('gae')", "algorithm.advantage = 'gae'"),
        ("@loss('clipped')", "algorithm.loss = 'clipped'"),
        ("@aggregation('token_mean')", "training.aggregation = 'token_mean'"),
        ("@schedule('linear')", "rollout_allocation_schedule.type = 'linear'"),
    ],
)
def test_a_built_in_one_has_it(mark, key, tmp_path):
    code = f"{HEAD}{mark}\nclass Mine:\n    def get_policy_choice(self, step): return 'actor'\n"
    told = refusal(code, folder=tmp_path)
    assert told == f"{key} is there already (built in); choose another name"


def test_another_file_has_it_or_the_same_one_twice(tmp_path):
    sentence = "algorithm.advantage = 'mine' is there already (of {}); choose another name"
    assert refusal(MINE, MINE, folder=tmp_path) == sentence.format(tmp_path / "a.py")
    load_plugins([])
    twice = MINE + "@estimator('mine')\ndef again(*_): return []\n"
    assert refusal(twice, folder=tmp_path) == sentence.format(tmp_path / "a.py")


def test_a_package_has_it(tmp_path, monkeypatch):
    metadata = tmp_path / "of_names-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: of-names\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[turnwise.estimators]\nmine = of_names:mine\n")
    (tmp_path / "of_names.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    _load_packages_once.cache_clear()
    assert refusal(MINE, folder=tmp_path) == (
        "algorithm.advantage = 'mine' is there already (of of-names, entry point 'mine' of "
        "'turnwise.estimators'); choose another name"
    )
