"""All-reduce without a GPU: errors, memory layout, PTX, and processes in place of devices."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from model_defs import make_mesh
from pallas_kernels import all_reduce
from pallas_kernels.all_reduce import Affine, ExchangeMemory, SumArgumentError, peer_access, specs
from pallas_kernels.residual_norms import NormSpec
from tests.kernels.cross_lower import lower_for_cuda, mesh_of_gpus
from tests.kernels.test_jax_triton import can_lower

needs_extra = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the extra 'triton'"
)


RMS = NormSpec("rms", 0.5, jnp.float16)
_VECTORS = [np.linspace(start, 3, 16, dtype=np.float32) for start in (-2, 1, -1)]
AFFINES = {
    "rms": Affine(scale=_VECTORS[1]),
    "rms, a bias of the sum": Affine(*_VECTORS[:2]),
    "layer": Affine(*_VECTORS),
    "layer, not affine": Affine(),
}


def summed(partial, **changes):
    arguments = {"axis": "tp", "capacity": 4096, "backend": "xla"} | changes
    run = jax.shard_map(
        lambda x: all_reduce.sum_over_devices(x, jnp.zeros((1, 14), jnp.int32), **arguments),
        mesh=make_mesh(2), in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    return run(partial)


def test_by_xla():
    np.testing.assert_array_equal(summed(jnp.full((3, 16), 1.5)), np.full((3, 16), 3.0))


def normed(partial, affine=AFFINES["rms"], norm=RMS, *, shares, stream=None, **changes):
    """Sum and norm by XLA, on two devices with the same partial sums and a stream of ones."""
    num_rows, width = partial.shape
    arguments = {"axis": "tp", "backend": "xla", "capacity": 4096} | changes
    stream = jnp.ones((num_rows // 2 if shares else num_rows, width)) if stream is None else stream
    run = all_reduce.sum_and_norm_of_shares if shares else all_reduce.sum_and_norm
    split, whole = PartitionSpec("tp"), PartitionSpec()
    sharded = jax.shard_map(
        lambda x, affine: run(x, jnp.zeros((1, 14), jnp.int32), stream, affine, norm=norm, **arguments),
        mesh=make_mesh(2), in_specs=whole, out_specs=(split if shares else whole, whole), check_vma=False,
    )  # fmt: skip
    return jax.jit(sharded)(partial, affine)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("case", AFFINES)
def test_norms_by_xla(case, shares):
    """All rows, or each device's share; with a bias of the sum, and without optional arrays."""
    affine, kind = AFFINES[case], case.split(",")[0]
    partial = np.arange(64, dtype=np.float32).reshape(4, 16) ** 2
    stream, normed_rows = normed(partial, affine, RMS._replace(kind=kind), shares=shares)
    wide = 2 * partial if affine.sum_bias is None else 2 * partial + affine.sum_bias
    wide = wide + 1
    np.testing.assert_array_equal(stream, wide)
    wide = wide - wide.mean(axis=1, keepdims=True) if kind == "layer" else wide
    wide = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 0.5)
    wide = wide if affine.scale is None else wide * affine.scale
    wide = wide if affine.bias is None else wide + affine.bias
    np.testing.assert_allclose(normed_rows, wide, rtol=1e-3, atol=1e-5)
    assert normed_rows.dtype == jnp.float16


