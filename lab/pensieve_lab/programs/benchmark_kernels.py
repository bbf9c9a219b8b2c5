"""Times attention on named shapes beside its peers, against what the device can do at best.

    python -m pensieve_lab.programs.benchmark_kernels --cases=all --backend=all --peers=all \\
        --plot=roofline.png
    python -m pensieve_lab.programs.benchmark_kernels --cases=decode_64x4096_gqa10,prefill_4x2048_gqa10 \\
        --sweep

- Ceilings of this device, measured in the same run; every case's bound is the larger of its bytes at the
  speed of reading and its operations at the speed of products of matrices.
- `--backend`: our kernel, by the back ends named, or by all that serve the case here.
- `--peers`: strawmen in JAX (`jax`: copy_out, rounds, contiguous) and other people's kernels where they can
  be imported (`torch`: torch_sdpa, torch_cudnn, flashinfer, flash_attention_3). PyTorch is imported for the
  latter alone and needs memory that JAX leaves it: export XLA_PYTHON_CLIENT_MEM_FRACTION=0.5.
- A batch of decodes and prompts is also timed part by part.
- `--sweep`: our kernel with many block sizes as well.

Every answer, peers' too, is checked before it is timed: whole against the `xla` back end, and some tokens
against the dense reference. Pools are larger than any cache. The last line is one JSON document (see
`--json`). Exit status 1 if one of our back ends is wrong or fails, 2 for flags that cannot work; peers only
have it said of them.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

from pallas_kernels.attention_names import KV_DTYPES
from pallas_kernels.ragged_paged_attention import AttentionArgumentError, BlockSizes, TileClass
from pallas_kernels.ragged_paged_attention.shapes import CASES, Case
from pensieve_jax import ConfigError
from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document
from pensieve_lab.kernels.backends import (
    BACKENDS,
    backend_program,
    block_variants,
    check_backends,
    chosen_backends,
    describe,
    make_spec,
)
from pensieve_lab.kernels.cases import (
    TOLERANCE,
    Expected,
    Inputs,
    MismatchError,
    expected_answer,
    make_inputs,
    parts,
)
from pensieve_lab.kernels.peers import PEERS, chosen_peers
from pensieve_lab.kernels.plot import plot_roofline
from pensieve_lab.kernels.table import HEADER, UNITS, Result, ceilings_line, summary
from pensieve_lab.kernels.timing import KERNEL_ERRORS, Program
from pensieve_lab.kernels.torch_peers import check_torch_has_room
from pensieve_lab.steps.ceilings import Ceilings, measure_ceilings

FLAGS = flags.FLAGS
# Bytes of the array that is read, rows and columns of the matrices that are multiplied.
_CEILING_SIZES_GPU = (4 << 30, 8192)
_CEILING_SIZES_ELSEWHERE = (32 << 20, 256)
# A kernel this much faster than its bound was moved out of the loop that times it.
_MAX_SHARE = 1.5
_PEER_PACKAGES = ("torch", "flashinfer-python", "flash-attn-3", "vllm")


class Kernel(NamedTuple):
    """Something to measure: how it is made ready for a batch."""

    name: str
    is_peer: bool
    prepare: Callable[[Inputs], Program]
    blocks: tuple[TileClass, ...] = ()
    is_tried: bool = False  # by --sweep, beside the sizes that the kernel takes by itself


class Checked(NamedTuple):
    """A batch and its answer; the parts of a mixed one likewise."""

    inputs: Inputs
    expected: Expected
    parts: dict[str, Checked]


def checked(inputs: Inputs) -> Checked:
    """Raises MismatchError where the references disagree."""
    return Checked(
        inputs, expected_answer(inputs), {name: checked(part) for name, part in parts(inputs).items()}
    )


def kernels(case: Case) -> Iterator[Kernel]:
    """What the flags ask for, ours first."""

    def ours(backend: str, blocks: BlockSizes | None = None) -> Kernel:
        def prepare(inputs: Inputs) -> Program:
            return backend_program(inputs, backend, blocks)

        classes = make_spec(case, FLAGS.dtype, backend, blocks, FLAGS.kv_dtype).blocks.classes
        return Kernel(backend, False, prepare, classes, is_tried=blocks is not None)

    backends = chosen_backends(FLAGS.backend, case, FLAGS.dtype, FLAGS.kv_dtype)
    yield from map(ours, backends)
    for name in chosen_peers(FLAGS.peers):
        yield Kernel(name, True, PEERS[name])
    if FLAGS.sweep:
        for backend in backends:
            for blocks in block_variants(case, FLAGS.dtype, backend, FLAGS.kv_dtype):
                if re.search(FLAGS.sweep_matching, describe(blocks)):
                    yield ours(backend, blocks)


def measure(kernel: Kernel, batch: Checked, ceilings: Ceilings) -> Result:
    """One kernel on one case; what stopped it is in the result."""
    work = batch.inputs.work
    found: dict[str, Any] = {"blocks": kernel.blocks, "is_tried": kernel.is_tried}
    try:
        program = kernel.prepare(batch.inputs)
        found["label"] = program.label
        found["max_error"] = difference = batch.expected.difference(program.answer())
        if not difference < TOLERANCE[FLAGS.dtype]:
            found["reason"] = f"wrong: differs by {difference:.1e}"
        else:
            timing = program.time(1e-3 * FLAGS.target_ms, FLAGS.repeats)
            is_possible = timing.seconds > work.seconds(ceilings) / _MAX_SHARE
            found |= {"timing": timing} if is_possible else {"reason": f"not believed: {timing}"}
    except AttentionArgumentError:
        raise
    except ImportError as error:
        found["reason"] = f"not importable: {error}"
    except NotImplementedError as error:
        found["reason"] = f"left out: {error}"
    except KERNEL_ERRORS as error:  # the others have their turn
        found["reason"] = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
    return Result(kernel.name, kernel.is_peer, work, work.seconds(ceilings), **found)


def measure_parts(kernel: Kernel, batch: Checked, ceilings: Ceilings) -> dict[str, float]:
    """Times of a mixed batch's parts alone; nothing if one of them has none."""
    found = {name: measure(kernel, part, ceilings) for name, part in batch.parts.items()}
    is_whole = all(result.timing is not None for result in found.values())
    return {name: result.seconds for name, result in found.items()} if is_whole else {}


