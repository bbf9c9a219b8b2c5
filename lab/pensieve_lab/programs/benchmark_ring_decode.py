"""Times attention of a padded batch's steps: the kernel that reads each row's own columns, and plain XLA.

    python -m pensieve_lab.programs.benchmark_ring_decode --sweep

- Rings have several shapes, with all rows as long as the ring, and with rows of mixed lengths.
- Ceilings of this device, reading alone and copying, are measured in the same run.
- `--sweep` adds other blocks, and then other numbers of parts in the best block.

Before it is timed, every answer is compared with plain XLA's, which is compared with numpy's for one row. NaN
in free columns must not change a bit of the kernel's answer. A timed round has several layers, whose live
columns together are larger than any cache. A layer's query is the previous layer's answer, and a round starts
with the previous round's result; figures are per layer. A time below the bound of reading is rejected: the
kernel must read the live columns, and plain XLA the whole ring. The last line is one JSON document (see
`--json`). Exit status 1 if an answer is wrong or fails, except for blocks that are only tried; 2 for invalid
flags. Without a GPU the kernel is interpreted, which shows whether it is right, but not how fast.
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from pallas_kernels.ragged_paged_attention import AttentionArgumentError
from pallas_kernels.ring_decode import DecodeBlock, default_block, device_limit
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_lab.kernels.cases import TOLERANCE, MismatchError
from pensieve_lab.kernels.ring_cases import (
    CASES,
    LARGE,
    TINY,
    RingCase,
    RingInputs,
    difference,
    expected_answer,
    make_inputs,
    poisoned,
)
from pensieve_lab.kernels.ring_rounds import RingRounds
from pensieve_lab.kernels.timing import KERNEL_ERRORS, Timing
from pensieve_lab.steps.ceilings import Ceilings, measure_ceilings

FLAGS = flags.FLAGS
# Bytes of the array that is read, and size of the square matrices that are multiplied.
_CEILING_SIZES_GPU = (4 << 30, 8192)
_CEILING_SIZES_ELSEWHERE = (32 << 20, 256)
# A time this far below its bound cannot have read all data: caches hold at most a fifth of a round.
_MAX_SHARE = 1.25
# block_kv, num_warps, num_stages, whole_loop; sizes that fit shared memory for 16-bit heads of 128.
_SWEEP = (
    (32, 4, 4, True), (64, 4, 3, True), (64, 8, 3, True), (128, 4, 2, True), (128, 8, 2, True),
    (128, 4, 3, False), (256, 4, 1, True), (256, 8, 1, True),
)  # fmt: skip
_SPLITS = (1, 2, 4, 8, 16, 32)
_MIN_PART_COLUMNS = 64  # minimum columns of a part in a full row; limits the number of parts
UNITS = {
    "time_us": "median microseconds of one layer",
    "live_bytes": "bytes of keys and values that rows attend to, per layer",
    "ring_bytes": "bytes of all keys and values, per layer",
    "live_bound_us": "lower bound in microseconds per layer, by the ceilings, if live columns are read",
    "ring_bound_us": "the same if the whole ring is read, as plain XLA does",
    "gb_per_s": "1e9 live bytes/s",
    "ring_gb_per_s": "1e9 bytes/s of the whole ring; only plain XLA reads all of it",
    "share_of_read": "live bytes/s over the device's bytes/s of reading alone",
    "share_of_copy": "live bytes/s over the device's bytes/s of copying, read and written",
    "xla_over": "time of plain XLA in this run / time",
    "max_error": "largest difference from plain XLA, absolute up to 1 and relative above",
    "ceilings": "byte/s and FLOP/s, measured in this run",
}
_COLUMNS = (
    *("case", "kernel", "us", "live MB", "at least, us", "ring MB", "at least, us", "GB/s", "of reading"),
    *("of copying", "XLA / this", "error", ""),
)


class Measured(NamedTuple):
    """Result of one implementation on one case.

    Attributes:
      case: the case.
      block: block of the kernel; None means plain XLA.
      is_tried: whether the block differs from the kernel's default.
      itemsize: bytes per number.
      num_layers: layers per round.
      max_error: difference from plain XLA; None if there was no answer.
      timing: timing of a round; None if the answer was missing or wrong.
      reason: why there is no timing.
    """

    case: RingCase
    block: DecodeBlock | None
    is_tried: bool
    itemsize: int
    num_layers: int
    max_error: float | None = None
    timing: Timing | None = None
    reason: str = ""

    @property
    def seconds(self) -> float:
        """Seconds per layer; infinity without a timing, so that it sorts last."""
        return float("inf") if self.timing is None else self.timing.seconds / self.num_layers

    def least_s(self, ceilings: Ceilings, *, whole_ring: bool) -> float:
        """Return the lower bound of one layer, by the device's ceilings."""
        return self.case.work(self.itemsize, whole_ring=whole_ring).seconds(ceilings)

    @property
    def label(self) -> str:
        """Columns per iteration, warps, stages, parts; "m" if all iterations are masked."""
        if self.block is None:
            return "xla"
        size, warps, stages, splits, whole = self.block
        return f"{size}w{warps}s{stages}/{splits}{'' if whole else 'm'}"

    def as_dict(self, ceilings: Ceilings, xla_s: float) -> dict[str, Any]:
        """Return the JSON object, which is also the source of the printed line."""
        found: dict[str, Any] = {
            "case": self.case.name,
            "kernel": "xla" if self.block is None else "pallas_triton",
            "label": self.label,
            "block": None if self.block is None else self.block._asdict(),
            "is_tried": self.is_tried,
            "live_bytes": self.case.live_bytes(self.itemsize),
            "ring_bytes": self.case.ring_bytes(self.itemsize),
            "live_bound_us": round(1e6 * self.least_s(ceilings, whole_ring=False), 2),
            "ring_bound_us": round(1e6 * self.least_s(ceilings, whole_ring=True), 2),
            "num_layers": self.num_layers,
        }
        if self.max_error is not None:  # JSON has no NaN
            found["max_error"] = self.max_error if np.isfinite(self.max_error) else None
        if self.timing is None:
            return found | {"reason": self.reason}
        rate = found["live_bytes"] / self.seconds
        return found | {
            "time_us": round(1e6 * self.seconds, 2),
            "gb_per_s": round(1e-9 * rate, 1),
            "ring_gb_per_s": round(1e-9 * found["ring_bytes"] / self.seconds, 1),
            "share_of_read": round(rate / ceilings.read_bytes_per_s, 4),
            "share_of_copy": round(rate / ceilings.copy_bytes_per_s, 4),
            "xla_over": round(xla_s / self.seconds, 3) if np.isfinite(xla_s) else None,
            "num_iterations": self.timing.num_iterations,
            "timed_by": self.timing.timed_by,
        }


