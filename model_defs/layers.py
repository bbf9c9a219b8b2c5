"""Layers of models: projections, norms, embeddings, activations.

Every weight is a separate array, declared with shape, dtype and sharding before any value exists
(`declare`), so that an abstract model costs nothing and a loader fills each array in place on its devices.
In float32, matmuls request HIGHEST precision, because GPUs default to TF32. In bf16 and f16 the hardware
accumulates in float32. The residual stream and the norms are float32 in every model. Eighty roundings of the
stream to bf16 caused half of the noise in OPT-13B's logits, and the stream is a small part of a layer's
memory traffic. A matmul casts its input to its kernel's dtype; a norm before one returns that dtype. Called
by gated_decoder and families.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractDevice, Mesh, NamedSharding, PartitionSpec

from model_defs import small_batch_matmul
from model_defs.all_reduce import PartialSums, Summand, current_all_reduce, finish_sum
from model_defs.attention import KeysOrValues, Queries
from model_defs.config import ModelConfig
from model_defs.sharding import TENSOR_AXIS, AnyMesh, constrain, tensor_parallel_size, vocabulary_axis
from model_defs.weight_formats import Kept
from pallas_kernels.devices import on_every_device
from pallas_kernels.residual_norms import NormKind, NormSpec, add_and_norm, choose_backend

Hidden = Annotated[jax.Array, "f32[T, hidden_size]"]
"""Residual stream of T tokens."""
TokenVector = Annotated[jax.Array, "i32[T]"]
"""Ids or positions of T tokens."""
_Input = Annotated[jax.Array, "f[T, *in_shape]"]
_Output = Annotated[jax.Array, "f[T, *out_shape]"]


@dataclasses.dataclass(frozen=True)
class Build:
    """Common arguments of all modules: the config, the dtype to run in, and the mesh.

    `weights_dtype` is the format in 8 bits in which projections of layers keep their weights, a key of
    `weight_formats.FORMATS`; None keeps them in `dtype`.
    """

    config: ModelConfig
    dtype: jnp.dtype
    mesh: AnyMesh
    weights_dtype: str | None = None

    @property
    def plain(self) -> "Build":
        """This build with all weights in `dtype`, for what never is in 8 bits, such as a router."""
        return dataclasses.replace(self, weights_dtype=None)

    @property
    def precision(self) -> lax.Precision:
        """HIGHEST for float32, the hardware's default for narrower types."""
        return lax.Precision.HIGHEST if self.dtype == jnp.float32 else lax.Precision.DEFAULT


def declare(
    build: Build,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...] = (),
    *,
    ones: bool = False,
    dtype: jnp.dtype | None = None,
) -> nnx.Param[jax.Array]:
    """Declare a parameter without a value; dimension i is split over the mesh axis `axes[i]`.

    `ones` marks norm scales: random models set them to one and draw all other parameters. `dtype` None means
    that of the build.
    """
    return nnx.Param(_abstract(build.mesh, shape, axes, dtype or build.dtype), ones=ones)


