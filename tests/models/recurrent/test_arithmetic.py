"""The matmuls that a cell runs on a device, and their precision."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from model_defs.recurrent import LSTM, Mamba, Seq2Seq, TreeLSTM

BATCH = 7
HIDDEN, VOCAB_SIZE = 16, 20


def models(dtype: str) -> list:
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB_SIZE, "dtype": dtype}
    return [
        LSTM.random(**sizes),
        Seq2Seq.random(**sizes),
        TreeLSTM.random(**sizes),
        Mamba.random(num_layers=2, **sizes),
    ]


def matmuls(module) -> list:
    """Return the equations of a step, including those in loops."""
    state, has_inputs = module.state, getattr(module, "inputs", None)
    num_inputs = 1 if has_inputs is None else len(has_inputs)
    inputs = tuple(
        {name: jax.ShapeDtypeStruct((BATCH, *one.shape), one.dtype) for name, one in state.items()}
        for _ in range(num_inputs)
    )
    immediates = [jax.ShapeDtypeStruct((BATCH,), jnp.int32) for _ in getattr(module, "immediates", ())]
    todo, found = [jax.make_jaxpr(module)(inputs, *immediates).jaxpr], []
    while todo:
        for equation in todo.pop().eqns:
            found += [equation] if equation.primitive is lax.dot_general_p else []
            todo += [inner.jaxpr for inner in equation.params.values() if hasattr(inner, "jaxpr")]
    return found


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", lax.Precision.HIGHEST), ("bfloat16", lax.Precision.DEFAULT)]
)
def test_float32_is_float32_and_below_it_is_fast(dtype, precision):
    for model in models(dtype):
        for cell in model.cells():
            for one in matmuls(cell.module):
                assert {str(value.aval.dtype) for value in one.invars} == {dtype}
                assert set(one.params["precision"]) == {precision}
                assert one.outvars[0].aval.dtype == jnp.float32


def test_both_inputs_share_one_matmul():
    """It is [b, 2h] with [2h, 4h], as in the thesis (section 2.2.2); a decoder scores words as well."""
    lstm, seq2seq, tree, mamba = models("float32")
    assert len(matmuls(mamba)) == 5  # four per layer, however many layers there are, and the head's
    shapes = [
        [tuple(value.aval.shape for value in one.invars) for one in matmuls(module)]
        for module in (lstm, seq2seq.encoder, seq2seq.decoder, tree.leaf, tree.inner)
    ]
    step = ((BATCH, 2 * HIDDEN), (2 * HIDDEN, 4 * HIDDEN))
    assert shapes == [
        [step],
        [step],
        [step, ((BATCH, HIDDEN), (HIDDEN, VOCAB_SIZE))],
        [((BATCH, HIDDEN), (HIDDEN, 3 * HIDDEN))],
        [((BATCH, 2 * HIDDEN), (2 * HIDDEN, 5 * HIDDEN))],
    ]
