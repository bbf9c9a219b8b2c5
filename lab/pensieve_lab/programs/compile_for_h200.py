"""Compiles kernels and steps for an NVIDIA H200 on a machine without a GPU, and prints what compilers say.

    pip install --no-deps --target=/tmp/cuda jax-cuda13-pjrt==0.11.2
    python -m pensieve_lab.programs.compile_for_h200 --cuda_plugin=/tmp/cuda

XLA, Mosaic and ptxas run as on a device, so a kernel that does not fit is refused here. The table has a line
for each kernel: registers of a thread, bytes that it spills, shared memory of a program, and the temporaries
of the program that the kernel belongs to. Nothing is timed, and XLA does not try variants, so it may choose
other products than on a GPU.

The plugin must have the version of the installed jaxlib. Exit status 1 if a compiler refuses something, or
with `--fail_on_spills` if a kernel spills. The last line is one JSON document (see `--json`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from absl import flags

from model_defs import PRESETS
from pallas_kernels.attention_names import KV_DTYPES
from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_jax.config import WEIGHTS_DTYPES
from pensieve_lab.common.list_flags import numbers
from pensieve_lab.compile_only.figures import ProgramFigures, compiled_figures, printed
from pensieve_lab.compile_only.gpu import PLUGIN_VARIABLE, compile_only_device, find_plugin
from pensieve_lab.compile_only.subjects import KINDS, Subject, Wanted, subjects

FLAGS = flags.FLAGS
_REFUSALS = (jax.errors.JaxRuntimeError, ValueError, NotImplementedError)
_COLUMNS = ["program", "kernel", "registers", "spill stores", "spill loads", "shared, B", "temporaries, B"]
_UNITS = {
    "registers": "registers of a thread",
    "*_bytes": "bytes: of a thread for spills and the stack, of a kernel's program for shared memory, of the "
    "device for the rest",
    "compile_s": "seconds on this machine, without lowering",
}


def wanted() -> Wanted:
    """Return what the flags name; raises ConfigError."""
    tokens = numbers("--tokens", FLAGS.tokens)
    if not tokens:
        raise ConfigError("--tokens", "", "at least one number of tokens")
    unknown = sorted(set(FLAGS.kinds) - {*KINDS})
    if unknown or not FLAGS.kinds:
        raise ConfigError("--kinds", ",".join(FLAGS.kinds), f"one or more of {', '.join(KINDS)}")
    model = dataclasses.replace(PRESETS[FLAGS.model], num_layers=FLAGS.num_layers)
    return Wanted(model, tokens, FLAGS.kv_dtype, FLAGS.weights_dtype)


def compile_one(subject: Subject) -> dict[str, Any]:
    """Compile a subject; return its figures, or the compiler's error."""
    try:
        with printed():  # lowering says where it looks for ptxas
            lowered = subject.lower()
        found: ProgramFigures = compiled_figures(lowered)
    except _REFUSALS as error:  # the others are compiled all the same
        return {"program": subject.name, "error": f"{type(error).__name__}: {str(error)[:500]}"}
    return {"program": subject.name, **found.as_dict()}


def rows_of(found: dict[str, Any]) -> list[list[object]]:
    """Return the lines of the table for one program."""
    if "error" in found:
        return [[found["program"], found["error"].splitlines()[0][:60], "", "", "", "", ""]]
    names = ("name", "registers", "spill_store_bytes", "spill_load_bytes", "shared_bytes")
    kernels = [[one[name] for name in names] for one in found["kernels"]] or [["none of its own", *[""] * 4]]
    return [[found["program"], *kernel, found["temp_bytes"]] for kernel in kernels]


def main() -> int:
    asked = wanted()
    device = compile_only_device(find_plugin(FLAGS.cuda_plugin))
    jax.config.update("jax_disable_most_optimizations", False)  # tests disable them to save time
    results: list[dict[str, Any]] = []
    for subject in subjects(device, asked, FLAGS.kinds):
        print(f"{subject.name} ...", flush=True)
        results.append(compile_one(subject))
    print(table(_COLUMNS, [row for found in results for row in rows_of(found)]))
    spilling = [
        f"{found['program']}: {kernel['name']}"
        for found in results
        for kernel in found.get("kernels", ())
        if kernel["spill_store_bytes"] or kernel["spill_load_bytes"]
    ]
    if spilling:
        print("spilled: " + "; ".join(spilling))
    document = {name: FLAGS[name].value for name in ("model", "kv_dtype", "weights_dtype", "num_layers")}
    document["programs"] = results
    print_document(json_line("compile_for_h200", document, units=_UNITS, device="compile only: NVIDIA H200"))
    is_refused = any("error" in found for found in results)
    return EXIT_FAILED if is_refused or (FLAGS.fail_on_spills and spilling) else 0


def define_flags() -> None:
    flags.DEFINE_string(
        "cuda_plugin",
        None,
        "Directory of the unpacked package jax-cuda13-pjrt. Default: that of the environment variable "
        f"{PLUGIN_VARIABLE}, or the installed package.",
    )
    flags.DEFINE_list("kinds", ["attention", "products"], f"What to compile: {', '.join(KINDS)}.")
    flags.DEFINE_enum("model", "llama2-13b-gqa10", list(PRESETS), "Preset whose shapes are compiled.")
    flags.DEFINE_integer("num_layers", 2, "Layers of a step; more take longer to compile.", lower_bound=1)
    flags.DEFINE_list("tokens", ["8", "32", "128"], "Tokens of a step, and rows of products.")
    flags.DEFINE_enum("kv_dtype", None, list(KV_DTYPES), "Format of pages; default: bfloat16.")
    flags.DEFINE_enum(
        "weights_dtype", None, WEIGHTS_DTYPES, "Format in 8 bits of the layers' weights; default: bfloat16."
    )
    flags.DEFINE_bool("fail_on_spills", False, "Exit with status 1 if a kernel spills registers.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
