"""Bugs planted in the decoders; the weights of the formats' own libraries detect each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest

from model_defs import safetensors_reader
from model_defs.quantized import awq, gptq, mxfp4, packed, scaled_codes
from tests.models.quantized.test_golden_weights import source_of, test_weights_are_those_of_the_library

Bug = Callable[[pytest.MonkeyPatch], None]


def changed(module: ModuleType, name: str, old: str, new: str) -> Bug:
    """Return a bug that replaces a text in the class or function `name` of a module."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        sound = getattr(module, name)
        text = inspect.getsource(sound)
        assert old in text, f"the bug is out of date: {old!r} is not in {name}"
        names = dict(vars(module))
        exec(compile(text.replace(old, new, 1), module.__name__, "exec"), names)
        if not isinstance(sound, type):
            monkeypatch.setattr(module, name, names[name])
            return
        for method in ("__call__", "_spread"):  # in place, since other modules import the class
            if method in vars(sound):
                monkeypatch.setattr(sound, method, vars(names[name])[method])

    return plant


def e4m3_as(dtype: type) -> Bug:
    """Return a bug that reads codes of e4m3 as another format of eight bits."""
    return lambda monkeypatch: monkeypatch.setitem(safetensors_reader._DTYPES, "F8_E4M3", np.dtype(dtype))


def reversed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the nibble of each channel for the channel of each nibble."""
    monkeypatch.setattr(awq, "_NIBBLE_OF_CHANNEL", np.argsort(awq._NIBBLE_OF_CHANNEL))


GPTQ, PACKED, SCALED = (gptq, "GptqDecoder"), (packed, "PackedDecoder"), (scaled_codes, "ScaledCodes")
BUGS: dict[str, tuple[Bug, str]] = {
    "AWQ order reversed": (reversed_order, "awq"),
    "AWQ order left out": (changed(awq, "_channels", "[:, :, _NIBBLE_OF_CHANNEL]", ""), "awq"),
    "GPTQ plus one left out": (changed(*GPTQ, "(zeros + 1)", "zeros"), "gptq_int4"),
    "GPTQ plus one left out, 8 bits": (changed(*GPTQ, "(zeros + 1)", "zeros"), "gptq_int8"),
    "GPTQ plus one in version 2": (changed(*GPTQ, "if not self.is_v2:", "if True:"), "gptq_v2"),
    "GPTQ plus one without wrap": (changed(*GPTQ, " & (2**self.bits - 1)", ""), "gptq_int4_wraps"),
    "GPTQ order left out": (changed(*GPTQ, "if g_idx is not None:", "if False:"), "gptq_int4_act_order"),
    "GPTQ scales out of order": (
        changed(*GPTQ, "scales[g_idx]", "scales[g_idx[::-1]]"),
        "gptq_int4_act_order",
    ),
    "zero points packed along the wrong axis": (
        changed(*PACKED, "self.bits, 0)", "self.bits, 1).reshape(num_out, -1)"),
        "pack_int4_group_zeros",
    ),
    "codes without offset": (changed(*PACKED, "[:, :num_in] - offset", "[:, :num_in]"), "pack_int4_group"),
    "zero points left out": (changed(*PACKED, "if self.has_zeros", "if False"), "pack_int8_group_zeros"),
    "groups out of order": (
        changed(*PACKED, "values[:, index]", "values[:, index[::-1]]"),
        "pack_int4_g_idx",
    ),
    "scale of a cut block": (
        changed(*SCALED, "spread(values, self.block[axis]", "spread(values, -(-shape[axis] // grid[axis])"),
        "fp8_block_cut",
    ),
    "blocks transposed": (changed(*SCALED, "reshape(grid)", "reshape(grid[::-1]).T"), "fp8_block"),
    "scale applied twice": (changed(*SCALED, "return scaled(", "return wide * scaled("), "float_channel"),
    "e4m3 as e4m3fnuz": (e4m3_as(ml_dtypes.float8_e4m3fnuz), "fp8_block"),
    "e4m3 as e5m2": (e4m3_as(ml_dtypes.float8_e5m2), "float_tensor"),
    "powers of two as numbers": (changed(*SCALED, "if self.are_powers:", "if False:"), "fp8_block_powers"),
    "high half first": (
        changed(mxfp4, "Mxfp4Decoder", "[blocks & 15, blocks >> 4]", "[blocks >> 4, blocks & 15]"),
        "mxfp4",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, variant = BUGS[name]
    assert source_of(variant)[0].decode is not None
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_weights_are_those_of_the_library(variant)
