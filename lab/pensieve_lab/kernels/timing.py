"""How long a kernel takes on the device, whoever launches it: JAX or PyTorch.

Owns: programs that answer and can be timed, and how: iterations run one after the other with nothing of the
host between them; compiling in threads; and what may be raised instead. Does not know: what a program
computes, whether it is right, flags.
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

# What compilers, runtimes and other people's packages raise for a kernel that they cannot make or launch.
KERNEL_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
_MAX_ITERATIONS = 400
_NUM_PILOTS = 3
# Iterations of a chain that follow each other directly, and the time from which one needs no company: what
# ties a round of the loop to the one before takes some 12 us on an H200.
_MAX_UNROLLED = 8
_LONG_S = 4e-3


def compiling(pool: ThreadPoolExecutor, lower: Callable[[], Any]) -> Future[Any]:
    """What `lower` returns, compiled at some time, or why it cannot be; Python lowers one at a time."""
    try:
        return pool.submit(lower().compile)
    except KERNEL_ERRORS as error:  # said with its turn
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
        """What there is to say of how it is set up."""

    def answer(self) -> jax.Array:
        """What it computes, like the queries."""

    def time(self, target_s: float, repeats: int) -> Timing:
        """How long it takes; a call runs for about `target_s`. Comes after `answer`."""


@dataclass(frozen=True)
class JaxProgram:
    """A function inside a jit.

    Attributes:
      label: see `Program`.
      attend: function of `tied` and then `fixed`; its result is like the first of `tied`.
      tied: arguments that the compiler must take for new in every iteration, queries first: what depends on
        none of them could be computed once for all. Trees of arrays.
      fixed: the others, pools among them; trees of arrays.
    """

    label: str
    attend: Callable[..., jax.Array]
    tied: tuple[Any, ...]
    fixed: tuple[Any, ...]

    def answer(self) -> jax.Array:
        """See `Program`."""
        return jax.jit(self.attend)(*self.tied, *self.fixed)

    def time(self, target_s: float, repeats: int) -> Timing:
        """Iterations chained inside one jitted call; without a GPU, launched one after the other."""
        arguments = (*self.tied, *self.fixed)
        alone = jax.jit(self.attend)
        launches = Timed(lambda: alone(*arguments), jax.block_until_ready)
        launches.once_s()
        num_iterations = _num_iterations(target_s, launches.sample_s(_NUM_PILOTS))
        if jax.default_backend() != "gpu":
            # For CPUs the compiler drops barriers first and then moves what stays the same out of loops.
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
        """Jitted function of several `q` and the other arguments that answers each of them again and again.

        They follow one another with nothing in between; only a round of the loop has a kernel of its own.
        """
        num_indices = len(self.tied) - 1

        @jax.jit
        def chain(queries: list[jax.Array], *others: Any) -> list[jax.Array]:
            def a_round(_: Any, outs: list[jax.Array]) -> list[jax.Array]:
                # Ties a round to the one before without touching a value, and keeps it inside the loop.
                (queries_again, indices), outs = jax.lax.optimization_barrier(
                    ((queries, others[:num_indices]), outs)
                )
                # Numbers of pages are few enough to be really computed: 0 from something that may be NaN.
                nothing = (outs[0][0, 0, 0] * 0).astype(jnp.int32)
                indices = jax.tree.map(lambda one: one + nothing, indices)
                return [self.attend(q, *indices, *others[num_indices:]) for q in queries_again]

            return jax.lax.fori_loop(0, num_rounds, a_round, jax.tree.map(jnp.zeros_like, queries))

        return chain


@dataclass(frozen=True)
class TorchProgram:
    """A function of PyTorch's, on its current stream.

    Attributes:
      label: see `Program`.
      torch: the module, which must not be imported before somebody asks for it.
      call: launches the kernels once; its result is like the queries.
    """

    label: str
    torch: Any
    call: Callable[[], Any]

    def answer(self) -> jax.Array:
        """See `Program`."""
        out = self.call().contiguous()
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()
        return jnp.from_dlpack(out)

    def time(self, target_s: float, repeats: int) -> Timing:
        """Iterations in one CUDA graph between two events, or launched one by one where none can be made."""
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
            # By default the capture would end at what a thread of JAX's does meanwhile.
            with cuda.graph(graph, capture_error_mode="thread_local"):
                launch()
        except RuntimeError:  # the kernel waits for the device, say
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
    """The pilot has the host's time in it, so that a short kernel gets fewer than it could."""
    return max(1, min(_MAX_ITERATIONS, round(target_s / pilot_s)))
