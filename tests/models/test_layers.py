"""Activations against their formulas in float64; the golden logits test the layers together."""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from model_defs.config import ACTIVATIONS
from model_defs.layers import activation

FORMULAS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


def test_every_activation_has_a_formula() -> None:
    """The gate of "geglu_tanh" is "gelu_tanh"."""
    assert {"gelu_tanh" if name == "geglu_tanh" else name for name in ACTIVATIONS} == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_activation(name: str) -> None:
    """Compares where the two kinds of gelu differ most, by 5e-4, and elsewhere."""
    values = [-4.0, -2.3, -1.0, -0.1, 0.0, 0.1, 1.0, 2.3, 4.0]
    expected = [FORMULAS[name](value) for value in values]
    np.testing.assert_allclose(activation(name)(jnp.array(values)), expected, rtol=1e-5, atol=2e-6)