def run_case(case: Case, ceilings: Ceilings) -> list[Result]:
    """Results of a case, each printed at once."""
    batch = checked(make_inputs(case, FLAGS.dtype, FLAGS.seed, FLAGS.kv_dtype))
    results = []
    for kernel in kernels(case):
        result = measure(kernel, batch, ceilings)
        if result.timing is not None and not kernel.is_tried:
            result = dataclasses.replace(result, parts_s=measure_parts(kernel, batch, ceilings))
        print(result.line(), flush=True)
        results.append(result)
    return results


def cases() -> list[Case]:
    """Those of `--cases`; raises AttentionArgumentError."""
    default = ["all"] if jax.default_backend() == "gpu" else ["tiny"]
    names = default if FLAGS.cases is None else FLAGS.cases
    names = list(CASES) if names == ["all"] else names
    unknown = sorted(set(names) - set(CASES))
    if unknown or not names:
        raise AttentionArgumentError("--cases", unknown, f"known are {sorted(CASES)}")
    return [CASES[name] for name in names]


def check_flags(found: list[Case]) -> None:
    """Raise, before anything is measured, for flags that cannot work."""
    check_backends(FLAGS.backend)
    try:
        re.compile(FLAGS.sweep_matching)
    except re.error as error:
        limit = f"a regular expression: {error}"
        raise ConfigError("--sweep_matching", FLAGS.sweep_matching, limit) from error
    if FLAGS.sweep_matching and not FLAGS.sweep:
        raise ConfigError("--sweep_matching", FLAGS.sweep_matching, "left out without --sweep")
    if chosen_peers(FLAGS.peers) and FLAGS.kv_dtype is not None:
        raise AttentionArgumentError("--peers", FLAGS.peers, f"none reads pages of {FLAGS.kv_dtype}")
    for case in found:
        chosen_backends(FLAGS.backend, case, FLAGS.dtype, FLAGS.kv_dtype)
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))


