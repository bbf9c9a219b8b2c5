"""The code and sizes in docs/cells.md are right: its Python prints what the comments say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from model_defs.recurrent import LSTM, Mamba, Seq2Seq, TreeLSTM
from model_defs.recurrent.mamba_config import parse_mamba
from pensieve_jax.cellular import CellularConfig
from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.rows import num_rows_for
from tests.launching import ROOT

PAGE = (ROOT / "docs" / "cells.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def words(tmp_path: Path) -> None:
    """Save a torch module's LSTM, as the page has it."""
    rng, size, width = np.random.default_rng(0), 4, 3
    shapes = {
        "words.weight": (9, width),
        "rnn.weight_ih_l0": (4 * size, width),
        "rnn.weight_hh_l0": (4 * size, size),
        "rnn.bias_ih_l0": (4 * size,),
        "rnn.bias_hh_l0": (4 * size,),
    }
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "words.safetensors")


@pytest.mark.long
@pytest.mark.usefixtures("words")
def test_the_python_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, "cells.md", "exec"), names)
        said = capsys.readouterr().out.splitlines()
        assert said == re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE), block
    assert str(names["model"].config.dtype) == "bfloat16"
    assert (tmp_path / "words").is_dir()


def test_its_own_gru_takes_30_lines() -> None:
    (block,) = (one for one in BLOCKS if "class Gru" in one)
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 30


def test_sizes_of_rows() -> None:
    sizes = {"vocab_size": 10, "state_size": 16, "conv_kernel": 4, "model_type": "mamba"}
    models = {
        "LSTM": LSTM.random(hidden_size=1024, vocab_size=10, embedding_size=8),
        "TreeLSTM": TreeLSTM.random(hidden_size=1024, vocab_size=10, embedding_size=8),
        "Seq2Seq": Seq2Seq.random(hidden_size=1024, vocab_size=10),
        "130 million": Mamba(parse_mamba({**sizes, "hidden_size": 768, "num_hidden_layers": 24}, "float32")),
        "2.8 billion": Mamba(parse_mamba({**sizes, "hidden_size": 2560, "num_hidden_layers": 64}, "float32")),
    }
    section = PAGE.partition("## Sizes")[2].partition("\n## ")[0]
    for name, model in models.items():
        row_bytes = CellTypes(model.cells()).row_bytes
        (line,) = (one for one in section.splitlines() if one.startswith("| `") and name in one)
        num_rows = num_rows_for(CellularConfig().num_rows, row_bytes)
        shown = [int(cell.strip().replace(",", "")) for cell in line.strip("|").split("|")[-3:]]
        assert shown == [row_bytes, num_rows, round(row_bytes * (num_rows + 1) / 1e6)]
