"""Weights: drawn, imported from torch, saved and loaded again, and the errors of unfitting ones."""

import re
import shutil

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from model_defs import CheckpointError, UnsupportedModelError, load_model, make_mesh
from model_defs.parameters import named_parameters
from model_defs.recurrent import LSTM, Mamba, Seq2Seq, TreeLSTM
from model_defs.recurrent.model import _digest
from tests.models.recurrent.literal import golden, random_weights, tree_shapes

MODELS = {
    "lstm": lambda seed, dtype: LSTM.random(hidden_size=8, vocab_size=12, seed=seed, dtype=dtype),
    "seq2seq": lambda seed, dtype: Seq2Seq.random(hidden_size=8, vocab_size=12, seed=seed, dtype=dtype),
    "tree": lambda seed, dtype: TreeLSTM.random(
        hidden_size=8, vocab_size=12, num_classes=3, seed=seed, dtype=dtype
    ),
    "mamba": lambda seed, dtype: Mamba.random(
        hidden_size=32, vocab_size=12, num_layers=2, seed=seed, dtype=dtype
    ),
}
LSTM_WEIGHTS, _ = golden("lstm.npz")


def values(model) -> dict[str, np.ndarray]:
    return {name: np.asarray(one.get_value(), np.float32) for name, one in named_parameters(model)}


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_determines_the_model(name):
    one, same, other = (values(MODELS[name](seed, "float32")) for seed in (1, 1, 2))
    drawn = [key for key in one if (one[key] != other[key]).any()]
    assert all((one[key] == same[key]).all() for key in one)
    assert len(drawn) >= 3 and all(np.isfinite(array).all() for array in one.values())


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name, tmp_path):
    model = MODELS[name](3, "float32")
    model.save(tmp_path / "model")
    again = type(model).load(tmp_path / "model")
    assert again.config == model.config
    expected = values(model)
    for key, found in values(again).items():
        np.testing.assert_array_equal(found, expected[key])
    smaller = type(model).load(tmp_path / "model", dtype="bfloat16")
    assert smaller.config.dtype == "bfloat16"
    for key, found in values(smaller).items():
        np.testing.assert_allclose(found, expected[key], rtol=2**-8)


def test_a_save_of_another_kind_is_refused(tmp_path):
    MODELS["lstm"](0, "float32").save(tmp_path / "model")
    with pytest.raises(CheckpointError, match="already holds a saved model"):
        MODELS["lstm"](0, "float32").save(tmp_path / "model")
    with pytest.raises(CheckpointError, match="holds a model of 'lstm', not of 'tree_lstm'"):
        TreeLSTM.load(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="not a model config of this version"):
        load_model(tmp_path / "model", mesh=make_mesh(1))
    with pytest.raises(UnsupportedModelError, match="dtype='int8' is not one of"):
        LSTM.load(tmp_path / "model", dtype="int8")
    with pytest.raises(CheckpointError, match=r"no model_config.json in .*nowhere"):
        LSTM.load(tmp_path / "nowhere")
    shutil.rmtree(tmp_path / "model" / "params")
    with pytest.raises(CheckpointError, match="is missing"):
        LSTM.load(tmp_path / "model")


def test_values_under_other_names_are_another_model():
    """The digest that is saved with weights covers names, too."""
    (_, parameter), *_ = named_parameters(LSTM.random(hidden_size=8, vocab_size=12))
    assert _digest(nnx.Dict(one=parameter)) == _digest(nnx.Dict(one=parameter))
    assert _digest(nnx.Dict(one=parameter)) != _digest(nnx.Dict(other=parameter))


def test_invalid_sizes_are_refused():
    with pytest.raises(UnsupportedModelError, match="hidden_size=0 must be an int of at least 1"):
        LSTM.random(hidden_size=0, vocab_size=4, embedding_size=2)
    with pytest.raises(UnsupportedModelError, match=r"vocab_size=4\.5 must be an int of at least 1"):
        LSTM.random(hidden_size=4, vocab_size=4.5)
    with pytest.raises(UnsupportedModelError, match="dtype='int8' is not one of"):
        LSTM.random(hidden_size=4, vocab_size=4, dtype="int8")


def test_a_safetensors_file_is_its_state_dict(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(dict(LSTM_WEIGHTS), path)
    expected = values(LSTM.from_torch(LSTM_WEIGHTS))
    for source in (path, str(path), tmp_path):
        for name, found in values(LSTM.from_torch(source)).items():
            np.testing.assert_array_equal(found, expected[name])
    with pytest.raises(CheckpointError, match="neither a file nor a directory"):
        LSTM.from_torch(tmp_path / "other.safetensors")


def test_other_names_of_modules():
    renamed = {
        name.replace("embedding.", "words.").replace("lstm.", "net.rnn."): one
        for name, one in LSTM_WEIGHTS.items()
    }
    found = values(LSTM.from_torch(renamed, embedding="words", lstm="net.rnn"))
    expected = values(LSTM.from_torch(LSTM_WEIGHTS))
    assert all((found[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding.weight": None}, "tensor 'embedding.weight' is missing; there are 'lstm.bias_hh_l0'"),
        ({"lstm.bias_ih_l0": None}, "1 tensor(s) are missing: 'lstm.bias_ih_l0'"),
        ({"embedding.weight": np.zeros(24)}, "'embedding.weight' has shape [24], 2 dimensions are expected"),
        (
            {"lstm.weight_ih_l0": np.zeros((64, 11))},
            "'lstm.weight_ih_l0' has shape [64, 11], expected [64, 12]",
        ),
        (
            {"lstm.weight_ih_l1": np.zeros((64, 16))},
            "1 tensor(s) are not part of this model: 'lstm.weight_ih_l1'",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes, message):
    weights = {name: one for name, one in (dict(LSTM_WEIGHTS) | changes).items() if one is not None}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        LSTM.from_torch(weights)


def test_a_tensor_on_another_device_is_refused():
    """Torch refuses to make an array of a tensor on a GPU."""

    class Elsewhere:
        shape = (64,)

        def __array__(self, *args, **kwargs):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    with pytest.raises(
        CheckpointError, match=r"tensor 'lstm.bias_ih_l0' is not an array in host memory: can't"
    ):
        LSTM.from_torch(dict(LSTM_WEIGHTS) | {"lstm.bias_ih_l0": Elsewhere()})


def test_a_tree_without_a_classifier():
    shapes = {name: shape for name, shape in tree_shapes(9, 4, 6, 3).items() if "linear" not in name}
    assert TreeLSTM.from_torch(random_weights(0, shapes, 1.0)).config.num_classes == 0
