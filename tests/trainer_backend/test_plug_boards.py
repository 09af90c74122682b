import subprocess
import sys

import pytest

from trainer_backend import plugins
from trainer_backend.errors import JobError
from trainer_backend.job.load import parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import table_model


def test_every_key_of_a_board_is_a_key_of_a_job_whose_default_is_on_it():
    for dotted, board in plugins.BOARDS.items():
        table, key = dotted.split(".")
        default = table_model(JobConfig.model_fields[table]).model_fields[key].default
        assert default is None or default in board


@pytest.mark.parametrize("key", plugins.BOARDS)
def test_a_job_with_a_name_that_no_board_has_is_refused_where_it_stands(key: str):
    table, name = key.split(".")
    document = {
        "model": {"path": "m"},
        table: {name: "none_of_them", **({"path": "m"} if table == "model" else {})},
    }
    if key == "model.preset":
        del document["model"]["path"]
    with pytest.raises(JobError, match=rf"^here: {key} is 'none_of_them'; known: "):
        parse_job(document, where="here")


def test_reading_the_plug_boards_imports_no_torch():
    code = "import sys, trainer_backend.plugins; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
