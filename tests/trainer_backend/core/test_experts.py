"""Experts as they cross from one process to another."""

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from trainer_backend.core.experts import UNKNOWN, ExpertColumns

COLUMNS = TypeAdapter(ExpertColumns)


@pytest.mark.parametrize("ids", [[[0, 3], [254, 1]], [[0, 300], [UNKNOWN, 2]]], ids=["a byte each", "two"])
def test_columns_come_out_of_json_as_they_went_in(ids: list[list[int]]):
    found = COLUMNS.validate_json(COLUMNS.dump_json(np.array(ids, np.uint16)))
    assert found.dtype == np.uint16 and found.tolist() == ids


@pytest.mark.parametrize(
    "data", ["AQI", "AQI=", "!"], ids=["no base64", "three numbers of two", "no text of it"]
)
def test_columns_that_are_no_whole_tokens_are_a_wrong_field(data: str):
    with pytest.raises(ValidationError, match="base64 of 3 numbers a token"):
        COLUMNS.validate_python({"first": 0, "per_token": 3, "number_bytes": 1, "data": data})