def measure(
    inputs: RingInputs, block: DecodeBlock | None, expected: jax.Array, ceilings: Ceilings, *, is_tried: bool
) -> Measured:
    """Measure one implementation on one case; the result holds any failure."""
    case, itemsize = inputs.case, inputs.q.dtype.itemsize
    found = Measured(case, block, is_tried, itemsize, len(inputs.layers))
    rounds = RingRounds.of(inputs, block)
    answer = jax.jit(rounds.attend)
    try:
        out = answer(inputs.q, *inputs.layers[0], inputs.place, inputs.num_columns)
        error = difference(out, expected)
        found = found._replace(max_error=error)
        if not error < TOLERANCE[FLAGS.dtype]:
            return found._replace(reason=f"wrong: differs by {error:.1e}")
        if block is not None and case.windows != "full" and not is_tried:
            holed = poisoned(inputs)
            again = answer(holed.q, *holed.layers[0], holed.place, holed.num_columns)
            if not bool((again == out).all()):
                return found._replace(reason="wrong: free columns that are NaN change the answer")
        timing = rounds.time(1e-3 * FLAGS.target_ms, FLAGS.repeats)
    except AttentionArgumentError:
        raise
    except KERNEL_ERRORS as failure:  # continue with the others
        line = (str(failure).splitlines() or [""])[0][:150]
        return found._replace(reason=f"failed: {type(failure).__name__}: {line}")
    least_s = found.num_layers * found.least_s(ceilings, whole_ring=block is None)
    if timing.seconds * _MAX_SHARE <= least_s:
        read = "the whole ring" if block is None else "live columns"
        return found._replace(reason=f"not plausible: reading {read} takes {least_s:.2e} s; {timing}")
    return found._replace(timing=timing)


def run_case(case: RingCase, ceilings: Ceilings) -> tuple[list[Measured], list[dict[str, Any]]]:
    """Measure plain XLA, the kernel, and with `--sweep` other blocks; print each at once."""
    is_small = jax.default_backend() != "gpu"
    inputs = make_inputs(case, FLAGS.dtype, FLAGS.seed, is_small=is_small)
    expected = expected_answer(inputs)
    results: list[Measured] = []
    documents: list[dict[str, Any]] = []

    def add(block: DecodeBlock | None, *, is_tried: bool = True) -> None:
        if any(result.block == block for result in results):
            return
        result = measure(inputs, block, expected, ceilings, is_tried=is_tried)
        results.append(result)
        documents.append(result.as_dict(ceilings, results[0].seconds))
        print("  ".join(map(str, row_of(documents[-1]))).rstrip(), flush=True)

    add(None, is_tried=False)
    by_itself = default_block(
        batch=case.batch,
        num_kv_heads=case.heads.num_kv_heads,
        length=case.length,
        head_dim=case.heads.head_dim,
        itemsize=inputs.q.dtype.itemsize,
    )
    add(by_itself, is_tried=False)
    if FLAGS.sweep:
        for size, num_warps, num_stages, whole_loop in _SWEEP:
            add(DecodeBlock(size, num_warps, num_stages, by_itself.num_splits, whole_loop))
        best = min(results[1:], key=lambda result: result.seconds).block
        assert best is not None
        for num_splits in _SPLITS:
            if num_splits * _MIN_PART_COLUMNS <= case.length:
                add(best._replace(num_splits=num_splits))
    return results, documents


