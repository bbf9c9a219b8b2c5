"""Timing of attention over rings: layer after layer, round after round, in a fixed order.

Owns: the dependencies between layers, and how rounds are repeated on the device.
Does not know: cases, bounds, flags.
Called by `programs.benchmark_ring_decode`.

`timing.JaxProgram` answers several independent queries. A compiler may then process them layer by layer, or
merge their products, and read keys once for all of them. Here they form one chain: a layer's query is the
previous layer's answer, and the first layer's query is the last answer of the previous round.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.ring_decode import DecodeBlock, ring_decode_attention
from pensieve_jax.device.row_steps import Timed
from pensieve_lab.kernels.ring_cases import RingInputs
from pensieve_lab.kernels.timing import Timing

_MAX_ROUNDS = 400
_NUM_PILOTS = 3
# Rounds without a loop around them, and their longest total time: one loop iteration costs some microseconds.
_MAX_UNROLLED = 16
_LONG_S = 4e-3


class RingRounds(NamedTuple):
    """One way to compute one case.

    Attributes:
      inputs: of the case; a round reads all of its layers.
      attend: function of a query, keys, values, the place and the numbers of columns.
    """

    inputs: RingInputs
    attend: Callable[..., jax.Array]

    @classmethod
    def of(cls, inputs: RingInputs, block: DecodeBlock | None) -> RingRounds:
        """Return the rounds of the kernel, or of plain XLA if `block` is None."""
        how: dict[str, Any] = {"backend": "xla"}
        if block is not None:
            how = {"backend": "pallas_triton", "block": block, "interpret": jax.default_backend() != "gpu"}
        return cls(inputs, functools.partial(ring_decode_attention, sm_scale=inputs.sm_scale, **how))

    def time(self, target_s: float, repeats: int) -> Timing:
        """Return the time of a round from calls of about `target_s`; without a GPU, from single launches."""
        one = self._timed(1, 1)
        pilot_s = one.sample_s(_NUM_PILOTS)
        num_rounds = max(1, min(_MAX_ROUNDS, round(target_s / pilot_s)))
        if jax.default_backend() != "gpu":  # there is no launch to hide, and compiling takes longer than this
            samples = [one.sample_s(num_rounds) for _ in range(repeats)]
            return Timing(statistics.median(samples), num_rounds, "launches in a row")
        num_unrolled = max(1, min(_MAX_UNROLLED, num_rounds, round(_LONG_S / pilot_s)))
        num_turns = -(-num_rounds // num_unrolled)
        calls = self._timed(num_turns, num_unrolled)
        num_rounds = num_turns * num_unrolled
        samples = [calls.once_s() / num_rounds for _ in range(repeats)]
        return Timing(statistics.median(samples), num_rounds, "one jitted call")

    def chain(self, num_turns: int, num_unrolled: int) -> Callable[..., jax.Array]:
        """Return a jitted function of `arguments` that returns the last layer's answer of the last round."""

        @jax.jit
        def chain(q: jax.Array, place: jax.Array, num_columns: jax.Array, layers: Any) -> jax.Array:
            def turn(_: Any, q: jax.Array) -> jax.Array:
                for _ in range(num_unrolled):
                    for keys, values in layers:
                        q = self.attend(q, keys, values, place, num_columns)
                return q

            return turn(0, q) if num_turns == 1 else jax.lax.fori_loop(0, num_turns, turn, q)

        return chain

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of a chain."""
        inputs = self.inputs
        return inputs.q, inputs.place, inputs.num_columns, inputs.layers

    def _timed(self, num_turns: int, num_unrolled: int) -> Timed:
        chain, arguments = self.chain(num_turns, num_unrolled), self.arguments
        found = Timed(lambda: chain(*arguments), jax.block_until_ready)
        found.once_s()  # compiles
        return found