@pytest.mark.parametrize(
    ("shape", "changes", "says"),
    [
        ((3, 16), {}, "which divide the rows"),
        ((4, 12), {}, "a multiple of 8"),
        ((4, 16), {"stream": jnp.ones((4, 16))}, "the stream is float32.4, 16., but must be float32.2, 16."),
        ((4, 16), {"backend": "nccl"}, "backend is 'nccl', but must be one of"),
    ],
)
def test_shares_that_are_refused(shape, changes, says):
    with pytest.raises(SumArgumentError, match=says):
        normed(jnp.zeros(shape), **changes, shares=True)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stream": jnp.ones((2, 16), jnp.float16)}, "the stream is float16.2, 16., but must be float32"),
        ({"affine": Affine(jnp.ones(16, jnp.float16))}, "sum_bias is float16.*must be .16. of float32 by"),
        ({"affine": Affine(scale=jnp.ones(8))}, "scale is float32.8., but must be .16. of bfloat16 or"),
        ({"affine": Affine(bias=jnp.ones(16, int))}, "bias is int32.16., but must be .16. of bfloat16 or"),
        ({"norm": RMS._replace(kind="batch")}, "the norm is 'batch' in float16, but must be one of .*layer"),
        ({"norm": RMS._replace(dtype=jnp.int8)}, "the norm is 'rms' in int8, but must be one of .*layer"),
    ],
)
def test_norms_that_are_refused(changes, says, shares):
    with pytest.raises(SumArgumentError, match=says):
        normed(jnp.zeros((4, 16)), shares=shares, **changes)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((specs.MAX_ROWS + 1, 8), {}),
        ((3, 12), {}),
        ((0, 16), {}),
        ((3, specs.MAX_ROW_BYTES // 4 + 8), {"capacity": 1 << 30}),
        ((3, 16), {"capacity": 176}),
    ],
)
def test_unsupported_arguments_are_refused(shape, changes):
    with pytest.raises(SumArgumentError, match=r"partial sums are float32.* of 2 devices, but must be"):
        summed(jnp.zeros(shape), **changes)


def test_how_few_rows_are_sent_to_all():
    """Limits exist for every number of devices; the kernels' lanes are a power of two."""
    every_number = list(range(2, specs.MAX_DEVICES + 1))
    assert list(specs.FASTER_WHOLE) == list(specs.MAX_ROWS_BY_PEER_BUFFER) == every_number
    for num in every_number:  # a peer buffer has room for two shares
        assert specs.peer_buffer_rows(num) * num >= 2 * specs.MAX_ROWS_BY_PEER_BUFFER[num]
    assert specs.MAX_DEVICES & (specs.MAX_DEVICES - 1) == 0
    found = {rows: all_reduce.shares_are_faster(rows, 64, "float16", 4) for rows in (64, 66, 68, 1024)}
    assert found == {64: False, 66: False, 68: True, 1024: True}, "66 is not divided by four"
    assert not any(all_reduce.shares_are_faster(512, 64, "float16", num) for num in (1, 2))


def test_back_ends_have_names():
    with pytest.raises(SumArgumentError, match="backend is 'nccl', but must be one of"):
        summed(jnp.zeros((3, 16)), backend="nccl")
    assert "NVIDIA GPU" in all_reduce.devices_limit(jax.devices()[:2])


@pytest.mark.parametrize("supports", [all_reduce.supports, all_reduce.supports_shares])
def test_supported_sizes(supports):
    """Registers limit the bytes of a row; without rows devices would not synchronize."""
    assert supports(8, 16384, "bfloat16", 4) and supports(8, 8192, "float32", 4)
    assert not supports(8, 16392, "bfloat16", 4) and not supports(8, 8200, "float32", 4)
    assert not supports(0, 64, "bfloat16", 2) and not supports(8, 0, "bfloat16", 2)
    assert not supports(8, 64, "float64", 2) and not supports(8, 60, "float32", 2)
    assert not supports(8, 64, "float32", 1) and not supports(10, 64, "float32", 5)


@pytest.mark.parametrize("shares", [False, True])
def test_capacities_are_whole_words(shares):
    """Regions of peer buffers are then whole words for numbers of any size."""
    with pytest.raises(SumArgumentError, match="capacity is 4088, but must be a multiple of 16 bytes"):
        normed(jnp.zeros((4, 16)), shares=shares, capacity=4088)


class Driver:
    """Fake CUDA driver; two sets of pairs define peer access and peer atomics."""

    def __init__(self, reached, has_atomics):
        self.reached, self.has_atomics = reached, has_atomics

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, found, ordinal):
        found._obj.value = 10 + ordinal
        return 0 if ordinal < 4 else 101

    def cuDeviceCanAccessPeer(self, found, one, other):
        found._obj.value = (one - 10, other - 10) in self.reached
        return 0

    def cuDeviceGetP2PAttribute(self, found, attribute, one, other):
        found._obj.value = attribute == 3 and (one - 10, other - 10) in self.has_atomics
        return 0


BOTH = {(1, 3), (3, 1)}


