"""Lower bounds of a step's time: every operation at the limit of memory bandwidth or arithmetic (roofline).

Owns: what a step's operations read, write and multiply. Does not know: kernels, padding or devices.

Norms, activations, rotary embeddings and residuals are left out: their bytes may stay on the chip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from model_defs import ExpertsConfig, ModelConfig
from pensieve_jax.device.row_steps import StepRow
from pensieve_lab.common.attention_work import reads_and_pairs
from pensieve_lab.steps.ceilings import Ceilings


class Operation(NamedTuple):
    """Bytes and floating-point operations of one operation in all layers, on one device."""

    name: str
    num_bytes: int
    flop: int

    def seconds(self, ceilings: Ceilings) -> float:
        """Return the time at the device's ceilings."""
        return max(self.num_bytes / ceilings.read_bytes_per_s, self.flop / ceilings.flop_per_s)


def operations(
    model: ModelConfig,
    rows: Sequence[StepRow],
    *,
    num_samples: int,
    bytes_per_number: int,
    kv_token_bytes: float,
    num_devices: int,
    bytes_per_weight: int | None = None,
) -> list[Operation]:
    """Return the operations of a step with these rows, where `num_samples` tokens get logits.

    Weights and activations take `bytes_per_number` each, except weights of layers if `bytes_per_weight` is
    given. The KV cache takes `kv_token_bytes` per token over all layers. Devices share all of it evenly. Of
    experts, a step reads as many as it is expected to choose.
    """
    num_tokens = sum(row.end - row.begin for row in rows)
    width, heads = model.hidden_size, model.num_heads * model.head_dim
    kv_width = 2 * model.num_kv_heads * model.head_dim
    inner = model.intermediate_size
    num_moe = sum(kind.mlp == "moe" for kind in model.kinds)
    products = {
        "qkv": (width, heads + kv_width, model.num_layers),
        "attention out": (heads, width, model.num_layers),
        "mlp in": (width, (2 if model.is_gated else 1) * inner, model.num_layers - num_moe),
        "mlp out": (inner, width, model.num_layers - num_moe),
    }
    found = [
        _product(name, num_tokens, *shape, bytes_per_number, bytes_per_weight)
        for name, shape in products.items()
        if shape[2]
    ]
    if model.experts is not None:
        found += _experts(model.experts, num_tokens, width, num_moe, bytes_per_number, bytes_per_weight)
    found.append(_attention(model, rows, bytes_per_number, kv_token_bytes))
    found.append(_product("logits", num_samples, model.embed_width, model.vocab_size, 1, bytes_per_number))
    return [Operation(one.name, one.num_bytes // num_devices, one.flop // num_devices) for one in found]


def bound_s(operations: Sequence[Operation], ceilings: Ceilings) -> float:
    """Return the sum of the operations' bounds, since they run in sequence."""
    return sum(one.seconds(ceilings) for one in operations)


def _product(
    name: str,
    num_rows: int,
    num_in: int,
    num_out: int,
    count: int,
    bytes_per_number: int,
    bytes_per_weight: int | None = None,
) -> Operation:
    """Make `count` products of activations [num_rows, num_in] with weights [num_in, num_out]."""
    weights_bytes = num_in * num_out * (bytes_per_weight or bytes_per_number)
    num_bytes = weights_bytes + num_rows * (num_in + num_out) * bytes_per_number
    is_any = num_rows > 0
    return Operation(name, count * num_bytes * is_any, count * 2 * num_rows * num_in * num_out)


def _experts(
    experts: ExpertsConfig,
    num_tokens: int,
    width: int,
    count: int,
    bytes_per_number: int,
    bytes_per_weight: int | None,
) -> list[Operation]:
    """Make the routers of `count` layers, and the products of the experts that the tokens choose.

    Routers keep the numbers of activations, since 8 bits would change the choice of experts.
    """
    num_rows, num_read = num_tokens * experts.num_chosen, experts.num_read(num_tokens)
    found = [_product("router", num_tokens, width, experts.num_experts, count, bytes_per_number)]
    for name, num_in, num_out in (
        ("experts in", width, 2 * experts.width),
        ("experts out", experts.width, width),
    ):
        weights_bytes = round(num_read * num_in * num_out) * (bytes_per_weight or bytes_per_number)
        num_bytes = weights_bytes + num_rows * (num_in + num_out) * bytes_per_number
        found.append(Operation(name, count * num_bytes, count * 2 * num_rows * num_in * num_out))
    return found


def _attention(
    model: ModelConfig, rows: Sequence[StepRow], bytes_per_number: int, kv_token_bytes: float
) -> Operation:
    """Make the causal attention of all rows; every row reads once what its windows reach of its KV cache."""
    num_read, num_pairs = 0, 0  # of all layers
    for window, num_layers in Counter(kind.window for kind in model.kinds).items():
        for row in rows:
            found = reads_and_pairs(row.end - row.begin, row.end, window)
            num_read += num_layers * found[0]
            num_pairs += num_layers * found[1]
    width, num_tokens = model.num_heads * model.head_dim, sum(row.end - row.begin for row in rows)
    queries_and_outputs = 2 * model.num_layers * num_tokens * width
    num_bytes = round(num_read * kv_token_bytes / model.num_layers) + queries_and_outputs * bytes_per_number
    return Operation("attention", num_bytes, 4 * num_pairs * width)
