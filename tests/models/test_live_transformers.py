"""The golden comparison with models built on the spot; run by hand, as docs/adding_a_model.md says.

Neither torch nor transformers is a dependency, so continuous integration skips it.
"""

import importlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from model_defs import load_model, make_mesh
from tests.models.helpers import VARIANTS, dense_logits

_GOLDEN = "scripts.dev.make_golden_logits"
# Before the skip, so that a moved program shows on machines without torch.
assert importlib.util.find_spec(_GOLDEN) is not None, f"{_GOLDEN} has moved"
pytest.importorskip("torch", reason="torch is not installed: no live comparison", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)


@pytest.mark.filterwarnings("default")  # warnings of these libraries are not ours to fix
@pytest.mark.parametrize("variant_name", VARIANTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_logits_equal_transformers(variant_name: str, seed: int, tmp_path: Path) -> None:
    make_golden_logits = importlib.import_module(_GOLDEN)

    variant = make_golden_logits.VARIANTS[variant_name]
    reference = make_golden_logits.build(variant, seed)
    token_ids = np.random.default_rng(seed).integers(0, 64, 45)
    expected = make_golden_logits.logits_of(reference, token_ids)
    make_golden_logits.save(reference, variant, tmp_path)
    model = load_model(tmp_path, dtype="float32", mesh=make_mesh(1))
    np.testing.assert_allclose(dense_logits(model, token_ids.astype(np.int32)), expected, atol=1e-4, rtol=0)