@pytest.mark.parametrize(
    ("ordinals", "reached", "has_atomics", "limit"),
    [
        ((1, 3), BOTH, BOTH, None),
        ((1, 3), {(1, 3)}, BOTH, "GPU 3 does not reach the memory of GPU 1"),
        ((1, 3), BOTH, {(3, 1)}, "GPU 1 has no atomic operations on the memory of GPU 3"),
        ((1, 9), BOTH, BOTH, "GPU 1 does not reach the memory of GPU 9"),
    ],
)
def test_peer_access_and_atomics_are_required(ordinals, reached, has_atomics, limit, monkeypatch):
    monkeypatch.setattr(peer_access.ctypes, "CDLL", lambda name: Driver(reached, has_atomics))
    assert peer_access.peer_access_limit(ordinals) == limit


def test_without_a_driver_there_is_no_peer_access(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: not there")

    monkeypatch.setattr(peer_access.ctypes, "CDLL", missing)
    assert "libcuda.so.1: not there" in peer_access.peer_access_limit([0, 1])


def test_tables_have_the_addresses_of_all_devices():
    """Every device has its own row; alone each points to itself and waits for no peer."""
    memory = ExchangeMemory(make_mesh(2), 64, "float32", num_rows=4)
    assert memory.capacity == 1024 and memory.num_bytes == 2 * 1024 + 4 * specs.words_len(2)

    def rows():
        assert [shard.data.shape[0] for shard in memory.table.addressable_shards] == [1, 1]
        return np.asarray(memory.table).view(np.int64).tolist()

    for rank, (found_rank, status, *addresses) in enumerate(rows()):
        assert found_rank == rank
        assert len(set(addresses)) == 2 and addresses[2:] == [status, status]
    flags = np.asarray(memory.words)[:, specs.FLAGS : specs.handshakes_index(2)]
    assert flags.size == 2 * 2 * 2 * specs.MAX_PROGRAMS and (flags > 10**9).all()
    refs = [weakref.ref(array) for array in (memory.table, memory.words, memory._peer_buffers)]
    fill = memory._new_peer_buffers

    def fill_when_old_ones_are_gone():
        assert [ref() for ref in refs] == [None] * 3, "two may not fit"
        return fill()

    memory._new_peer_buffers = fill_when_old_ones_are_gone
    memory.renew()
    assert (np.asarray(memory._peer_buffers) == specs.EMPTY).all()
    first, second = rows()
    assert first[2:] == second[2:] and len(set(first[2:])) == 4
    assert [first[1], second[1]] == first[4:]
    assert not np.asarray(memory.words).any()
    shards = memory.words.addressable_shards
    assert [shard.data.unsafe_buffer_pointer() for shard in shards] == first[4:]


def compiled_ptx(kernel, constants, *, kind):
    """Compile for Hopper, four devices and bfloat16; check that rows are read and written in 16-byte words.

    A layer norm has all arrays, an RMS norm only its scale. A loss is reported to devices one by one.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels.all_reduce.jax_triton import num_warps

    pointers = dict.fromkeys(("partial", "sum_bias", "scale", "bias", "normed"), "bf16")
    pointers |= {"stream": "fp32", "table": "i32", "sum": "fp32" if kind else "bf16"}
    constants |= {"width": 8192, "block": 8192, "num_devices": 4, "eps": 1e-5, "limit": specs.LIMIT}
    is_layer = kind == "layer"
    constants |= {"is_layer": is_layer, "has_scale": True, "has_sum_bias": is_layer, "has_bias": is_layer}
    signature = {f"{name}_ptr": f"*{dtype}" for name, dtype in pointers.items()} | {"num_rows": "i32"}
    aligned = {(kernel.arg_names.index(f"{name}_ptr"),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    options = {"num_warps": num_warps(kernel, 8192), "ptx_version": 88, "enable_fp_fusion": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    for words in ("st.global.b16", "ld.global.cg.b16", "ld.global.b16", "ld.volatile.global.b16"):
        assert words not in ptx
    assert "st.global.v4.b32" in ptx
    return ptx


@needs_extra
@pytest.mark.parametrize("kind", [None, pytest.param("rms", marks=pytest.mark.long), "layer"])
def test_what_it_compiles_to(kind):
    """The numbers of four devices are polled together; the only flag that is sent reports a loss."""
    from pallas_kernels.all_reduce.peer_buffer_kernels import sum_of_rows

    constants = {"capacity": 512 * 8192, "norms": kind is not None}
    check_peer_buffers(compiled_ptx(sum_of_rows, constants, kind=kind), sum_of_rows, num_looks=1)


@needs_extra
@pytest.mark.parametrize("kind", [pytest.param("rms", marks=pytest.mark.long), "layer"])
def test_what_shares_by_peer_buffer_compile_to(kind):
    """The same, twice: for partial sums and for normed rows."""
    from pallas_kernels.all_reduce.peer_buffer_kernels import shares_by_peer_buffer

    constants = {"capacity": 512 * 8192}
    check_peer_buffers(
        compiled_ptx(shares_by_peer_buffer, constants, kind=kind), shares_by_peer_buffer, num_looks=2
    )


def check_peer_buffers(ptx, kernel, num_looks):
    """Check that all four devices' words of eight numbers are loaded before any is used."""
    from pallas_kernels.all_reduce.jax_triton import num_warps

    num_words = 8192 // 8 // (32 * num_warps(kernel, 8192))  # words of a thread in a row
    assert ptx.count("ld.volatile.global.v4.b32") == num_words * 4 * num_looks
    first, last = ptx.index("ld.volatile.global.v4.b32"), ptx.rindex("ld.volatile.global.v4.b32")
    if num_looks == 1:
        between = ptx[first:last]
        assert "setp" not in between and "bar.sync" not in between, "a look waits for the one before"
    assert ptx.count("atom.global.sys.release.exch.b32") == 4 * num_looks
    assert "acquire" not in ptx


@needs_extra
@pytest.mark.parametrize("kind", [pytest.param("rms", marks=pytest.mark.long), "layer"])
def test_what_shares_by_handshake_compile_to(kind):
    """Devices synchronize twice; each time one instruction sets all flags, one polls them, also in a loop."""
    from pallas_kernels.all_reduce.handshake_kernels import shares_by_handshake

    ptx = compiled_ptx(shares_by_handshake, {}, kind=kind)
    assert "ld.global.cg.v4.b32" in ptx
    assert ptx.count("atom.global.sys.release.exch.b32") == 5 * 2
    assert ptx.count("atom.global.sys.acquire.add.u32") == 2 * 2


@pytest.mark.long
@needs_extra
@pytest.mark.parametrize("num_devices", ["2", "3", "4"])
def test_devices_that_are_processes(num_devices):
    """They synchronize at their own pace, and a device without peers does not wait forever."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.kernels.all_reduce_peers", num_devices]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=700)
    assert done.returncode == 0, f"after {done.stdout}:\n{done.stderr}"


def lowered(run, num_rows, of_stream, out_specs):
    """Lower `run(partial, table, stream, affine)` for two GPUs, with all arrays present."""
    mesh, split, whole = mesh_of_gpus(2), PartitionSpec("tp"), PartitionSpec()
    shapes = [
        jax.ShapeDtypeStruct((2, num_rows, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 2 * specs.table_len(2)), jnp.int32),
        jax.ShapeDtypeStruct((num_rows, 256), jnp.float32),
        Affine(*[jax.ShapeDtypeStruct((256,), jnp.bfloat16)] * 3),
    ]
    sharded = jax.shard_map(
        lambda part, *rest: run(part[0], *rest), mesh=mesh, in_specs=(split, split, of_stream, whole),
        out_specs=out_specs, check_vma=False,
    )  # fmt: skip
    return lower_for_cuda(sharded, *shapes, mesh=mesh)


LAYER = NormSpec("layer", 1e-5, jnp.bfloat16)


@pytest.mark.long
@can_lower
@pytest.mark.parametrize("norms", [False, True])
def test_it_lowers_inside_shard_map(norms):
    """A sum is one launch, with or without stream and norm; the table is passed unchanged."""
    arguments = {"axis": "tp", "capacity": 512 * 256 * 2}

    def run(part, table, stream, affine):
        if not norms:
            return all_reduce.sum_over_devices(part, table, **arguments)
        return all_reduce.sum_and_norm(part, table, stream, affine, norm=LAYER, **arguments)

    text = lowered(run, 32, PartitionSpec(), PartitionSpec())
    assert text.count("@triton_kernel_call_ffi") == 1 and "all_reduce" not in text


@pytest.mark.long
@can_lower
@pytest.mark.parametrize("num_rows", [64, 1024])
def test_shares_lower_inside_shard_map(num_rows):
    """Both kernels are one launch and nothing else."""
    split, whole = PartitionSpec("tp"), PartitionSpec()
    arguments = {"norm": LAYER, "axis": "tp", "capacity": 512 * 256 * 2}
    run = functools.partial(all_reduce.sum_and_norm_of_shares, **arguments)
    text = lowered(run, num_rows, split, (split, whole))
    assert text.count("@triton_kernel_call_ffi") == 1
    assert "all_gather" not in text and "reduce_scatter" not in text


@needs_extra
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("missing", [(), ("sum_bias", "bias"), Affine._fields])
def test_launch_arguments_describe_the_norm(missing, kind, monkeypatch):
    """They name the norm and its present arrays, each in its position."""
    from pallas_kernels.all_reduce import jax_triton

    affine = Affine(*jnp.ones((3, 16)))._replace(**dict.fromkeys(missing))
    norm = RMS._replace(kind=kind, dtype=jnp.float32)
    for add_up, stream in (
        (jax_triton.triton_sum_and_norm, jnp.ones((4, 16))),
        (jax_triton.triton_shares, jnp.ones((2, 16))),
    ):
        arrays, named = launched(monkeypatch, add_up, stream, affine, norm=norm, capacity=256)
        assert named["capacity"] == 64, "numbers, of four bytes each"
        found = dict(zip(named["kernel"].arg_names, arrays, strict=False))
        assert found["partial_ptr"] is PARTIAL and found["stream_ptr"] is stream
        assert (named["is_layer"], named["eps"]) == (kind == "layer", 0.5)
        for name, array in affine._asdict().items():
            assert named[f"has_{name}"] == (name not in missing)
            assert name in missing or found[f"{name}_ptr"] is array


PARTIAL = jnp.zeros((4, 16))


def launched(monkeypatch, add_up, stream, affine, *, partial=PARTIAL, **arguments):
    """Return the arguments of a launch on two devices."""
    from pallas_kernels.all_reduce import jax_triton

    calls = []
    monkeypatch.setattr(
        jax_triton.jax_triton, "triton_call", lambda *arrays, **named: calls.append((arrays, named))
    )
    add_up(partial, jnp.zeros(14, jnp.int32), stream, affine, num_devices=2, **arguments)
    return calls.pop()


@needs_extra
@pytest.mark.parametrize(
    ("capacity", "dtype", "by_peer_buffer"),
    [(256, jnp.float32, True), (240, jnp.float32, False), (256, jnp.float16, False), (0, jnp.float32, False)],
)
def test_which_shares_go_through_peer_buffers(capacity, dtype, by_peer_buffer, monkeypatch):
    """Two shares must fit, and normed numbers be of the same size; in a handshake every program has rows."""
    from pallas_kernels.all_reduce import handshake_kernels, jax_triton, peer_buffer_kernels

    _, named = launched(
        monkeypatch, jax_triton.triton_shares, jnp.ones((2, 16)), Affine(), norm=RMS._replace(dtype=dtype),
        capacity=capacity,
    )  # fmt: skip
    kernel = (
        peer_buffer_kernels.shares_by_peer_buffer if by_peer_buffer else handshake_kernels.shares_by_handshake
    )
    assert named["kernel"] is kernel
    assert named["grid"] == (specs.NUM_PROGRAMS if by_peer_buffer else 2,)


@needs_extra
@pytest.mark.parametrize(("width", "block", "num_warps"), [(16, 32, 1), (1000, 1024, 2), (8192, 8192, 16)])
def test_no_two_threads_share_a_number(width, block, num_warps, monkeypatch):
    """A thread uses the numbers that it polled itself."""
    from pallas_kernels.all_reduce import jax_triton

    partial, stream = jnp.zeros((4, width)), jnp.ones((4, width))
    run = jax_triton.triton_sum_and_norm
    _, named = launched(monkeypatch, run, stream, Affine(), partial=partial, norm=RMS, capacity=16 * width)
    assert (named["block"], named["num_warps"]) == (block, num_warps)
