"""Sums over devices without a GPU: refusals, where memory lies, PTX, and devices that are processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from model_defs import make_mesh
from pallas_kernels import all_reduce
from pallas_kernels.all_reduce import ExchangeMemory, SumArgumentError, peers, specs
from tests.kernels.cross_lower import lower_for_cuda, mesh_of_gpus
from tests.kernels.test_jax_triton import can_lower

needs_extra = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the extra 'triton'"
)


def summed(partial, **changes):
    """By XLA, on two devices with the same partial sums."""
    arguments = {"axis": "tp", "capacity": 4096, "backend": "xla"} | changes
    run = jax.shard_map(
        lambda x: all_reduce.sum_over_devices(x, jnp.zeros((1, 14), jnp.int32), **arguments),
        mesh=make_mesh(2), in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    return run(partial)


def test_by_xla():
    np.testing.assert_array_equal(summed(jnp.full((3, 16), 1.5)), np.full((3, 16), 3.0))


def summed_in_shares(partial, **changes):
    """By XLA, on two devices with the same partial sums and a stream of ones."""
    num_rows, width = partial.shape
    arguments = {"axis": "tp", "eps": 0.0, "dtype": jnp.float16, "backend": "xla"} | changes
    shape = changes.pop("share", (num_rows // 2, width))
    arguments.pop("share", None)
    split, whole = PartitionSpec("tp"), PartitionSpec()
    run = jax.shard_map(
        lambda x: all_reduce.sum_and_norm_of_shares(
            x, jnp.zeros((1, 14), jnp.int32), jnp.ones(shape), jnp.ones(width), **arguments
        ),
        mesh=make_mesh(2), in_specs=whole, out_specs=(split, whole), check_vma=False,
    )  # fmt: skip
    return run(partial)


def test_shares_by_xla():
    stream, normed = summed_in_shares(jnp.arange(64.0).reshape(4, 16))
    expected = 1 + 2 * np.arange(64.0).reshape(4, 16)
    np.testing.assert_array_equal(stream, expected)
    inverse = 1 / np.sqrt((expected**2).mean(axis=1, keepdims=True))
    np.testing.assert_allclose(normed, (expected * inverse).astype(np.float16), rtol=1e-3)
    assert normed.dtype == jnp.float16


@pytest.mark.parametrize(
    ("shape", "changes", "says"),
    [
        ((3, 16), {}, "which divide the rows"),
        ((4, 12), {}, "a multiple of 8"),
        (
            (4, 16),
            {"share": (4, 16)},
            "share and scale are float32.4, 16. and .16., but must be float32.2, 16.",
        ),
        ((4, 16), {"backend": "nccl"}, "backend is 'nccl', but must be one of"),
    ],
)
def test_shares_that_are_refused(shape, changes, says):
    with pytest.raises(SumArgumentError, match=says):
        summed_in_shares(jnp.zeros(shape), **changes)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((specs.MAX_ROWS + 1, 8), {}),
        ((3, 12), {}),
        ((3, specs.MAX_WIDTH + 8), {"capacity": 10**9}),
        ((3, 16), {"capacity": 47}),
    ],
)
def test_what_is_not_served_is_refused(shape, changes):
    with pytest.raises(SumArgumentError, match=r"partial sums are float32.* of 2 devices, but must be"):
        summed(jnp.zeros(shape), **changes)


def test_back_ends_have_names():
    with pytest.raises(SumArgumentError, match="backend is 'nccl', but must be one of"):
        summed(jnp.zeros((3, 16)), backend="nccl")
    assert not all_reduce.serves(8, 64, 1) and not all_reduce.serves(8, 64, 5)
    assert "NVIDIA GPU" in all_reduce.devices_limit(jax.devices()[:2])


class Driver:
    """CUDA's, for GPUs that reach each other, and have atomics there, as the two sets of pairs say."""

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
def test_who_reaches_whom(ordinals, reached, has_atomics, limit, monkeypatch):
    monkeypatch.setattr(peers.ctypes, "CDLL", lambda name: Driver(reached, has_atomics))
    assert peers.peers_limit(ordinals) == limit


