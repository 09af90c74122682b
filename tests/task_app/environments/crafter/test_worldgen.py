"""Noise equals the package's to the last bit; that worlds equal stock's, `test_engine.py` sees."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import opensimplex
import pytest

from task_app.environments.crafter.noise import LAYERS, _layer_points, geometry, noise_layers


@pytest.mark.parametrize("seed", [0, 1234567, 2**31 - 2])
def test_every_layer_equals_the_opensimplex_package_to_the_last_bit(seed: int):
    simplex, layers = opensimplex.OpenSimplex(seed), noise_layers(seed)
    cells = np.random.default_rng(seed).choice(64 * 64, size=250, replace=False)
    for name in LAYERS:
        x_N, y_N, z_N = _layer_points(name)
        expected = [simplex.noise3(float(x_N[c]), float(y_N[c]), float(z_N[c])) for c in cells]
        assert layers[name][cells].tolist() == expected, name


def test_worlds_made_at_the_same_time_compute_the_geometry_once():
    geometry.cache_clear()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(noise_layers, range(8)))
    assert geometry.cache_info().misses == 1
