"""The models as their papers write them, in NumPy, one request at a time, on tensors with torch's names.

Owns an implementation that shares nothing with the tested one, and random tensors. Does not know JAX, or
batches. Called by the tests of recurrent models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"

type Weights = Mapping[str, np.ndarray]


def golden(name: str) -> tuple[Weights, dict[str, np.ndarray]]:
    """Return a state_dict, and torch's inputs and outputs."""
    with np.load(GOLDEN / name) as arrays:
        values = {key: arrays[key] for key in arrays.files}
    weights = {key.removeprefix("weights."): one for key, one in values.items() if key.startswith("weights.")}
    return weights, {key: one for key, one in values.items() if not key.startswith("weights.")}


def random_weights(seed: int, shapes: Mapping[str, tuple[int, ...]], scale: float) -> Weights:
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def lstm_shapes(vocab_size: int, width: int, hidden: int, prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}embedding.weight": (vocab_size, width),
        f"{prefix}lstm.weight_ih_l0": (4 * hidden, width),
        f"{prefix}lstm.weight_hh_l0": (4 * hidden, hidden),
        f"{prefix}lstm.bias_ih_l0": (4 * hidden,),
        f"{prefix}lstm.bias_hh_l0": (4 * hidden,),
    }


def tree_shapes(vocab_size: int, width: int, hidden: int, num_classes: int) -> dict[str, tuple[int, ...]]:
    return {
        "embedding.weight": (vocab_size, width),
        "cell.W_iou.weight": (3 * hidden, width),
        "cell.U_iou.weight": (3 * hidden, 2 * hidden),
        "cell.b_iou": (1, 3 * hidden),
        "cell.U_f.weight": (2 * hidden, 2 * hidden),
        "cell.U_f.bias": (2 * hidden,),
        "linear.weight": (num_classes, hidden),
        "linear.bias": (num_classes,),
    }


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def lstm_step(
    weights: Weights, token: int, h: Any, c: Any, prefix: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Compute torch.nn.LSTM's equations, each gate separately."""
    x = weights[f"{prefix}embedding.weight"][token]
    w_x, w_h = (np.split(weights[f"{prefix}lstm.weight_{kind}_l0"], 4) for kind in ("ih", "hh"))
    b_x, b_h = (np.split(weights[f"{prefix}lstm.bias_{kind}_l0"], 4) for kind in ("ih", "hh"))
    i, f, g, o = (w_x[k] @ x + b_x[k] + w_h[k] @ h + b_h[k] for k in range(4))
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def lstm(weights: Weights, token_ids: Any, prefix: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Return h and c after the last word."""
    h = c = np.zeros(weights[f"{prefix}lstm.weight_hh_l0"].shape[1], np.float32)
    for token in token_ids:
        h, c = lstm_step(weights, token, h, c, prefix)
    return h, c


def translate(weights: Weights, source_ids: Any, num_steps: int, go: int) -> list[tuple[int, float]]:
    """Return words, each with its margin over the second best."""
    h, c = lstm(weights, source_ids, "encoder.")
    found, token = [], go
    for _ in range(num_steps):
        h, c = lstm_step(weights, token, h, c, "decoder.")
        token, margin = best(weights["decoder.out.weight"] @ h + weights["decoder.out.bias"])
        found.append((token, margin))
    return found


def tree_lstm(weights: Weights, tree: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the root's h and c by equations 9 to 14 of Tai et al. (2015), for nested pairs."""
    hidden = weights["cell.U_f.bias"].shape[0] // 2
    if isinstance(tree, tuple):
        (h_left, c_left), (h_right, c_right) = (tree_lstm(weights, one) for one in tree)
        both = np.concatenate([h_left, h_right])
        iou = weights["cell.U_iou.weight"] @ both
        forget = sigmoid(weights["cell.U_f.weight"] @ both + weights["cell.U_f.bias"])
        kept = forget[:hidden] * c_left + forget[hidden:] * c_right
    else:
        iou = weights["cell.W_iou.weight"] @ weights["embedding.weight"][tree]
        kept = 0
    i, o, u = np.split(iou + weights["cell.b_iou"][0], 3)
    c = sigmoid(i) * np.tanh(u) + kept
    return sigmoid(o) * np.tanh(c), c


class Mamba:
    """One text, token by token, by section 3 of Gu and Dao (2023), with a loop over channels' states."""

    def __init__(self, weights: Weights, config: Mapping[str, Any]) -> None:
        self.weights, self.config = weights, config
        inner = config["expand"] * config["hidden_size"]
        self.windows = [np.zeros((inner, config["conv_kernel"])) for _ in range(config["num_hidden_layers"])]
        self.states = [np.zeros((inner, config["state_size"])) for _ in self.windows]

    def step(self, token: int) -> np.ndarray:
        """Return f[vocab_size], scores of the next token."""
        weights = self.weights
        x = weights["backbone.embeddings.weight"][token]
        for i in range(len(self.states)):
            layer = f"backbone.layers.{i}."
            x = x + self._mix(layer + "mixer.", i, self._norm(x, weights[layer + "norm.weight"]))
        x = self._norm(x, weights["backbone.norm_f.weight"])
        return weights.get("lm_head.weight", weights["backbone.embeddings.weight"]) @ x

    def continued(self, prompt_ids: Any, num_tokens: int) -> list[tuple[int, float]]:
        """Return tokens, each with its margin over the second best."""
        for token in prompt_ids:
            scores = self.step(token)
        found = [best(scores)]
        while len(found) < num_tokens:
            found.append(best(self.step(found[-1][0])))
        return found

    def _norm(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return scale * x / np.sqrt((x * x).mean() + self.config["layer_norm_epsilon"])

    def _mix(self, name: str, i: int, x: np.ndarray) -> np.ndarray:
        def linear(part: str, x: np.ndarray) -> np.ndarray:
            return self.weights[f"{name}{part}.weight"] @ x + self.weights.get(f"{name}{part}.bias", 0)

        u, gate = np.split(linear("in_proj", x), 2)
        self.windows[i] = np.concatenate([self.windows[i][:, 1:], u[:, None]], axis=1)
        u = (self.windows[i] * self.weights[f"{name}conv1d.weight"][:, 0]).sum(axis=1)
        u = u + self.weights.get(f"{name}conv1d.bias", 0)
        u = u * sigmoid(u)
        rank, size = self.weights[f"{name}dt_proj.weight"].shape[1], self.states[i].shape[1]
        low, b, c = np.split(self.weights[f"{name}x_proj.weight"] @ u, [rank, rank + size])
        step = np.log1p(np.exp(linear("dt_proj", low)))
        rates = -np.exp(self.weights[f"{name}A_log"])
        for n in range(size):
            self.states[i][:, n] = np.exp(step * rates[:, n]) * self.states[i][:, n] + step * b[n] * u
        y = self.states[i] @ c + self.weights[f"{name}D"] * u
        return linear("out_proj", y * gate * sigmoid(gate))


def best(scores: np.ndarray) -> tuple[int, float]:
    """Return the index of the highest score, and its margin over the second best."""
    first = int(np.argmax(scores))
    return first, float(scores[first] - np.delete(scores, first).max())


def agree(tokens: Any, expected: list[tuple[int, float]], least: float = 1e-3) -> bool:
    """Tell whether tokens equal the expected ones, up to the first that rounding may have decided."""
    for place, (token, margin) in enumerate(expected):
        if margin < least:
            return True
        if place >= len(tokens) or tokens[place] != token:
            return False
    return len(tokens) == len(expected)
