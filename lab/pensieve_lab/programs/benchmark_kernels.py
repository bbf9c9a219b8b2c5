"""Times attention on named shapes, with its baselines, against the device's ceilings.

    python -m pensieve_lab.programs.benchmark_kernels --cases=all --backend=all --peers=all \\
        --plot=roofline.png
    python -m pensieve_lab.programs.benchmark_kernels --cases=decode_64x4096_gqa10,prefill_4x2048_gqa10 \\
        --sweep

- Ceilings of this device are measured in the same run. The bound of a case is the larger of its bytes at the
  read bandwidth and its operations at the speed of matrix products.
- `--backend`: our kernel, by the named back ends, or by all that serve the case here.
- `--peers`: simple baselines in JAX (`jax`: copy_out, rounds, contiguous) and other projects' kernels if they
  can be imported (`torch`: torch_sdpa, torch_cudnn, flashinfer, flash_attention_3). PyTorch is only imported
  for the latter and needs memory that JAX must leave free: export XLA_PYTHON_CLIENT_MEM_FRACTION=0.5.
- A batch of decodes and prompts is also timed part by part.
- `--window`: each case with every window of the list, such as none,128,1024,4096. No baseline has windows.
- `--sweep`: also our kernel with many block sizes.

Every answer, also of baselines, is checked before it is timed: whole against the `xla` back end, and some
tokens against the dense reference. Pools are larger than any cache. The last line is one JSON document (see
`--json`). Exit status 1 if one of our back ends is wrong or fails, 2 for invalid flags; faults of baselines
are only reported.
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
from pensieve_lab.common.list_flags import numbers
from pensieve_lab.kernels.backends import (
    BACKENDS,
    backend_program,
    block_variants,
    check_backends,
    chosen_backends,
    describe,
    make_spec,
)
from pensieve_lab.kernels.baselines import BASELINES, chosen_baselines
from pensieve_lab.kernels.cases import (
    TOLERANCE,
    Expected,
    Inputs,
    MismatchError,
    expected_answer,
    make_inputs,
    parts,
)
from pensieve_lab.kernels.plot import plot_roofline
from pensieve_lab.kernels.table import HEADER, UNITS, Result, ceilings_line, summary
from pensieve_lab.kernels.timing import KERNEL_ERRORS, Program
from pensieve_lab.kernels.torch_baselines import check_torch_has_room
from pensieve_lab.steps.ceilings import Ceilings, measure_ceilings

FLAGS = flags.FLAGS
# Bytes of the array that is read, and size of the square matrices that are multiplied.
_CEILING_SIZES_GPU = (4 << 30, 8192)
_CEILING_SIZES_ELSEWHERE = (32 << 20, 256)
# A kernel this much faster than its bound was hoisted out of the timing loop.
_MAX_SHARE = 1.5
_BASELINE_PACKAGES = ("torch", "flashinfer-python", "flash-attn-3", "vllm")


class Kernel(NamedTuple):
    """Implementation to measure: how it is prepared for a batch."""

    name: str
    is_peer: bool
    prepare: Callable[[Inputs], Program]
    blocks: tuple[TileClass, ...] = ()
    is_tried: bool = False  # a size that only --sweep tries


class Checked(NamedTuple):
    """Batch with its reference answer, and the same for the parts of a mixed batch."""

    inputs: Inputs
    expected: Expected
    parts: dict[str, Checked]


def checked(inputs: Inputs) -> Checked:
    """Compute the reference answers of a batch; raises MismatchError if the references disagree."""
    return Checked(
        inputs, expected_answer(inputs), {name: checked(part) for name, part in parts(inputs).items()}
    )


def kernels(case: Case) -> Iterator[Kernel]:
    """Yield the implementations of the flags, ours first."""

    def ours(backend: str, blocks: BlockSizes | None = None) -> Kernel:
        def prepare(inputs: Inputs) -> Program:
            return backend_program(inputs, backend, blocks)

        classes = make_spec(case, FLAGS.dtype, backend, blocks, FLAGS.kv_dtype).blocks.classes
        return Kernel(backend, False, prepare, classes, is_tried=blocks is not None)

    backends = chosen_backends(FLAGS.backend, case, FLAGS.dtype, FLAGS.kv_dtype)
    yield from map(ours, backends)
    for name in chosen_baselines(FLAGS.peers):
        yield Kernel(name, True, BASELINES[name])
    if FLAGS.sweep:
        for backend in backends:
            for blocks in block_variants(case, FLAGS.dtype, backend, FLAGS.kv_dtype):
                if re.search(FLAGS.sweep_matching, describe(blocks)):
                    yield ours(backend, blocks)


def measure(kernel: Kernel, batch: Checked, ceilings: Ceilings) -> Result:
    """Measure one implementation on one case; the result holds any failure."""
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
            found |= {"timing": timing} if is_possible else {"reason": f"not plausible: {timing}"}
    except AttentionArgumentError:
        raise
    except ImportError as error:
        found["reason"] = f"not importable: {error}"
    except NotImplementedError as error:
        found["reason"] = f"skipped: {error}"
    except KERNEL_ERRORS as error:  # continue with the others
        found["reason"] = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
    return Result(kernel.name, kernel.is_peer, work, work.seconds(ceilings), **found)


def measure_parts(kernel: Kernel, batch: Checked, ceilings: Ceilings) -> dict[str, float]:
    """Return the times of a mixed batch's parts alone; nothing if one of them could not be timed."""
    found = {name: measure(kernel, part, ceilings) for name, part in batch.parts.items()}
    is_whole = all(result.timing is not None for result in found.values())
    return {name: result.seconds for name, result in found.items()} if is_whole else {}


