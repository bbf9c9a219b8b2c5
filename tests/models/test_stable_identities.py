"""Identities that stored data refers to: fingerprints, digests, random weights.

A history belongs to a model by its fingerprint, and results name a preset and a seed. None of these may
change for an existing model, whatever is added to `ModelConfig`.
"""

import hashlib
from typing import Any

import numpy as np
import pytest

from model_defs import (
    LayerKind,
    RopeConfig,
    load_config,
    load_model,
    make_mesh,
    model_fingerprint,
    preset,
    weights_digest,
)
from model_defs.parameters import named_parameters
from tests.models.helpers import GOLDEN

PRESET_FINGERPRINTS = {
    "opt-125m": "opt-12x768-df6c5a763ce54848",
    "opt-13b": "opt-40x5120-92e61b60993c495a",
    "opt-66b": "opt-64x9216-d377c389d6251255",
    "llama2-13b": "llama-40x5120-bedda631e7a34acc",
    "llama2-13b-gqa10": "llama-40x5120-3af0c28c5b4e5990",
    "llama2-70b": "llama-80x8192-d29ca683c18265fe",
    "llama3-8b": "llama-32x4096-d569284a95140ea9",
    "opt-tiny": "opt-2x64-46a53f6c35abc236",
    "llama-tiny": "llama-2x64-59477103b7587db6",
}
DIRECTORY_FINGERPRINTS = {
    "llama3_tied": ("llama-2x24-23d1296e05875554", "a4ba556fd2ec0f32"),
    "llama_default": ("llama-2x24-40c6aea40316d4b0", "c1de779005d4c195"),
    "llama_gqa_linear": ("llama-2x24-ee5a63364450d366", "0948684489de4224"),
    "llama_yarn": ("llama-2x24-165ff701fa77998b", "6460753298a02643"),
    "opt_post_norm": ("opt-2x24-5f32ce1bbe96f018", "57d907a15a02a3e6"),
    "opt_pre_norm": ("opt-2x24-aeb67b3a61328600", "e56f945b2a42c0dc"),
}
# First and last element of some parameters with seed 3.
RANDOM_VALUES = {
    "llama-tiny": {
        "embed.table": (-3.823744535446167, -1.1048579216003418),
        "layers.1.qkv.proj.kernel": (-0.27198898792266846, 0.14013998210430145),
        "layers.0.mlp.gate_up.kernel": (0.16706569492816925, -0.6317147016525269),
        "layers.1.out.kernel": (-0.11884700506925583, -0.145113006234169),
        "head.table": (-0.35636427998542786, -0.23914353549480438),
    },
    "opt-tiny": {
        "embed.table": (-0.5735616683959961, -0.16572870314121246),
        "position_table": (-0.1917949914932251, 0.02075052075088024),
        "layers.1.fc1.bias": (-0.517676830291748, -0.4322015941143036),
    },
}
PARAMETER_NAMES = {"llama-tiny": "e973407a0510", "opt-tiny": "24f2ec6c0d51"}


@pytest.mark.parametrize("name", PRESET_FINGERPRINTS)
def test_presets_keep_their_fingerprints(name: str) -> None:
    assert model_fingerprint(preset(name), f"random:{name}", seed=3) == PRESET_FINGERPRINTS[name]
    assert weights_digest(f"random:{name}", seed=3) == f"random:{name}#3"


def test_what_layers_do_enters_the_fingerprint() -> None:
    """Plain kinds do not, however they are written."""
    name = "qwen3-tiny"
    windowed = (LayerKind(window=32), LayerKind())
    changes: list[dict[str, Any]] = [
        {},
        {"layer_kinds": windowed},
        {"layer_kinds": windowed[::-1]},
        {"layer_kinds": (LayerKind(window=33), LayerKind())},
        {"layer_kinds": (LayerKind(rope=None), LayerKind())},
        {"attention_scale": 0.125},
        {"attention_softcap": 50.0},
        {"has_sinks": True},
        {"ropes": (RopeConfig(), RopeConfig(theta=1e6))},
        {"ropes": (RopeConfig(theta=1e6), RopeConfig())},
        {
            "ropes": (RopeConfig(), RopeConfig(theta=1e6)),
            "layer_kinds": (LayerKind(rope=1), LayerKind()),
        },
    ]
    found = [model_fingerprint(preset(name, **change), f"random:{name}") for change in changes]
    assert len(set(found)) == len(found)
    plain = preset(name, layer_kinds=(LayerKind(),) * 2)
    assert plain == preset(name) and model_fingerprint(plain, f"random:{name}") == found[0]
    shorter = preset(name, layer_kinds=windowed, max_position_embeddings=33)
    assert model_fingerprint(shorter, f"random:{name}") == found[1], "the served context does not count"


def test_a_window_that_covers_the_context_does_not_enter_the_fingerprint() -> None:
    """Histories of such contexts are older than windows."""
    name = "qwen3-tiny"
    for kinds in ((LayerKind(window=32),) * 2, (LayerKind(window=40), LayerKind())):
        covered = preset(name, layer_kinds=kinds, max_position_embeddings=32)
        assert model_fingerprint(covered, f"random:{name}") == model_fingerprint(
            preset(name), f"random:{name}"
        )
    some = preset(name, layer_kinds=(LayerKind(window=16), LayerKind(window=32)), max_position_embeddings=32)
    longer = preset(name, layer_kinds=(LayerKind(window=16), LayerKind()))
    assert model_fingerprint(some, f"random:{name}") == model_fingerprint(longer, f"random:{name}")


@pytest.mark.parametrize("variant", DIRECTORY_FINGERPRINTS)
def test_checkpoints_keep_their_fingerprints(variant: str) -> None:
    directory = GOLDEN / variant
    fingerprint, digest = DIRECTORY_FINGERPRINTS[variant]
    assert model_fingerprint(load_config(directory), directory) == fingerprint
    assert weights_digest(directory).startswith(digest)


@pytest.mark.parametrize("name", RANDOM_VALUES)
def test_random_weights_do_not_change(name: str) -> None:
    """They are equal up to the last bits, in which math libraries may differ."""
    parameters = dict(named_parameters(load_model(f"random:{name}", mesh=make_mesh(1), seed=3)))
    for key, expected in RANDOM_VALUES[name].items():
        values = np.asarray(parameters[key].get_value()).ravel()
        np.testing.assert_allclose(values[[0, -1]], expected, rtol=1e-6, err_msg=key)
    names = hashlib.sha256(" ".join(sorted(parameters)).encode()).hexdigest()
    assert names.startswith(PARAMETER_NAMES[name]), sorted(parameters)
