"""The benchmark of experts: its cases, bounds and tiles, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from model_defs import ExpertsConfig
from pensieve_jax import ConfigError
from tests.launching import load

benchmark = load("benchmark_experts")
QWEN, MIXTRAL = (benchmark.cases([name], (1, 128, 2048)) for name in ("qwen3-30b-a3b", "mixtral-8x7b"))


def test_bounds():
    """Small batches read weights, large ones multiply."""
    weights = 3 * 2048 * 768 * 2
    assert QWEN[0].bound_s(8) == 8 * weights / benchmark.READ_BYTES_PER_S
    assert QWEN[1].bound_s(128) == 128 * weights / benchmark.READ_BYTES_PER_S
    assert MIXTRAL[2].bound_s(8) == 2 * 2048 * 2 * 3 * 4096 * 14336 / benchmark.FLOP_PER_S


@pytest.mark.parametrize("case", [*QWEN, *MIXTRAL])
def test_what_is_tried(case):
    """The default comes first; all tiles fit and have different labels."""
    assert list(benchmark.variants(case, sweep=False)) == [case.default]
    tried = list(benchmark.variants(case, sweep=True))
    assert tried[0] == case.default and len(tried) > 2
    assert len({benchmark.label(products) for products in tried}) == len(tried)
    for gate_up, down in tried:
        assert gate_up.fits(gated=True) and down.fits(gated=False) and gate_up.rows == down.rows


def test_a_table_row():
    one = {"model": "m", "tokens": 1, "experts_read": 8.0, "tiles": "8", "is_default": True, "is_right": True}
    one |= {"us": 40.0, "products_us": 30.0, "bound_us": 20.0}
    wrong = one | {"is_right": False}
    assert benchmark.rows([one, wrong]) == [["m", 1, "8.0", "8 (default)", "40.0", "30.0", "20.0", "50"]]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"models": "llama-tiny"},
            "--models is 'llama-tiny', but must be presets with experts: qwen3-30b-a3b",
        ),
        ({"models": "gpt"}, "--models is 'gpt'"),
        ({"tokens": "0"}, "--tokens is '0', but must be integers from 1 to 65536"),
        ({}, "device is 'cpu', but must be one that the kernel runs on"),
    ],
)
def test_refusals(launch, flags, says):
    with pytest.raises(ConfigError, match=says):
        launch("benchmark_experts", shared_llm=False, **flags)


def test_a_kernel_that_cannot_run_is_named(capsys):
    case = benchmark.Case("tiny", 128, ExpertsConfig(4, 2, 64), 3)
    with ThreadPoolExecutor(1) as pool:
        (found,) = benchmark.measure(case, pool, sweep=False)
    assert not found["is_right"] and "interpret" in found["error"] and found["tiles"].startswith("8 swapped")
    assert "'model': 'tiny'" in capsys.readouterr().out
