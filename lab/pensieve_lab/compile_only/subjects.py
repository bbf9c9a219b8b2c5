"""What can be compiled for the compile-only device: attention, products of few rows, and programs of steps.

Owns: the subjects of a model, by name, and how each is lowered. Does not know: what compilers say of them.

A subject is lowered from shapes alone, as the engine would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from model_defs import ModelConfig, abstract_model, make_mesh
from model_defs.weight_formats import weight_format
from pallas_kernels import byte_matmul, decode_matmul
from pallas_kernels.ragged_paged_attention import page_dtype, page_shape, ragged_paged_attention, tile_spec
from pensieve_jax import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.device.exchange import Exchange
from pensieve_jax.device.kernel_choices import choose_kernels
from pensieve_jax.device.kv_storage import KVStorage
from pensieve_jax.device.step_programs import StepExecutables, StepPrograms, bucket_layouts, bucket_tile_specs
from pensieve_lab.compile_only.gpu import targeting_h200
from pensieve_lab.kernels.projections import projections

KINDS = ("attention", "products", "steps")
_NUM_PAGES, _CHUNK_TOKENS = 4096, 32
_CONTEXT_TOKENS = 4096
_DTYPE = jnp.dtype(jnp.bfloat16)


class Subject(NamedTuple):
    """Something to compile: its name, such as "attention/128", and the function that lowers it."""

    name: str
    lower: Callable[[], jax.stages.Lowered]


class Wanted(NamedTuple):
    """What to compile of a model.

    Attributes:
      model: the model, with as many layers as a step is to have.
      tokens: numbers of tokens of a step.
      kv_dtype: format of pages; None is bfloat16.
      weights_dtype: format in 8 bits of the layers' weights; None is bfloat16.
    """

    model: ModelConfig
    tokens: Sequence[int]
    kv_dtype: str | None = None
    weights_dtype: str | None = None


def subjects(device: Any, wanted: Wanted, kinds: Sequence[str]) -> Iterator[Subject]:
    """Yield the subjects of these kinds, in the order of `KINDS`."""
    makers = {"attention": _attention, "products": _products, "steps": _steps}
    for kind in KINDS:
        if kind in kinds:
            yield from makers[kind](device, wanted)


def lowered(device: Any, function: Callable[..., Any], *shapes: Any) -> jax.stages.Lowered:
    """Lower a function of arrays for the device; `shapes` are trees of `jax.ShapeDtypeStruct`."""
    sharding = SingleDeviceSharding(device)
    placed = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding), list(shapes)
    )
    with targeting_h200():
        traced = jax.jit(function, out_shardings=sharding).trace(*placed)
        return traced.lower(lowering_platforms=("cuda",))


def _attention(device: Any, wanted: Wanted) -> Iterator[Subject]:
    """Yield a step's attention, where every token may be a row; with more than 256 tokens, up to 256 rows."""
    model, kv_dtype = wanted.model, wanted.kv_dtype
    for tokens in wanted.tokens:
        rows = min(tokens, 256)
        spec = tile_spec(
            num_tokens=tokens, max_num_seqs=rows, num_q_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, page_size=32, dtype=_DTYPE,
            backend="pallas_mosaic_gpu", kv_dtype=kv_dtype,
            scratch_pages=0 if kv_dtype is None else _CONTEXT_TOKENS // 32,
        )  # fmt: skip

        def attend(*args: jax.Array, spec: Any = spec) -> jax.Array:
            return ragged_paged_attention(
                *args[:-1], sm_scale=model.head_dim**-0.5, metadata=(spec, args[-1]), kv_dtype=kv_dtype
            )

        page = page_shape(kv_dtype, 32, model.num_kv_heads, model.head_dim)
        row_shapes: Sequence[int | tuple[int, ...]] = (
            rows,
            (rows, _CONTEXT_TOKENS // 32),
            rows + 1,
            1,
            spec.tiles_len,
        )
        shapes = (
            jax.ShapeDtypeStruct((tokens, model.num_heads, model.head_dim), _DTYPE),
            jax.ShapeDtypeStruct((_NUM_PAGES, *page), page_dtype(kv_dtype, _DTYPE)),
            *(_integers(one) for one in row_shapes),
        )
        yield Subject(f"attention/{tokens}", functools.partial(lowered, device, attend, *shapes))


def _products(device: Any, wanted: Wanted) -> Iterator[Subject]:
    """Yield each product of a layer that the kernel of few rows serves."""
    kernels = decode_matmul if wanted.weights_dtype is None else byte_matmul
    for tokens in wanted.tokens:
        for what in projections(wanted.model, 1):
            if not kernels.supports(tokens, what.depth, what.width, gated=what.gated, dtype=_DTYPE):
                continue
            weights = [jax.ShapeDtypeStruct((what.depth, what.num_columns), _DTYPE)]
            product: Any = decode_matmul.decode_matmul
            if wanted.weights_dtype is not None:
                codes = weight_format(wanted.weights_dtype).dtype
                weights = [jax.ShapeDtypeStruct((what.num_columns, what.depth), codes)]
                weights.append(jax.ShapeDtypeStruct((what.num_columns,), jnp.float32))
                product = byte_matmul.byte_matmul
            product = functools.partial(product, gated=what.gated, backend="pallas_mosaic_gpu")
            x = jax.ShapeDtypeStruct((tokens, what.depth), _DTYPE)
            yield Subject(f"{what.name}/{tokens}", functools.partial(lowered, device, product, x, *weights))


def _steps(device: Any, wanted: Wanted) -> Iterator[Subject]:
    """Yield the programs of each step, in one group of layers, without samplers."""
    # A configuration needs a step of more than a chunk, which is compiled on demand alone.
    model, buckets = wanted.model, tuple(sorted({*wanted.tokens, max(*wanted.tokens, 2 * _CHUNK_TOKENS)}))
    num_running = min(buckets[-1] - _CHUNK_TOKENS, 256)
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=_NUM_PAGES, kv_dtype=wanted.kv_dtype),
        scheduler=SchedulerConfig(
            max_num_running=num_running,
            max_num_batched_tokens=buckets[-1],
            token_buckets=buckets,
            max_context_tokens=min(_CONTEXT_TOKENS, model.max_position_embeddings),
        ),
        runner=RunnerConfig(num_layer_groups=1),
    )
    mesh = make_mesh(1, [device])
    dtype = np.dtype(_DTYPE)
    kernels = choose_kernels(model, config, dtype, mesh, weights_dtype=wanted.weights_dtype)
    specs = bucket_tile_specs(model, config, dtype, kernels.attention.name, 1)
    programs = StepPrograms(
        abstract_model(model, dtype=dtype.name, mesh=mesh, weights_dtype=wanted.weights_dtype),
        KVStorage(model, config.cache, dtype, mesh),
        bucket_layouts(model, config, specs),
        specs,
        mesh,
        backend=kernels.attention.name,
        cutoff_backend=kernels.sampling_cutoff.name,
        num_top=config.runner.max_logprobs,
        exchange=Exchange(None, model, dtype, mesh),
        small_batch_matmul=kernels.decode_matmul.name,
        experts="xla" if kernels.experts is None else kernels.experts.name,
    )
    asked = tuple(f"step of {tokens} tokens" for tokens in wanted.tokens)
    for job in programs.jobs(StepExecutables({}, {}, {}, {}, {}, {})):
        if job.name.startswith(asked):
            yield Subject(job.name, functools.partial(_lowered_program, job.program))


def _lowered_program(program: Any) -> jax.stages.Lowered:
    traced = program.function.trace(*program.arguments, **program.statics)
    lowered: jax.stages.Lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered


def _integers(shape: int | tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape if isinstance(shape, tuple) else (shape,), jnp.int32)