def run_case(case: Case, ceilings: Ceilings) -> list[Result]:
    """Measure a case and print each result at once."""
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
    """Return the cases of `--cases`; raises AttentionArgumentError for unknown names."""
    default = ["all"] if jax.default_backend() == "gpu" else ["tiny"]
    names = default if FLAGS.cases is None else FLAGS.cases
    names = list(CASES) if names == ["all"] else names
    unknown = sorted(set(names) - set(CASES))
    if unknown or not names:
        raise AttentionArgumentError("--cases", unknown, f"known are {sorted(CASES)}")
    if not FLAGS.window:
        raise ConfigError("--window", "", "none, or numbers of keys, with commas between them")
    return [with_window(CASES[name], window) for name in names for window in FLAGS.window]


def with_window(case: Case, window: str) -> Case:
    """Return the case with a window, which its name says; raises ConfigError for anything but a number."""
    if window == "none":
        return case
    [num_keys] = numbers("--window", [window])
    return dataclasses.replace(case, name=f"{case.name}_w{num_keys}", window=num_keys)


def check_flags(cases: list[Case]) -> None:
    """Raise an error for invalid flags before anything is measured."""
    check_backends(FLAGS.backend)
    try:
        re.compile(FLAGS.sweep_matching)
    except re.error as error:
        limit = f"a regular expression: {error}"
        raise ConfigError("--sweep_matching", FLAGS.sweep_matching, limit) from error
    if FLAGS.sweep_matching and not FLAGS.sweep:
        raise ConfigError("--sweep_matching", FLAGS.sweep_matching, "left out without --sweep")
    if chosen_baselines(FLAGS.peers) and FLAGS.kv_dtype is not None:
        raise AttentionArgumentError("--peers", FLAGS.peers, f"none reads pages of {FLAGS.kv_dtype}")
    if chosen_baselines(FLAGS.peers) and any(case.window is not None for case in cases):
        raise AttentionArgumentError("--peers", FLAGS.peers, "none has windows; leave out --window")
    for case in cases:
        chosen_backends(FLAGS.backend, case, FLAGS.dtype, FLAGS.kv_dtype)
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))


def main() -> int:
    """Print results case by case, then the document."""
    began = time.perf_counter()
    found = cases()
    check_flags(found)
    is_gpu = jax.default_backend() == "gpu"
    num_bytes, matrix_size = _CEILING_SIZES_GPU if is_gpu else _CEILING_SIZES_ELSEWHERE
    ceilings = measure_ceilings(
        num_bytes=num_bytes, matrix_size=matrix_size, dtype=FLAGS.dtype, repeats=FLAGS.repeats
    )
    itemsize = jnp.dtype(FLAGS.dtype).itemsize
    # Not earlier: JAX allocates its memory on first use.
    check_torch_has_room(chosen_baselines(FLAGS.peers), max(case.kv_bytes for case in found) * itemsize // 2)
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
        print(f"skipped because of --time_limit_s: {', '.join(left_out)}")
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
    # Block sizes that are only tried may need more shared memory than the device has.
    ours = [result for result in results if not (result.is_peer or result.is_tried)]
    is_right = not num_mismatches and all(result.timing is not None for result in ours)
    return 0 if is_right else EXIT_FAILED


def peer_versions() -> dict[str, str]:
    """Return the versions of the installed packages of baselines, without importing them."""
    found = {}
    for package in _BASELINE_PACKAGES if chosen_baselines(FLAGS.peers) else ():
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def define_flags() -> None:
    flags.DEFINE_list("cases", None, "Names, or 'all'; default: all on a GPU, tiny elsewhere.")
    flags.DEFINE_list("backend", ["auto"], f"Our back ends to time: auto, all, {', '.join(BACKENDS)}.")
    flags.DEFINE_list("window", ["none"], "Windows of every case: none, or numbers of keys.")
    flags.DEFINE_list("peers", [], f"Baselines to time: all, jax, torch, {', '.join(BASELINES)}.")
    flags.DEFINE_bool("sweep", False, "Also time our kernel with many block sizes.")
    flags.DEFINE_string("sweep_matching", "", "Regular expression on the printed names of --sweep's sizes.")
    flags.DEFINE_string("plot", None, "File for the roofline plot, e.g. roofline.png; needs matplotlib.")
    flags.DEFINE_enum("dtype", "bfloat16", list(TOLERANCE), "Data type of queries and pages.")
    flags.DEFINE_enum("kv_dtype", None, KV_DTYPES, "Data type of pages; default: --dtype.")
    flags.DEFINE_integer("seed", 0, "Seed of pages and values.", lower_bound=0)
    flags.DEFINE_float(
        "target_ms", 40.0, "Approximate device time of one timed call (ms).", lower_bound=0.001
    )
    flags.DEFINE_float(
        "time_limit_s",
        None,
        "Start no case after this many seconds; the document stays complete.",
        lower_bound=0.0,
    )
    flags.DEFINE_integer("repeats", 5, "Number of timed calls; the median is reported.", lower_bound=1)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
