"""The state that the order `learned` has learned, as a value that survives a restart.

Owns: its JSON document and the validation of one.
Does not know: files, the history, or how the state is used.
Called by `learning` and by the engine, which stores the state in the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from pensieve_jax.cache.order.policies import ORDERS
from pensieve_jax.cache.order.policy_selector import PolicyLosses
from pensieve_jax.cache.order.returns import NUM_BINS, NUM_BUCKETS, Array
from pensieve_jax.core.errors import ConfigError

_FORMAT = "pensieve experience, version 1"
_DIGITS = 6  # of seconds, a microsecond


@dataclass(frozen=True, eq=False, slots=True)
class LearnedState:
    """Observed returns of conversations, and the losses of each order.

    Attributes:
      returns: number of returns by bucket and bin of idle time: f64[NUM_BUCKETS, NUM_BINS].
      exposure_s: seconds that conversations spent idle by bucket and bin: f64[NUM_BUCKETS, NUM_BINS].
      selected: the order in use, one of `policies.ORDERS`.
      losses: losses that the policy selector compares, in the order of `ORDERS`.
    """

    returns: Array
    exposure_s: Array
    selected: str
    losses: PolicyLosses

    @property
    def num_returns(self) -> float:
        """Observed returns; older ones may count less than one."""
        return float(self.returns.sum())

    @classmethod
    def merged(cls, several: Sequence[Self], given: Self | None = None) -> Self:
        """Merge the states of one or more engines; `selected` and `losses` are those of the first.

        The state that all of them started from, `given`, counts once.
        """
        returns = np.sum([one.returns for one in several], 0)
        exposure_s = np.sum([one.exposure_s for one in several], 0)
        if given is not None:  # clamped at 0, since an engine with very many returns has forgotten part of it
            times = len(several) - 1
            returns = np.maximum(returns - times * given.returns, 0.0)
            exposure_s = np.maximum(exposure_s - times * given.exposure_s, 0.0)
        return cls(returns, exposure_s, several[0].selected, several[0].losses)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; `returns` and `exposure_s` keep six decimals."""
        return {
            "format": _FORMAT,
            "returns": self.returns.round(_DIGITS).tolist(),
            "exposure_s": self.exposure_s.round(_DIGITS).tolist(),
            "followed": self.selected,
            "lost_s": dict(zip(ORDERS, self.losses.sums_s, strict=True)),
            "loss_products": [list(row) for row in self.losses.products],
            "losses_counted_for": list(self.losses.counted_for),
        }

    @classmethod
    def from_dict(cls, document: object) -> Self:
        """Read a document of `to_dict`; raises ConfigError for anything else."""
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            found = document.get("format") if isinstance(document, dict) else document
            raise ConfigError("experience.format", found, repr(_FORMAT))
        selected = document.get("followed")
        if selected not in ORDERS:
            raise ConfigError("experience.followed", selected, f"one of {', '.join(ORDERS)}")
        lost_s = document.get("lost_s")
        sums_s = [lost_s.get(name) for name in ORDERS] if isinstance(lost_s, dict) else lost_s
        num_orders = len(ORDERS)
        sums = _numbers("lost_s", sums_s, (num_orders,))
        products = _numbers("loss_products", document.get("loss_products"), (num_orders, num_orders))
        counted_for = document.get("losses_counted_for")
        size = (len(counted_for),) if isinstance(counted_for, list) else (0,)
        counted = _numbers("losses_counted_for", counted_for, size)
        shape = NUM_BUCKETS, NUM_BINS
        return cls(
            _numbers("returns", document.get("returns"), shape),
            _numbers("exposure_s", document.get("exposure_s"), shape),
            selected,
            PolicyLosses(tuple(sums.tolist()), tuple(map(tuple, products.tolist())), tuple(counted.tolist())),
        )


def _numbers(name: str, values: object, shape: tuple[int, ...]) -> Array:
    limit = f"finite numbers from 0 on, of shape {shape}"
    try:
        found: Array = np.array(values, np.float64)
    except (TypeError, ValueError) as error:  # ragged, or not numeric
        raise ConfigError(f"experience.{name}", values, limit) from error
    if found.shape != shape or not np.isfinite(found).all() or (found < 0).any():
        raise ConfigError(f"experience.{name}", values, limit)
    return found
