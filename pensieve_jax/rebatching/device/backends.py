"""Choice of the attention back ends of a padded batch.

Owns: the choice for one model on one mesh, its reason, and the error if a requested back end cannot run.
Does not know: programs, or how a back end works.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

import jax

from pallas_kernels import ragged_paged_attention, ring_decode
from pallas_kernels.ragged_paged_attention import AttentionArgumentError, AttentionHeads, BackendChoice
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.rebatching.config import RebatchingConfig

_log = logging.getLogger(__name__)
_OF_HOLES = BackendChoice("xla", "queries that join by vector shaping leave holes in a row")


class _Kernels(Protocol):
    """Kernel package with several back ends."""

    def device_limit(self, backend: str, device: jax.Device) -> str | None: ...

    def choose_backend(
        self,
        backend: str,
        heads: AttentionHeads,
        device: jax.Device | None = None,
        *,
        named_in: str = "backend",
    ) -> BackendChoice: ...


class AttentionBackends(NamedTuple):
    """Attention back ends of one runner.

    Attributes:
      attention_backend: back end for prefills.
      decode_backend: back end for decode steps.
    """

    attention_backend: BackendChoice
    decode_backend: BackendChoice

    @classmethod
    def chosen(cls, config: RebatchingConfig, heads: AttentionHeads, device: jax.Device) -> AttentionBackends:
        """Resolve the back ends of `config` for the heads of a shard.

        Raises:
          ConfigError: the device or the model cannot use the requested back end.
        """
        return cls(
            _chosen("attention_backend", config.attention_backend, ragged_paged_attention, heads, device),
            _OF_HOLES
            if config.insertion == "shape"
            else _chosen("decode_backend", config.decode_backend, ring_decode, heads, device),
        )

    def describe(self) -> dict[str, dict[str, str]]:
        """Return name and reason of each back end, for a report."""
        return {
            field: {"name": choice.name, "reason": choice.reason} for field, choice in self._asdict().items()
        }


def _chosen(
    field: str, backend: str, kernels: _Kernels, heads: AttentionHeads, device: jax.Device
) -> BackendChoice:
    if (limit := kernels.device_limit(backend, device)) is not None:
        raise ConfigError(field, backend, "'auto' or 'xla' on this device", limit)
    try:
        choice = kernels.choose_backend(backend, heads, device, named_in=field)
    except AttentionArgumentError as error:
        raise ConfigError(field, backend, "'auto' or 'xla' for this model", str(error)) from error
    _log.info("%s: %s, %s", field, choice.name, choice.reason)
    return choice