def _abstract(mesh: AnyMesh, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


class Linear(nnx.Module):
    """`y = x @ kernel + bias` over any number of input and output dimensions.

    kernel [*in_shape, *out_shape]; bias [*out_shape]. Either `out_axis` (column parallel: that output
    dimension is split) or `in_axis` (row parallel: that input dimension is split, and the partial sums are
    added over "tp" before the bias) may be given. Without either the kernel is replicated.

    If the build keeps weights in 8 bits, the kernel holds codes [*out_shape, *in_shape], and scale
    f32[*out_shape] their factors: `y = (x @ codes) * scale + bias`, where the sum is float32.
    """

    def __init__(
        self,
        build: Build,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        *,
        in_axis: int | None = None,
        out_axis: int | None = None,
        bias: bool = False,
    ) -> None:
        """Declare kernel and bias, and the scale of a kernel in 8 bits."""
        ins = tuple(TENSOR_AXIS if i == in_axis else None for i in range(len(in_shape)))
        outs = tuple(TENSOR_AXIS if i == out_axis else None for i in range(len(out_shape)))
        self.build, self.num_in_dims, self.in_axes, self.out_axes = build, len(in_shape), ins, outs
        self.shape = in_shape + out_shape
        if build.weights_dtype is None:
            self.kernel, self.scale = declare(build, self.shape, ins + outs), None
        else:
            plain = _abstract(build.mesh, self.shape, ins + outs, build.dtype)
            kept = Kept(build.weights_dtype, len(in_shape), plain)
            codes = _abstract(build.mesh, out_shape + in_shape, outs + ins, kept.format.dtype)
            self.kernel = nnx.Param(codes, ones=False, kept=kept)
            factors = _abstract(build.mesh, out_shape, outs, jnp.dtype(jnp.float32))
            self.scale = nnx.Param(factors, ones=False, kept=kept)
        self.bias = declare(build, out_shape, outs) if bias else None

    def __call__(self, x: _Input) -> _Output:
        """Map [T, *in_shape] to [T, *out_shape], in the kernel's dtype."""
        return finish_sum(self.deferred(x))

    def deferred(self, x: _Input) -> Summand:
        """Map as `__call__`, but return `PartialSums` if the current `AllReduce` handles this size."""
        x, sums = x.astype(self.build.dtype), current_all_reduce()
        bias = None if self.bias is None else self.bias[...]
        small_batch_product = self._small_batch_product(x.shape[0])
        if any(self.in_axes) and sums is not None and sums.supports(x.shape[0], self.shape[-1], x.dtype):
            parts = sums.partial(small_batch_product or self._product, (x, self._weights), self._specs)
            return PartialSums(sums, parts, bias)
        # With the compiler's sum and a bias, XLA does the product, too: our kernel was not measured there.
        if small_batch_product is not None and (bias is None or not self._adds_up):
            return self._on_shards(small_batch_product, self.out_axes, x, bias)
        if self.scale is not None and self._adds_up:
            # Each device scales its sum and rounds it, or the compiler would add up float32 over devices.
            y = self._on_shards(self._product, self.out_axes, x, None)
        else:
            y = constrain(self._product(x, self._weights), self.build.mesh, None, *self.out_axes)
        return y if bias is None else y + bias

    def activated(self, x: _Input, name: str) -> _Output:
        """Map as `__call__`, then apply the `activation` of that name."""
        small_batch_product = self._small_batch_product(x.shape[0])
        if name == "relu" and small_batch_product is not None and not self._adds_up:
            bias = None if self.bias is None else self.bias[...]
            return self._on_shards(functools.partial(small_batch_product, relu=True), self.out_axes, x, bias)
        return activation(name)(self(x))

    def gated(self, x: _Input, gate: str) -> Annotated[jax.Array, "f[T, wide]"]:
        """Map [T, *in_shape] to [T, wide]: the product of up and the function `gate` of the gate.

        The kernel is [*in_shape, 2, wide], the gate first.
        """
        small_batch_product = self._small_batch_product(x.shape[0], gate)
        if small_batch_product is not None and self.bias is None:
            return self._on_shards(small_batch_product, self.out_axes[1:], x, None)
        y = self(x)
        return activation(gate)(y[:, 0]) * y[:, 1]

    @property
    def _weights(self) -> Any:
        """The kernel; in 8 bits a pair of codes and scales."""
        return self.kernel[...] if self.scale is None else (self.kernel[...], self.scale[...])

    def _product(self, x: jax.Array, weights: Any, bias: None = None) -> jax.Array:
        """Multiply by XLA, without a bias."""
        of_x, dtype, precision = tuple(range(1, 1 + self.num_in_dims)), self.build.dtype, self.build.precision
        if self.scale is None:
            contract = of_x, tuple(range(self.num_in_dims))
            return lax.dot_general(x, weights, (contract, ((), ())), precision=precision)
        codes, scale = weights
        contract = of_x, tuple(range(codes.ndim - self.num_in_dims, codes.ndim))
        # Codes are converted in the fusion of the product, so no array of weights in `dtype` is made.
        y = lax.dot_general(
            x,
            codes.astype(dtype),
            (contract, ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return (y * scale).astype(dtype)

    def _small_batch_product(
        self, num_rows: int, gate: str | None = None
    ) -> small_batch_matmul.Product | None:
        """Return the small-batch product of each device's part of the kernel; None if it is not supported."""
        tp, axes = tensor_parallel_size(self.build.mesh), self.in_axes + self.out_axes
        shape = tuple(size // tp if axis else size for size, axis in zip(self.shape, axes, strict=True))
        return small_batch_matmul.product(
            num_rows,
            shape,
            self.num_in_dims,
            self.build.dtype,
            gate=gate,
            in_8_bits=self.scale is not None,
        )

    @property
    def _adds_up(self) -> bool:
        """Whether the devices hold partial sums of the output."""
        return any(self.in_axes) and tensor_parallel_size(self.build.mesh) > 1

    @property
    def _specs(self) -> tuple[PartitionSpec, Any]:
        """Partition of the input and of the weights."""
        of_x = PartitionSpec(None, *self.in_axes)
        if self.scale is None:
            return of_x, PartitionSpec(*self.in_axes, *self.out_axes)
        codes = PartitionSpec(*self.out_axes, *self.in_axes)
        return of_x, (codes, PartitionSpec(*self.out_axes))

    def _on_shards(
        self,
        product: small_batch_matmul.Product,
        out_axes: tuple[str | None, ...],
        x: jax.Array,
        bias: jax.Array | None,
    ) -> jax.Array:
        """Run `product` on each device's parts, and sum partial results over the devices."""

        def run(*parts: Any) -> jax.Array:
            y = product(*parts)
            return lax.psum(y, TENSOR_AXIS) if self._adds_up else y

        specs = (*self._specs, PartitionSpec(*self.out_axes))
        out_specs = PartitionSpec(None, *out_axes)
        # Kernels do not declare the axes over which their outputs vary.
        shards = jax.shard_map(
            run, mesh=self.build.mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )
        result: jax.Array = shards(x.astype(self.build.dtype), self._weights, bias)
        return result


class Embedding(nnx.Module):
    """Token table [vocab_size, width], split by vocabulary if that divides evenly; also the tied head."""

    def __init__(self, build: Build, width: int) -> None:
        vocab_size = build.config.vocab_size
        self.build = build
        self.vocab_axis = vocabulary_axis(vocab_size, build.mesh)
        self.table = declare(build, (vocab_size, width), (self.vocab_axis,))

    def __call__(self, token_ids: TokenVector) -> Annotated[jax.Array, "f32[T, width]"]:
        """Map ids i32[T] to rows f32[T, width]. All ids, also of padding, must be in the vocabulary."""
        rows = jnp.take(self.table[...], token_ids, axis=0, mode="clip")
        return constrain(rows.astype(jnp.float32), self.build.mesh)

    def logits(
        self, hidden: Annotated[jax.Array, "f[S, width]"]
    ) -> Annotated[jax.Array, "f32[S, vocab_size]"]:
        """Map [S, width] to logits f32[S, vocab_size], split by vocabulary as the table is."""
        contract = ((1,), (1,)), ((), ())
        scores = lax.dot_general(
            hidden.astype(self.build.dtype),
            self.table[...],
            contract,
            precision=self.build.precision,
            preferred_element_type=jnp.float32,
        )
        return constrain(scores, self.build.mesh, None, self.vocab_axis)


class Norm(nnx.Module):
    """Base of the norms: the arrays, the norm alone, and the norm after a residual addition."""

    def __init__(
        self, build: Build, kind: NormKind, *, scale: bool, bias: bool, dtype: jnp.dtype | None = None
    ) -> None:
        """Declare scale and bias, if there are any, in `dtype`; None means that of the build."""
        shape = (build.config.hidden_size,)
        self.build, self.kind = build, kind
        self.scale = declare(build, shape, ones=True, dtype=dtype) if scale else None
        self.bias = declare(build, shape, dtype=dtype) if bias else None

    def __call__(self, x: Hidden) -> Hidden:
        """Norm f32[T, hidden_size] in plain XLA, which fuses it with the selection of rows that follows."""
        return self._run(x, None, jnp.dtype(jnp.float32), "xla")[1]

    def add(
        self, x: Hidden, y: Summand | None, dtype: jnp.dtype | None = None
    ) -> tuple[Hidden, Annotated[jax.Array, "f[T, hidden_size]"]]:
        """Add a term to the stream f32[T, hidden_size]; return the sum, and its norm.

        The norm is in `dtype`, by default the dtype the model runs in, so that a matmul needs no cast. The
        term may be `PartialSums`.
        """
        dtype = self.build.dtype if dtype is None else jnp.dtype(dtype)
        if isinstance(y, PartialSums):
            norm = NormSpec(self.kind, self.build.config.norm_eps, dtype)
            return y.sums.total_and_norm(x, y, *self._affine, norm=norm)
        return self._run(x, y, dtype, choose_backend(x.shape[1], _device(self.build.mesh)))

    def of_sum(self, y: Summand) -> Hidden:
        """Norm a term [T, hidden_size] before it is added to the stream; the result is float32."""
        whole = finish_sum(y).astype(jnp.float32)
        backend = choose_backend(whole.shape[1], _device(self.build.mesh))
        return self._run(whole, None, jnp.dtype(jnp.float32), backend)[1]

    def _run(
        self, x: jax.Array, y: jax.Array | None, dtype: jnp.dtype, backend: str
    ) -> tuple[jax.Array, jax.Array]:
        run = functools.partial(
            add_and_norm, kind=self.kind, eps=self.build.config.norm_eps, dtype=dtype, backend=backend
        )
        if backend == "xla":
            return run(x, y, *self._affine)
        return on_every_device(run, self.build.mesh)(x, y, *self._affine)

    @property
    def _affine(self) -> tuple[jax.Array | None, jax.Array | None]:
        return (
            None if self.scale is None else self.scale[...],
            None if self.bias is None else self.bias[...],
        )


class RMSNorm(Norm):
    """Root-mean-square norm, with a scale."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, "rms", scale=True, bias=False)


class WideScaleRMSNorm(Norm):
    """Root-mean-square norm whose scale is float32 in a model of any dtype."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, "rms", scale=True, bias=False, dtype=jnp.dtype(jnp.float32))


class LayerNorm(Norm):
    """Layer norm, with scale and bias if the config's norms are affine."""

    def __init__(self, build: Build) -> None:
        affine = build.config.norm_affine
        super().__init__(build, "layer", scale=affine, bias=affine)


class LayerNormWithoutBias(Norm):
    """Layer norm with a scale only."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, "layer", scale=True, bias=False)


def root_mean_square_normed(
    x: jax.Array, scale: jax.Array, eps: float, *, axes: tuple[int, ...]
) -> jax.Array:
    """Return `x` over its root mean square along `axes`, times `scale`; computed in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=axes, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)).astype(x.dtype)


class HeadNorm(nnx.Module):
    """Root-mean-square norm of each head, with one scale f[head_dim] for all heads."""

    def __init__(self, build: Build, dtype: jnp.dtype | None = None) -> None:
        """Declare the scale, which is replicated on every device, in `dtype` or else that of the build."""
        self.eps = build.config.norm_eps
        self.scale = declare(build, (build.config.head_dim,), ones=True, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norm [T, heads, head_dim] in float32; the result has the dtype of `x`."""
        return root_mean_square_normed(x, self.scale[...], self.eps, axes=(2,))


class FusedQKV(nnx.Module):
    """Query, key and value projections as one column-parallel matmul, split by KV head.

    kernel [hidden_size, num_kv_heads, group_size + 2, head_dim]: for each KV head its query heads, its key,
    its value. Query head h belongs to KV head h // group_size.
    """

    def __init__(self, build: Build, *, bias: bool) -> None:
        config = build.config
        out_shape = (config.num_kv_heads, config.group_size + 2, config.head_dim)
        self.build = build
        self.proj = Linear(build, (config.hidden_size,), out_shape, out_axis=0, bias=bias)

    def __call__(
        self, x: Annotated[jax.Array, "f[T, hidden_size]"]
    ) -> tuple[Queries, KeysOrValues, KeysOrValues]:
        """Map [T, hidden_size] to q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]."""
        config = self.build.config
        fused = self.proj(x)
        q = fused[:, :, : config.group_size].reshape(-1, config.num_heads, config.head_dim)
        k, v = fused[:, :, config.group_size], fused[:, :, config.group_size + 1]
        q, k, v = (constrain(part, self.build.mesh, None, TENSOR_AXIS) for part in (q, k, v))
        return q, k, v


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """Return the function of `ModelConfig.activation`; "gelu" is the exact one."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    }
    return functions[name]


def _device(mesh: AnyMesh) -> jax.Device | AbstractDevice | None:
    """Return a device of the mesh; for an abstract mesh its abstract device, which may be None."""
    return mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device