def test_without_a_driver_nobody_reaches_anybody(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: not there")

    monkeypatch.setattr(peers.ctypes, "CDLL", missing)
    assert "libcuda.so.1: not there" in peers.peers_limit([0, 1])


def test_tables_say_where_everybodys_memory_is():
    """Every device has its own row; alone each points to itself, and waits for nobody."""
    memory = ExchangeMemory(make_mesh(2), 64, "float32", max_rows=4)
    assert memory.capacity == 256 and memory.num_bytes == 2 * 2 * 256 * 4 + 4 * specs.words_len(2)

    def rows():
        assert [shard.data.shape[0] for shard in memory.table.addressable_shards] == [1, 1]
        return np.asarray(memory.table).view(np.int64).tolist()

    for rank, (found_rank, status, epochs, *addresses) in enumerate(rows()):
        assert (found_rank, epochs - status) == (rank, 4 * specs.epochs_place(2))
        assert len(set(addresses)) == 2 and addresses[2:] == [status, status]
    flags = np.asarray(memory.words)[:, specs.FLAGS : specs.epochs_place(2)]
    assert flags.size == 2 * 2 * 2 * specs.MAX_PROGRAMS and (flags > 10**9).all()
    memory.renew()
    first, second = rows()
    assert first[3:] == second[3:] and len(set(first[3:])) == 4
    assert [first[1], second[1]] == first[5:]
    assert not np.asarray(memory.words).any()
    shards = memory.words.addressable_shards
    assert [shard.data.unsafe_buffer_pointer() for shard in shards] == first[5:]


def compiled_ptx(kernel, constants, *, norms=True):
    """For Hopper, of bfloat16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"partial": "bf16", "stream": "fp32", "scale": "bf16", "normed": "bf16", "table": "i32"}
    pointers["sum"] = "fp32" if norms else "bf16"
    constants |= {"width": 8192, "block": 8192, "num_devices": 2, "eps": 1e-5, "limit": specs.LIMIT}
    signature = {f"{name}_ptr": f"*{dtype}" for name, dtype in pointers.items()} | {"num_rows": "i32"}
    aligned = {(kernel.arg_names.index(f"{name}_ptr"),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    options = {"num_warps": 8, "ptx_version": 88, "enable_fp_fusion": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "st.global.b16" not in ptx and "ld.global.cg.b16" not in ptx
    for instruction in ("atom.global.sys.release.exch.b32", "ld.global.cg.v4.b32", "st.global.v4.b32"):
        assert instruction in ptx, instruction
    assert "acquire" in ptx
    return ptx


@needs_extra
@pytest.mark.parametrize("norms", [False, True])
def test_what_it_compiles_to(norms):
    """Whole words to the peer, flags that are released and acquired across the system."""
    from pallas_kernels.all_reduce.jax_triton_kernels import sum_of_rows

    compiled_ptx(sum_of_rows, {"capacity": 512 * 8192, "norms": norms}, norms=norms)


@needs_extra
def test_what_shares_compile_to():
    """Likewise, in both directions."""
    from pallas_kernels.all_reduce.jax_triton_kernels import shares_of_rows

    assert compiled_ptx(shares_of_rows, {}).count("atom.global.sys.release.exch.b32") >= 2


@pytest.mark.long
@needs_extra
@pytest.mark.parametrize("num_devices", ["2", "3"])
def test_devices_that_are_processes(num_devices):
    """They meet at their own pace, and one that is left alone does not wait for ever."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.kernels.all_reduce_peers", num_devices]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"after {done.stdout}:\n{done.stderr}"


@pytest.mark.long
@can_lower
@pytest.mark.parametrize("norms", [False, True])
def test_it_lowers_inside_shard_map(norms):
    """One launch for a sum, with the stream and its norm or without; the table goes to it as it is."""
    mesh = mesh_of_gpus(2)
    arguments = {"axis": "tp", "capacity": 512 * 256}

    def run(part, table, stream, scale):
        if not norms:
            return all_reduce.sum_over_devices(part[0], table, **arguments)
        return all_reduce.sum_and_norm(
            part[0], table, stream, scale, eps=1e-5, dtype=jnp.bfloat16, **arguments
        )

    shapes = [
        jax.ShapeDtypeStruct((2, 32, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 2 * specs.table_len(2)), jnp.int32),
        jax.ShapeDtypeStruct((32, 256), jnp.float32),
        jax.ShapeDtypeStruct((256,), jnp.bfloat16),
    ]
    split, whole = PartitionSpec("tp"), PartitionSpec()
    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=(split, split, whole, whole), out_specs=whole, check_vma=False
    )
    text = lower_for_cuda(sharded, *shapes, mesh=mesh)
    assert text.count("@triton_kernel_call_ffi") == 1 and "all_reduce" not in text


@pytest.mark.long
@can_lower
def test_shares_lower_inside_shard_map():
    """One launch, and nothing beside it."""
    mesh = mesh_of_gpus(2)

    def run(part, table, share, scale):
        return all_reduce.sum_and_norm_of_shares(
            part[0], table, share, scale, axis="tp", eps=1e-5, dtype=jnp.bfloat16
        )

    shapes = [
        jax.ShapeDtypeStruct((2, 1024, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 2 * specs.table_len(2)), jnp.int32),
        jax.ShapeDtypeStruct((1024, 256), jnp.float32),
        jax.ShapeDtypeStruct((256,), jnp.bfloat16),
    ]
    split, whole = PartitionSpec("tp"), PartitionSpec()
    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=(split, split, split, whole), out_specs=(split, whole), check_vma=False
    )
    text = lower_for_cuda(sharded, *shapes, mesh=mesh)
    assert text.count("@triton_kernel_call_ffi") == 1
    assert "all_gather" not in text and "reduce_scatter" not in text