def main() -> int:
    """Prints results case by case, then the document."""
    began = time.perf_counter()
    found = cases()
    check_flags(found)
    is_gpu = jax.default_backend() == "gpu"
    num_bytes, matrix_size = _CEILING_SIZES_GPU if is_gpu else _CEILING_SIZES_ELSEWHERE
    ceilings = measure_ceilings(
        num_bytes=num_bytes, matrix_size=matrix_size, dtype=FLAGS.dtype, repeats=FLAGS.repeats
    )
    itemsize = jnp.dtype(FLAGS.dtype).itemsize
    # Not earlier: JAX takes its memory when it is first used.
    check_torch_has_room(chosen_peers(FLAGS.peers), max(case.kv_bytes for case in found) * itemsize // 2)
    stored = "" if FLAGS.kv_dtype is None else f", pages of {FLAGS.kv_dtype}"
    print(f"{device_name()}, {FLAGS.dtype}{stored}; {ceilings_line(ceilings)}\n{HEADER}")
    results, left_out, num_mismatches = [], [], 0
    for case in found:
        if FLAGS.time_limit_s is not None and time.perf_counter() - began > FLAGS.time_limit_s:
            left_out.append(case.name)
            continue
        try:
            results += run_case(case, ceilings)
        except MismatchError as error:
            num_mismatches += 1
            print(f"error: {error}", file=sys.stderr)
    print(summary(results))
    if left_out:
        print(f"left out, for time: {', '.join(left_out)}")
    if FLAGS.plot is not None:
        title = f"Ragged paged attention, {FLAGS.dtype}, {device_name()}"
        plot_roofline(results, ceilings, title, Path(FLAGS.plot))
    document = {
        "dtype": FLAGS.dtype,
        "kv_dtype": FLAGS.kv_dtype or FLAGS.dtype,
        "platform": jax.devices()[0].client.platform_version,
        "ceilings": ceilings._asdict(),
        "peer_versions": peer_versions(),
        "left_out": left_out,
        "measurements": [result.as_dict() for result in results],
    }
    print_document(json_line("ragged_paged_attention", document, units=UNITS, device=device_name()))
    # Block sizes that are only tried may ask for more shared memory than there is.
    ours = [result for result in results if not (result.is_peer or result.is_tried)]
    is_right = not num_mismatches and all(result.timing is not None for result in ours)
    return 0 if is_right else EXIT_FAILED


def peer_versions() -> dict[str, str]:
    """Of the packages that peers come from, where they are installed; imports none."""
    found = {}
    for package in _PEER_PACKAGES if chosen_peers(FLAGS.peers) else ():
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def define_flags() -> None:
    """The command line."""
    flags.DEFINE_list("cases", None, "Names, or 'all'; default: all on a GPU, tiny elsewhere.")
    flags.DEFINE_list("backend", ["auto"], f"What of ours is timed: auto, all, {', '.join(BACKENDS)}.")
    flags.DEFINE_list("peers", [], f"What is timed beside it: all, jax, torch, {', '.join(PEERS)}.")
    flags.DEFINE_bool("sweep", False, "Time our kernel with many block sizes, too.")
    flags.DEFINE_string("sweep_matching", "", "Of those, by a regular expression on what they print as.")
    flags.DEFINE_string("plot", None, "Where the roofline is drawn, e.g. roofline.png; needs matplotlib.")
    flags.DEFINE_enum("dtype", "bfloat16", list(TOLERANCE), "Of queries, and of pages.")
    flags.DEFINE_enum("kv_dtype", None, KV_DTYPES, "What pages are stored as; default: --dtype.")
    flags.DEFINE_integer("seed", 0, "Seed of pages and values.", lower_bound=0)
    flags.DEFINE_float("target_ms", 40.0, "Device time of one timed call, about.", lower_bound=0.001)
    flags.DEFINE_float(
        "time_limit_s", None, "No case begins after so long; the document is whole.", lower_bound=0.0
    )
    flags.DEFINE_integer("repeats", 5, "Timed calls, of which the median is taken.", lower_bound=1)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
