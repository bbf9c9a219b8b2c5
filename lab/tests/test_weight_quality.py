"""The measurement of what weights in 8 bits change."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from model_defs import load_model, make_mesh
from pensieve_jax import ConfigError
from pensieve_lab.kv_quality.texts import Text
from tests.launching import TINY_MODEL, load

program = load("measure_weight_quality")


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    random = np.random.default_rng(0)
    return [Text(random.integers(3, 256, length).astype(np.int32), length // 2) for length in (150, 160)]


def test_formats_are_not_mixed_up(texts: list[Text], monkeypatch: pytest.MonkeyPatch) -> None:
    """e4m3 has three bits of mantissa, int8 seven for the largest weights."""
    monkeypatch.setattr(program, "FLAGS", SimpleNamespace(seed=0))
    monkeypatch.setattr(program, "shows_progress", lambda: False)
    plain = load_model(TINY_MODEL, dtype="float32", mesh=make_mesh(1))
    others = program.models(TINY_MODEL, ["int8", "fp8"])
    assert list(others) == ["bfloat16", "int8", "fp8"]
    found = program.measure(plain, others, texts)
    assert 0 < 2 * found["int8"]["divergence"] < found["fp8"]["divergence"]
    for one in found.values():
        assert 0 < one["rms_difference"] < one["difference_p99"] < one["max_difference"]
        assert one["divergence"] < one["divergence_p99"]
    same = program.measure(plain, {"same": plain}, texts)["same"]
    assert (same["difference_p99"], same["divergence"], same["top_equal_percent"]) == (0, 0, 100)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"weights_dtype": "int4"}, "--weights_dtype is 'int4', but must be one or more of int8, fp8"),
        ({"context_tokens": 100_000}, "--context_tokens is 100000, but must be at most the model's"),
    ],
)
def test_refusals(launch, values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        launch("measure_weight_quality", shared_llm=False, **values)


@pytest.mark.long
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_answers_do_not_depend_on_the_pools(
    name: str, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "FLAGS", SimpleNamespace(model=TINY_MODEL))
    found = program.serve(name, texts)
    assert found["num_turns"] == 6 and found["num_different"] == 0 < found["recomputed_tokens"]
