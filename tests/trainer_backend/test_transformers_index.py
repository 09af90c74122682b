"""The index of transformers' models is read from its files once, and again when they have changed."""

from functools import partial

from transformers.utils import import_utils

from trainer_backend.transformers_index import _index_of

INDEX = {frozenset(): {"a.configuration_a": {"AConfig"}}, frozenset({"torch"}): {"a.modeling_a": {"A", "B"}}}


def test_it_is_made_once_and_again_when_a_models_folder_has_changed(tmp_path):
    (tmp_path / "models" / "a").mkdir(parents=True)
    made = []

    def make(place, prefix=None):
        made.append(place)
        return INDEX

    models, cache = tmp_path / "models", tmp_path / "cache"
    index = partial(_index_of, make, models, cache)
    assert index(models) == index(str(models / "__init__.py")) == INDEX and made == [models]
    assert index(models, "models")[frozenset({"torch"})] == {"models.a.modeling_a": {"A", "B"}}
    index(models)[frozenset()].clear()
    assert index(models) == INDEX, "each caller has its own"
    (models / "a" / "modeling_a.py").touch()
    assert index(models) == INDEX and made == [models] * 2
    for file in cache.iterdir():
        file.write_text('["no index"]')
    assert index(models) == INDEX and len(made) == 3
    assert index(models / "a") == INDEX and made[3:] == [models / "a"], "one model's own is not kept"


def test_without_a_folder_that_can_be_written_it_is_made_each_time(tmp_path):
    (tmp_path / "cache").touch()
    (tmp_path / "models").mkdir()
    assert (
        _index_of(lambda place: INDEX, tmp_path / "models", tmp_path / "cache", tmp_path / "models") == INDEX
    )


def test_the_kept_one_is_that_of_transformers():
    kept = import_utils.define_import_structure
    make, models, _ = kept.args
    assert kept(models) == make(models) and kept.func is _index_of
