"""Times steps of a tensor-parallel model, by variants of the all-reduce and of kernel launches.

    python -m pensieve_lab.programs.profile_parallel --model=random:llama2-70b --num_layers=16 \\
        --dtype=bfloat16
    python -m pensieve_lab.programs.profile_parallel --model=random:llama2-70b --dtype=bfloat16 --traces \\
        --json=out.json

The program measures:
- All-reduces alone, with the number of rows of each case: many in sequence, XLA's and this project's kernel.
- Decode steps and prompt steps, launched back to back as the engine does, and compared with the roofline
  bound. A trace puts the kernels of all devices on one time line: time by kernel, collectives, gaps, and how
  far apart the devices start a collective. `--traces` also lists the last kernels one by one.
- Memory of every device.

Each of `--variants` (`parallel.variants`) runs in its own process, since XLA reads its flags once. The
variants run one after the other, `--num_rounds` times, within `--budget_s`. `--num_layers` shortens the
model, so that a variant takes a minute. The layers take nearly all of the time, and the rest is the same for
all variants. The document (`--json=FILE`) is written after each variant, so a later failure loses nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import flags

from model_defs import PRESETS, make_mesh, preset
from model_defs.registry import resolve_dtype
from pensieve_jax import ConfigError
from pensieve_jax.commands.engine_flags import (
    TINY_MODEL,
    define_engine_flags,
    engine_config,
    model_limits,
    open_parts,
    refuse_sizes,
)
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.decoding.device.weights import serving_dtype
from pensieve_lab.common.list_flags import numbers
from pensieve_lab.parallel.case_flags import define_case_flags
from pensieve_lab.parallel.memory import devices_memory
from pensieve_lab.parallel.shared_steps import Cases, measure_steps
from pensieve_lab.parallel.sums import measure_sums
from pensieve_lab.parallel.timed_process import run_with_limit
from pensieve_lab.parallel.variants import VARIANTS, Variant
from pensieve_lab.steps.ceilings import measure_ceilings

FLAGS = flags.FLAGS
Figures = dict[str, Any]
UNITS = {"*_s": "seconds", "*_bytes_per_s": "bytes per second", "flop_per_s": "operations per second"}
_MIN_LEFT_S = 30.0  # a variant starts only if at least this time of the budget is left
_RANDOM = "random:"


def cut_model() -> None:
    """Shorten `--model` to `--num_layers` layers; raise ConfigError unless it is random:<preset>."""
    if FLAGS.num_layers is None:
        return
    name = FLAGS.model.removeprefix(_RANDOM)
    if not FLAGS.model.startswith(_RANDOM) or name not in PRESETS:
        raise ConfigError("--num_layers", FLAGS.num_layers, "left out: only random:<preset> can be shortened")
    short = f"{name}-{FLAGS.num_layers}-layers"
    PRESETS[short] = preset(name, num_layers=FLAGS.num_layers)
    FLAGS["model"].value = _RANDOM + short


def measure() -> Figures:
    """Measure everything in this process, as the flags say."""
    cut_model()
    refuse_sizes()
    decodes, prompts = numbers("--decodes", FLAGS.decodes), numbers("--prompts", FLAGS.prompts)
    cases = Cases(decodes, prompts, FLAGS.context_tokens)
    config = cases.sized(engine_config())
    model, _ = model_limits()
    num_devices = config.runner.tensor_parallel_size
    mesh, dtype = make_mesh(num_devices), resolve_dtype(serving_dtype(FLAGS.dtype), model)
    ceilings = measure_ceilings(
        num_bytes=FLAGS.ceiling_bytes,
        matrix_size=FLAGS.ceiling_matrix,
        dtype=dtype.name,
        repeats=FLAGS.num_repeats,
    )
    found: Figures = {"device": device_name(), "ceilings": ceilings._asdict()}
    if num_devices > 1:
        found["sums"] = measure_sums(
            mesh,
            (*decodes, *prompts),
            model.hidden_size,
            dtype,
            repeats=FLAGS.num_repeats,
            own=config.runner.all_reduce != "xla",
        )
    if not FLAGS.sums_only:
        start_s = time.perf_counter()
        parts = open_parts(config)
        found |= {"start_up_s": time.perf_counter() - start_s, "memory": devices_memory(mesh)}
        found["steps"] = measure_steps(
            parts,
            cases,
            ceilings,
            repeats=FLAGS.num_repeats,
            num_launches=FLAGS.num_launches,
            num_events=FLAGS.num_events if FLAGS.traces else 0,
        )
        found |= {"memory_analysis": parts.runner.memory_analysis(), "memory_after": devices_memory(mesh)}
        found["config"] = dataclasses.asdict(parts.config)
        parts.engine.close()
    return found


def in_rounds(names: list[str], num_rounds: int) -> list[tuple[str, str]]:
    """Return all variants, repeated `num_rounds` times: the name of each, and its name in the document."""
    counts = range(1, num_rounds + 1)
    return [(name, name if count == 1 else f"{name}_{count}") for count in counts for name in names]


def measure_in_process(name: str, variant: Variant, timeout_s: float) -> Figures:
    """Measure a variant in its own process; a failure is described in the result and not raised."""
    xla_flags = " ".join([os.environ.get("XLA_FLAGS", ""), *variant.xla_flags]).strip()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "document.json")
        command = [
            *(sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], *variant.engine_flags),
            *(f"--variants={name}", "--num_rounds=1", "--apart=false", f"--json={path}"),
        ]
        ended = run_with_limit(command, os.environ | {"XLA_FLAGS": xla_flags}, timeout_s)
        run_facts = {"wall_s": ended.wall_s, "xla_flags": xla_flags}
        # A process that wrote its results may still exit with an error; the results count.
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text(encoding="utf-8"))["results"]["variants"][name] | run_facts
        return run_facts | {"failed": ended.failed or "wrote no document", "output": ended.output}


def print_tables(figures: dict[str, Figures]) -> None:
    """Print a row per variant and case."""
    rows = []
    for name, one in figures.items():
        if "failed" in one:
            print(f"{name}: {one['failed']}\n{one.get('output', '')}")
        for size, sums in one.get("sums", {}).items():
            medians_s = {
                key.removesuffix("_s"): value["median"] for key, value in sums.items() if key[-2:] == "_s"
            }
            shown = ", ".join(f"{kernel} {1e6 * median_s:.1f}" for kernel, median_s in medians_s.items())
            verdict = "" if sums.get("is_right", True) else "WRONG"
            print(f"{name}: all-reduce of {size}, us: {shown} {verdict}")
        for case, step in one.get("steps", {}).items():
            exchanges = step["trace"].get("exchanges", {})
            rows.append(
                [
                    name,
                    case,
                    1e3 * step["step_s"]["median"],
                    1e3 * step["bound_s"],
                    step["share_of_bound"],
                    1e3 * exchanges.get("exchanged_s", 0.0),
                    1e3 * exchanges.get("waited_s", 0.0),
                ]
            )
    columns = ["variant", "step", "median, ms", "bound, ms", "bound/median", "collectives, ms", "skew, ms"]
    print(table(columns, rows))


def main() -> int:
    names = FLAGS.variants
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ConfigError("--variants", ",".join(unknown), f"among {', '.join(VARIANTS)}")
    found: dict[str, Figures] = {}
    start_s = time.perf_counter()
    for name, title in in_rounds(names, FLAGS.num_rounds):
        left_s = FLAGS.budget_s - (time.perf_counter() - start_s)
        if not FLAGS.apart:
            found[title] = measure()
        elif left_s < _MIN_LEFT_S:
            found[title] = {"failed": f"not started: {left_s:.0f} s were left"}
        else:
            found[title] = measure_in_process(name, VARIANTS[name], min(FLAGS.timeout_s, left_s))
        results = {"model": FLAGS.model, "dtype": FLAGS.dtype, "variants": found}
        devices = [one["device"] for one in found.values() if "device" in one]
        line = json_line("parallel", results, units=UNITS, device=", ".join(dict.fromkeys(devices)))
        if isinstance(FLAGS.json, Path):
            FLAGS.json.write_text(f"{line}\n", encoding="utf-8")
        print(f"{title}: done after {time.perf_counter() - start_s:.0f} s", flush=True)
    print_tables(found)
    print_document(line)
    return 0


def define_flags() -> None:
    flags.DEFINE_list("variants", ["default"], f"Variants from {', '.join(VARIANTS)}.")
    flags.DEFINE_integer("num_rounds", 1, "Number of times that all variants are run.", lower_bound=1)
    flags.DEFINE_bool("apart", True, "Run each variant in its own process, with its XLA flags.")
    flags.DEFINE_float("budget_s", 560.0, "Time limit of all variants together, in seconds.", lower_bound=1)
    flags.DEFINE_float("timeout_s", 280.0, "Time limit of one variant, in seconds.", lower_bound=1)
    define_case_flags()
    flags.DEFINE_integer("num_layers", None, "Layers of a random:<preset>; default: all.", lower_bound=1)
    flags.DEFINE_bool("traces", False, "List a step's kernels one by one.")
    flags.DEFINE_integer("num_events", 400, "Number of last kernels listed per device.", lower_bound=0)
    flags.DEFINE_bool("sums_only", False, "Time only all-reduces, without a model.")
    define_engine_flags(model=TINY_MODEL)
    FLAGS.set_default("tensor_parallel_size", 2)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
