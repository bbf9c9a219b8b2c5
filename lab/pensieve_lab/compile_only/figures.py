"""What compilers say of a program for the compile-only device: kernel by kernel, and its temporary memory.

Owns: reading what ptxas prints, and the launches of Mosaic kernels in a lowered program.
Does not know: where the device comes from, or what is compiled.

The compilers print from C++, so both streams of the process are redirected while one compiles.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect
from jaxlib.mlir import ir

_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_SHARED = re.compile(r"(\d+) bytes smem")
_SUFFIX = "_mosaic_gpu_kernel"
_HOST_FUNCTION = re.compile(r'sym_name = "(\w+)_mosaic_gpu"')
_MOSAIC_CALLS = ("mosaic_gpu_v2",)


class Launch(NamedTuple):
    """A Mosaic kernel in a lowered program: its name, and its dynamic shared memory in bytes."""

    name: str
    shared_bytes: int


@dataclass(frozen=True)
class KernelFigures:
    """What ptxas says of a kernel.

    Attributes:
      name: name of the kernel.
      registers: registers of a thread. Where warpgroups exchange registers it is their mean.
      spill_store_bytes: bytes that a thread stores because registers do not suffice.
      spill_load_bytes: bytes that it loads again.
      stack_bytes: bytes of its stack, which spilled values take.
      shared_bytes: shared memory of a program: static, and dynamic for Mosaic kernels.
    """

    name: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int

    @property
    def spills(self) -> bool:
        """Whether a thread has too few registers."""
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


@dataclass(frozen=True)
class ProgramFigures:
    """What compiling a program gave.

    Attributes:
      kernels: each kernel once. A Mosaic kernel that this process has compiled before is missing.
      temp_bytes: memory of temporaries on the device.
      argument_bytes, output_bytes: memory of arguments and results.
      compile_s: seconds of compiling, without lowering.
    """

    kernels: tuple[KernelFigures, ...]
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    compile_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def compiled_figures(lowered: jax.stages.Lowered) -> ProgramFigures:
    """Compile a program that was lowered for the compile-only device.

    Raises:
      jax.errors.JaxRuntimeError: a compiler refuses it, such as for too much shared memory.
    """
    launches = mosaic_launches(lowered)
    began_s = time.perf_counter()
    with printed() as text:
        compiled = lowered.compile({"xla_gpu_autotune_level": 0})
    compile_s = time.perf_counter() - began_s
    memory: Any = compiled.memory_analysis()
    return ProgramFigures(
        kernel_figures("".join(text), launches),
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        compile_s,
    )


def kernel_figures(text: str, launches: list[Launch]) -> tuple[KernelFigures, ...]:
    """Return each kernel of ptxas' output once, with the shared memory of `launches`, in order of names."""
    dynamic: dict[str, int] = {}  # of several kernels of one name, the most
    for launch in launches:
        dynamic[launch.name] = max(launch.shared_bytes, dynamic.get(launch.name, 0))
    found = set()
    for entry in _ENTRY.finditer(text):
        name, shared = entry["name"].removesuffix(_SUFFIX), _SHARED.search(entry["rest"])
        found.add(
            KernelFigures(
                name,
                int(entry["registers"]),
                int(entry["stores"]),
                int(entry["loads"]),
                int(entry["stack"]),
                dynamic.get(name, int(shared[1]) if shared else 0),
            )
        )
    return tuple(sorted(found, key=lambda one: (one.name, one.registers, one.shared_bytes)))


def mosaic_launches(lowered: jax.stages.Lowered) -> list[Launch]:
    """Return the Mosaic kernels of a lowered program."""
    module: Any = lowered.compiler_ir()
    found = []
    for operation in _operations(module.operation):
        if operation.name != "stablehlo.custom_call":
            continue
        if ir.StringAttr(operation.attributes["call_target_name"]).value not in _MOSAIC_CALLS:
            continue
        config = {part.name: part.attr for part in operation.attributes["mhlo.backend_config"]}
        found += _launches(ir.StringAttr(config["module"]).value_bytes)
    return found


def _launches(code: bytes) -> list[Launch]:
    """Return the launches of a Mosaic module; the shared memory is the last operand of each."""
    context = mlir._create_ir_context()  # `make_ir_context` may return one that is in use
    context.allow_unregistered_dialects = True
    mosaic_gpu_dialect.register_dialect(context)
    with context:
        module = ir.Module.parse(code)
        names = _HOST_FUNCTION.findall(str(module.operation))
        sizes = [
            ir.IntegerAttr(operation.operands[-1].owner.attributes["value"]).value
            for operation in _operations(module.operation)
            if operation.name.endswith("gpu.launch")
        ]
        return [Launch(names[0] if names else "", size) for size in sizes]


def _operations(operation: Any) -> Iterator[Any]:
    """Yield all operations inside one, at any depth."""
    for region in operation.regions:
        for block in region.blocks:
            for one in block.operations:
                yield one.operation
                yield from _operations(one.operation)


@contextlib.contextmanager
def printed() -> Iterator[list[str]]:
    """Collect what the process prints to both streams, also from C++; the list is filled at the end."""
    text: list[str] = []
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    numbers = 1, 2
    kept = [os.dup(number) for number in numbers]
    with tempfile.TemporaryFile() as file:
        try:
            for number in numbers:
                os.dup2(file.fileno(), number)
            yield text
        finally:
            for number, one in zip(numbers, kept, strict=True):
                os.dup2(one, number)
                os.close(one)
            file.seek(0)
            text.append(file.read().decode("utf-8", "replace"))
