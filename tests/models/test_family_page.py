"""docs/adding_a_model.md: its layer computes what Qwen3's does, and its rows are those of the code."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from model_defs import head_norms, load_config, load_model, make_mesh, preset, registry
from model_defs.families import qwen3, qwen3_moe
from model_defs.hf_config import parse_hf_config
from tests.launching import ROOT
from tests.models.helpers import GOLDEN, dense_logits
from tests.models.test_family_configs import QWEN3

PAGE = (ROOT / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
LAYER, RECIPE, ROW, KINDS, EXPERT_KINDS, NAMES = re.findall(
    r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
)
CONFIG = preset("qwen3-tiny")


def test_the_layer_of_the_page_computes_what_the_family_does(monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = np.arange(3, 40, dtype=np.int32)
    expected = dense_logits(load_model("random:qwen3-tiny", dtype="float32", mesh=make_mesh(1)), token_ids)
    names: dict[str, Any] = dict(vars(head_norms))
    exec(compile(LAYER, "adding_a_model.md", "exec"), names)
    assert names["HeadNormLayer"] is not qwen3.HeadNormLayer
    monkeypatch.setattr(qwen3, "HeadNormLayer", names["HeadNormLayer"])
    found = dense_logits(load_model("random:qwen3-tiny", dtype="float32", mesh=make_mesh(1)), token_ids)
    np.testing.assert_array_equal(found, expected)


def test_the_recipe_of_the_page_is_in_the_weight_map() -> None:
    layer = qwen3.FAMILY.weight_map(CONFIG).layer
    for name in ("q_norm", "k_norm"):
        (row,) = eval("{" + RECIPE + "}", {**vars(head_norms), "config": CONFIG, "name": name}).items()
        assert layer[row[0]] == row[1]


def test_the_kinds_of_the_page_are_those_of_the_family() -> None:
    types = ["full_attention", "sliding_attention"] * 18
    values = QWEN3 | {"use_sliding_window": True, "sliding_window": 9, "layer_types": types}
    names: dict[str, Any] = {**vars(qwen3), "values": values}
    exec(compile(KINDS, "adding_a_model.md", "exec"), names)
    assert names["kinds"] == parse_hf_config(values).layer_kinds


def test_the_experts_of_the_page_are_those_of_the_family() -> None:
    names: dict[str, Any] = dict(vars(qwen3_moe)) | {"dense": [1], "num_layers": 3}
    exec(compile(EXPERT_KINDS + NAMES, "adding_a_model.md", "exec"), names)
    assert names["kinds"] == load_config(GOLDEN / "qwen3_moe_raw").layer_kinds
    assert names["names"] == qwen3_moe._NAMES


def test_the_row_of_the_page_makes_the_table() -> None:
    names: dict[str, Any] = {"others": [one for one in registry.FAMILIES.values() if one is not qwen3.FAMILY]}
    exec(compile(ROW.replace("        ...\n", "        *others,\n"), "adding_a_model.md", "exec"), names)
    assert names["FAMILIES"] == registry.FAMILIES