def row_of(figures: dict[str, Any]) -> list[object]:
    """Format a row under `_COLUMNS`."""
    start = [figures["case"], figures["label"]]
    if "time_us" not in figures:
        return [*start, *[""] * (len(_COLUMNS) - 3), figures["reason"]]
    over = "" if figures["xla_over"] is None else f"{figures['xla_over']:.2f}"
    return [
        *start,
        f"{figures['time_us']:.1f}",
        f"{1e-6 * figures['live_bytes']:.1f}",
        f"{figures['live_bound_us']:.1f}",
        f"{1e-6 * figures['ring_bytes']:.1f}",
        f"{figures['ring_bound_us']:.1f}",
        f"{figures['gb_per_s']:.0f}",
        f"{figures['share_of_read']:.1%}",
        f"{figures['share_of_copy']:.1%}",
        over,
        f"{figures['max_error']:.0e}",
        "tried" if figures["is_tried"] else "",
    ]


def cases() -> list[RingCase]:
    """Return the cases of `--cases`; raises AttentionArgumentError for unknown names."""
    default = LARGE if jax.default_backend() == "gpu" else TINY
    names = list(FLAGS.cases or default)
    unknown = sorted(set(names) - set(CASES))
    if unknown:
        raise AttentionArgumentError("--cases", unknown, f"known are {sorted(CASES)}")
    return [CASES[name] for name in names]


def main() -> int:
    """Print results case by case, then all of them as a table, then the document."""
    began = time.perf_counter()
    found = cases()
    is_gpu = jax.default_backend() == "gpu"
    if is_gpu and (limit := device_limit("pallas_triton", jax.devices()[0])) is not None:
        raise AttentionArgumentError("device", device_name(), limit)
    num_bytes, matrix_size = _CEILING_SIZES_GPU if is_gpu else _CEILING_SIZES_ELSEWHERE
    ceilings = measure_ceilings(
        num_bytes=num_bytes, matrix_size=matrix_size, dtype=FLAGS.dtype, repeats=FLAGS.repeats
    )
    read, copy = (1e-12 * one for one in ceilings[:2])
    print(f"{device_name()}, {FLAGS.dtype}; reading {read:.2f} TB/s, copying {copy:.2f} TB/s", flush=True)
    results: list[Measured] = []
    documents: list[dict[str, Any]] = []
    left_out, num_mismatches = [], 0
    for case in found:
        if FLAGS.time_limit_s is not None and time.perf_counter() - began > FLAGS.time_limit_s:
            left_out.append(case.name)
            continue
        try:
            of_case = run_case(case, ceilings)
        except MismatchError as error:
            num_mismatches += 1
            print(f"error: {error}", file=sys.stderr)
            continue
        results += of_case[0]
        documents += of_case[1]
    print(table(_COLUMNS, map(row_of, documents)))
    if left_out:
        print(f"skipped because of --time_limit_s: {', '.join(left_out)}")
    document = {
        "dtype": FLAGS.dtype,
        "platform": jax.devices()[0].client.platform_version,
        "ceilings": ceilings._asdict(),
        "cases": {
            case.name: {"num_columns": case.num_columns.tolist(), "length": case.length, **vars(case.heads)}
            for case in found
        },
        "left_out": left_out,
        "measurements": documents,
    }
    print_document(json_line("ring_decode_attention", document, units=UNITS, device=device_name()))
    is_right = not num_mismatches and all(one.timing is not None for one in results if not one.is_tried)
    return 0 if is_right else EXIT_FAILED


def define_flags() -> None:
    flags.DEFINE_list(
        "cases",
        None,
        f"Cases from {', '.join(CASES)}; default: the tiny ones without a GPU, else the others.",
    )
    flags.DEFINE_bool("sweep", False, "Also time the kernel with other blocks and numbers of parts.")
    flags.DEFINE_enum("dtype", "bfloat16", list(TOLERANCE), "Data type of queries, keys and values.")
    flags.DEFINE_integer("seed", 0, "Seed of values.")
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
