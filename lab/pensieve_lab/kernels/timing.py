"""Kernel times on the device, for kernels launched by JAX or PyTorch.

Owns: programs that can be checked and timed; iterations that run one after the other without host work in
between; compiling in threads; and the exceptions that a kernel may raise.
Does not know: what a program computes, whether it is right, or flags.
Called by the kernel benchmarks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pensieve_jax.device.row_steps import Timed

# Raised by compilers, runtimes and external packages for a kernel that they cannot make or launch.
KERNEL_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
_MAX_ITERATIONS = 400
_NUM_PILOTS = 3
# Iterations of a chain that follow each other directly, and the time above which a kernel runs alone in a
# round: tying a loop iteration to the one before takes some 12 us on an H200.
_MAX_UNROLLED = 8
_LONG_S = 4e-3


def compiling(pool: ThreadPoolExecutor, lower: Callable[[], Any]) -> Future[Any]:
    """Compile what `lower` returns in a thread; the future also holds errors. Lowering is serial."""
    try:
        return pool.submit(lower().compile)
    except KERNEL_ERRORS as error:  # reported when the future is read
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


class Timing(NamedTuple):
    """Median over several calls of the mean over a call's iterations."""

    seconds: float
    num_iterations: int
    timed_by: str


class Program(Protocol):
    """One way to compute a batch, ready to run."""

    @property
    def label(self) -> str:
        """Description of its configuration."""

    def answer(self) -> jax.Array:
        """Return its output, shaped like the queries."""

    def time(self, target_s: float, repeats: int) -> Timing:
        """Return its time; a call runs for about `target_s`. Must follow a call of `answer`."""


@dataclass(frozen=True)
class JaxProgram:
    """A function inside a jit.

    Attributes:
      label: see `Program`.
      attend: function of `tied` and then `fixed`; its result is like the first of `tied`.
      tied: arguments that the compiler must treat as new in every iteration, queries first; otherwise it
        could hoist work that depends on none of them. Trees of arrays.
      fixed: the others, including pools; trees of arrays.
    """

    label: str
    attend: Callable[..., jax.Array]
    tied: tuple[Any, ...]
    fixed: tuple[Any, ...]

    def answer(self) -> jax.Array:
        return jax.jit(self.attend)(*self.tied, *self.fixed)

    def time(self, target_s: float, repeats: int) -> Timing:
        """Time iterations chained inside one jitted call; without a GPU, separate launches."""
        arguments = (*self.tied, *self.fixed)
        alone = jax.jit(self.attend)
        launches = Timed(lambda: alone(*arguments), jax.block_until_ready)
        launches.once_s()
        num_iterations = _num_iterations(target_s, launches.sample_s(_NUM_PILOTS))
        if jax.default_backend() != "gpu":
            # On CPUs, the compiler drops barriers first and then moves invariants out of loops.
            samples = [launches.sample_s(num_iterations) for _ in range(repeats)]
            return Timing(statistics.median(samples), num_iterations, "launches in a row")
        num_unrolled = max(1, min(_MAX_UNROLLED, round(_LONG_S * num_iterations / target_s)))
        num_rounds = -(-num_iterations // num_unrolled)
        chain = self.chained(num_rounds)
        queries = [jnp.copy(self.tied[0]) for _ in range(num_unrolled)]
        chained = Timed(lambda: chain(queries, *arguments[1:]), jax.block_until_ready)
        chained.once_s()
        num_iterations = num_rounds * num_unrolled
        samples = [chained.once_s() / num_iterations for _ in range(repeats)]
        return Timing(statistics.median(samples), num_iterations, "one jitted call")

    def chained(self, num_rounds: int) -> jax.stages.Wrapped:
        """Return a jitted function of several `q` and the other arguments that answers each repeatedly.

        The answers follow one another with nothing in between; only a loop iteration adds a kernel of its
        own.
        """
        num_indices = len(self.tied) - 1

        @jax.jit
        def chain(queries: list[jax.Array], *others: Any) -> list[jax.Array]:
            def a_round(_: Any, outs: list[jax.Array]) -> list[jax.Array]:
                # Ties a round to the one before without changing a value, and keeps it inside the loop.
                (queries_again, indices), outs = jax.lax.optimization_barrier(
                    ((queries, others[:num_indices]), outs)
                )
                # Page numbers are few, so this addition is cheap: 0, computed from a value that may be NaN.
                nothing = (outs[0][0, 0, 0] * 0).astype(jnp.int32)
                indices = jax.tree.map(lambda one: one + nothing, indices)
                return [self.attend(q, *indices, *others[num_indices:]) for q in queries_again]

            return jax.lax.fori_loop(0, num_rounds, a_round, jax.tree.map(jnp.zeros_like, queries))

        return chain


@dataclass(frozen=True)
class TorchProgram:
    """A PyTorch function on its current stream.

    Attributes:
      label: see `Program`.
      torch: the module, which is imported only on demand.
      call: launches the kernels once; its result is like the queries.
    """

    label: str
    torch: Any
    call: Callable[[], Any]

    def answer(self) -> jax.Array:
        out = self.call().contiguous()
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()
        return jnp.from_dlpack(out)

    def time(self, target_s: float, repeats: int) -> Timing:
        """Time iterations in one CUDA graph between two events, or single launches if capture fails."""
        num_iterations = _num_iterations(target_s, self._elapsed_s(self.call))
        launch, timed_by = self._repeated(num_iterations)
        self._elapsed_s(launch)
        samples = [self._elapsed_s(launch) / num_iterations for _ in range(repeats)]
        return Timing(statistics.median(samples), num_iterations, timed_by)

    def _repeated(self, num_iterations: int) -> tuple[Callable[[], None], str]:
        def launch() -> None:
            for _ in range(num_iterations):
                self.call()

        cuda = self.torch.cuda
        if not cuda.is_available():
            return launch, "wall clock"
        graph = cuda.CUDAGraph()
        try:
            # With the default mode, work of JAX's threads would end the capture.
            with cuda.graph(graph, capture_error_mode="thread_local"):
                launch()
        except RuntimeError:  # for example if the kernel waits for the device
            return launch, "CUDA events"
        return graph.replay, "CUDA events, graph"

    def _elapsed_s(self, launch: Callable[[], Any]) -> float:
        cuda = self.torch.cuda
        if not cuda.is_available():
            start_s = time.perf_counter()
            launch()
            return time.perf_counter() - start_s
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        end.synchronize()
        return 1e-3 * float(start.elapsed_time(end))


def _num_iterations(target_s: float, pilot_s: float) -> int:
    """Return the number of iterations; a short kernel gets too few, because the pilot includes host time."""
    return max(1, min(_MAX_ITERATIONS, round(target_s / pilot_s)))
