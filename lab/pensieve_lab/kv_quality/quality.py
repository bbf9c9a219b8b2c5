"""Change of a model's next-token distributions when its KV cache is stored in another format.

Owns: the figures, computed for each token of a text in one dense pass, and their bootstrap intervals.
Does not know: what the texts or the weights are.
Called by `kv_quality.outliers` and the programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model_defs.registry import Model
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_lab.kv_quality.formats import EXACT, StoredAttention
from pensieve_lab.kv_quality.texts import Text

_MIN_PADDED = 128
_RESAMPLES, _INTERVAL_PERCENT = 2000, (2.5, 97.5)
_SMALL = 1.0  # difference of log-probabilities below which exp(d) - 1 - d loses digits and needs expm1


class Sums(NamedTuple):
    """Sums over the tokens of each text, f64[num_texts], from which all figures are computed."""

    tokens: np.ndarray
    nats: np.ndarray  # minus log-probabilities of the text's tokens
    exact_nats: np.ndarray
    divergence: np.ndarray  # KL from the exact distribution
    top_equal: np.ndarray
    squares: np.ndarray  # of differences of log-probabilities of the text's tokens
    largest: np.ndarray  # of those differences, not a sum


class Passes:
    """One model's dense passes over texts."""

    def __init__(self, model: Model) -> None:
        """Share the model's arrays."""
        self._structure, self._leaves = ModelStructure.split(model)
        self._limit = model.config.max_position_embeddings

    def logits(self, token_ids: np.ndarray, store: str) -> jax.Array:
        """Return f32[P, V], the logits at each token and padding, with the KV cache in format `store`."""
        padded = min(max(_MIN_PADDED, 1 << (len(token_ids) - 1).bit_length()), self._limit)
        ids = np.pad(token_ids, (0, padded - len(token_ids)))
        return _logits(self._leaves, ids, structure=self._structure, store=store)


def compare(
    passes: Passes, texts: Sequence[Text], formats: Sequence[str], on_pass: Callable[[], None]
) -> dict[str, Sums]:
    """Return the sums of each format; `on_pass` is called after every pass."""
    rows: dict[str, list[list[float]]] = {name: [] for name in formats}
    for text in texts:
        exact = passes.logits(text.token_ids, EXACT)
        on_pass()
        num_targets = len(text.token_ids) - 1
        targets = np.pad(text.token_ids[1:], (0, exact.shape[0] - num_targets))
        for name in formats:
            other = passes.logits(text.token_ids, name)
            each = [
                np.asarray(one, np.float64)[:num_targets] for one in compare_logits(exact, other, targets)
            ]
            nats, exact_nats, divergence, top_equal = each
            difference = np.abs(nats - exact_nats)
            sums = [float(one.sum()) for one in (nats, exact_nats, divergence, top_equal, difference**2)]
            rows[name].append([num_targets, *sums, float(difference.max())])
            on_pass()
    return {name: Sums(*np.array(found).T) for name, found in rows.items()}


def logit_difference(passes: Passes, others: Passes, texts: Sequence[Text]) -> float:
    """Return the largest difference between two models, both with an exact KV cache."""
    return max(
        float(jnp.abs(passes.logits(ids, EXACT)[: len(ids)] - others.logits(ids, EXACT)[: len(ids)]).max())
        for ids, _ in texts
    )


def figures(sums: Sums) -> dict[str, float]:
    """Return the reported figures of a format."""
    tokens = sums.tokens.sum()
    return {
        "perplexity": float(np.exp(sums.nats.sum() / tokens)),
        "more_nats": float((sums.nats - sums.exact_nats).sum() / tokens),
        "divergence": float(sums.divergence.sum() / tokens),
        "top_equal_percent": float(100 * sums.top_equal.sum() / tokens),
        "rms_difference": float(np.sqrt(sums.squares.sum() / tokens)),
        "max_difference": float(sums.largest.max()),
    }


def intervals(sums: Sums, seed: int) -> dict[str, list[float]]:
    """Return 95% intervals of each figure but the largest difference, by resampling whole texts."""
    random, count = np.random.default_rng(seed), len(sums.tokens)
    drawn = [
        figures(Sums(*(part[chosen] for part in sums)))
        for chosen in random.integers(count, size=(_RESAMPLES, count))
    ]
    return {
        name: np.percentile([one[name] for one in drawn], _INTERVAL_PERCENT).tolist()
        for name in drawn[0]
        if name != "max_difference"
    }


def report(sums: Sums, seed: int) -> dict[str, Any]:
    """Return the figures and their intervals."""
    return {**figures(sums), "interval": intervals(sums, seed)}


@functools.partial(jax.jit, static_argnames=("structure", "store"))
def _logits(
    leaves: list[jax.Array], token_ids: jax.Array, *, structure: ModelStructure, store: str
) -> jax.Array:
    """Return f32[T, V]; tokens past the end are padding, which causality makes harmless."""
    model = structure.merge(leaves)
    positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    return model.compute_logits(model(token_ids, positions, StoredAttention(store)))


@jax.jit
def compare_logits(
    exact: jax.Array, other: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return nats of the targets, their exact nats, KL divergences and equal top tokens, [T] each."""
    exact, other = (jax.nn.log_softmax(logits, axis=-1) for logits in (exact, other))
    nats, exact_nats = (-jnp.take_along_axis(one, targets[:, None], axis=-1)[:, 0] for one in (other, exact))
    # KL as a sum of nonnegative terms: p (exp(d) - 1 - d) with d = log q - log p.
    d, p = other - exact, jnp.exp(exact)
    near = jnp.expm1(jnp.minimum(d, _SMALL)) - d
    divergence = jnp.where(d < _SMALL, p * near, jnp.exp(other) - p - p * d).sum(axis=-1)
    return nats, exact_nats, divergence, exact.argmax(axis=-1) == other.argmax(axis=-1)
