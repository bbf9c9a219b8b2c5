"""Baselines of the attention kernel: the straw men of the paper's Figure 12, and external kernels.

Owns: the names of all baselines, and the three written in JAX: copy-out, rounds of single tokens, ideal
contiguous attention.
Does not know: how a program is timed, or how failures are reported.
Called by `programs.benchmark_kernels`.

cuDNN aligns a causal mask with the first key, and JAX passes on no other kind. The last queries of a longer
context therefore get their mask as a bias, computed beforehand and the same for all rows and heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention import build_tiles, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.shapes import Case
from pensieve_jax import ConfigError
from pensieve_lab.kernels.backends import make_spec
from pensieve_lab.kernels.cases import Group, Inputs, groups
from pensieve_lab.kernels.timing import JaxProgram, Program
from pensieve_lab.kernels.torch_baselines import TORCH_BASELINES

_CUDNN_DTYPES = ("bfloat16", "float16")


def chosen_baselines(names: Sequence[str]) -> list[str]:
    """Return the distinct baselines that `--peers` selects; raises ConfigError."""
    families = {"all": list(BASELINES), "jax": list(_JAX_BASELINES), "torch": list(TORCH_BASELINES)}
    found: list[str] = []
    for name in names:
        if name not in families and name not in BASELINES:
            raise ConfigError("--peers", name, f"among {', '.join([*families, *BASELINES])}")
        found += families.get(name, [name])
    return list(dict.fromkeys(found))


def contiguous(inputs: Inputs) -> Program:
    """Return the ideal baseline: every row's keys and values are contiguous in an array made beforehand."""
    calls = _dense_calls(inputs)
    tables = inputs.readable_pages
    kv = [_copied(inputs.pool, jnp.asarray(tables[call.group.rows]), call.group) for call in calls]

    def attend(q: jax.Array, kv: list[tuple[jax.Array, jax.Array]], masks: list[jax.Array]) -> jax.Array:
        answers = [call.attend(q, *pair, mask) for call, pair, mask in zip(calls, kv, masks, strict=True)]
        return _assembled(q, calls, answers)

    return JaxProgram(_label(calls), attend, (inputs.q,), (kv, [call.mask for call in calls]))


def copy_out(inputs: Inputs) -> Program:
    """Return the baseline that copies the pages of every row into one array, and attends to that."""
    calls = _dense_calls(inputs)
    tables = [jnp.asarray(inputs.readable_pages[call.group.rows]) for call in calls]

    def attend(q: jax.Array, tables: list[jax.Array], pool: jax.Array, masks: list[jax.Array]) -> jax.Array:
        answers = []
        for call, table, mask in zip(calls, tables, masks, strict=True):
            # The copy is the subject of the measurement, so the barrier keeps XLA from fusing it away.
            k, v = jax.lax.optimization_barrier(_copied(pool, table, call.group))
            answers.append(call.attend(q, k, v, mask))
        return _assembled(q, calls, answers)

    masks = [call.mask for call in calls]
    return JaxProgram(_label(calls), attend, (inputs.q, tables), (inputs.pool, masks))


def rounds(inputs: Inputs) -> Program:
    """Return the baseline that runs the decode kernel once per prompt token, for all rows that have one."""
    q_lens = np.diff(inputs.cu_q_lens)
    if q_lens.max() == 1:
        raise NotImplementedError("a single round is the decode kernel itself")
    edges = [0, *np.unique(q_lens).tolist()]
    round_ranges = [
        _round_range(inputs, np.flatnonzero(q_lens > begin), begin, end)
        for begin, end in itertools.pairwise(edges)
    ]

    def attend(q: jax.Array, pool: jax.Array, arrays: list[tuple[jax.Array, ...]]) -> jax.Array:
        out = jnp.zeros_like(q)
        for one, range_arrays in zip(round_ranges, arrays, strict=True):
            out = one.attend(q, pool, out, *range_arrays)
        return out

    backend = make_spec(inputs.case, inputs.q.dtype.name, "auto").backend
    arrays = [one.arrays for one in round_ranges]
    label = f"{edges[-1]} rounds of {backend}"
    return JaxProgram(label, attend, (inputs.q,), (inputs.pool, arrays))


class _DenseCall(NamedTuple):
    """One call of `jax.nn.dot_product_attention`, for a group of rows."""

    group: Group
    implementation: Literal["cudnn", "xla"]
    mask: jax.Array  # [1, 1, q_len, kv_len] added to scores; or i32[num_rows] lengths; or empty

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        """Return [num_rows, q_len, num_q_heads, head_dim]; K, V: kv_len and num_kv_heads instead."""
        q_rows = _of_tokens(q, self.group.tokens)
        is_biased, has_lens = mask.ndim == 4, mask.ndim == 1 and mask.size > 0
        # Tensor cores would round float32 inputs otherwise.
        with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
            return jax.nn.dot_product_attention(
                q_rows, k, v,
                bias=mask if is_biased else None,
                key_value_seq_lengths=mask if has_lens else None,
                is_causal=self.group.q_len > 1 and not is_biased,
                implementation=self.implementation,
            )  # fmt: skip


def _dense_calls(inputs: Inputs) -> list[_DenseCall]:
    dtype = inputs.q.dtype
    has_cudnn = jax.default_backend() == "gpu" and dtype.name in _CUDNN_DTYPES
    calls = []
    for group in groups(inputs, ragged_decodes=True):
        mask = jnp.zeros(0, jnp.int32)  # no mask, or the causal one that starts at the first key
        if group.q_len == 1 and (group.kv_lens != group.kv_len).any():
            mask = jnp.asarray(group.kv_lens)
        elif 1 < group.q_len < group.kv_len:
            visible = np.tri(group.q_len, group.kv_len, group.kv_len - group.q_len, dtype=bool)
            mask = jnp.asarray(np.where(visible, 0, float(jnp.finfo(dtype).min) / 2), dtype)[None, None]
        calls.append(_DenseCall(group, "cudnn" if has_cudnn else "xla", mask))
    return calls


def _label(calls: Sequence[_DenseCall]) -> str:
    names = {4: "bias", 1: "lengths"}
    masks = {names[call.mask.ndim] if call.mask.size else "" for call in calls} - {""}
    return " ".join([calls[0].implementation, f"calls={len(calls)}", *sorted(masks)])


def _copied(pool: jax.Array, table: jax.Array, group: Group) -> tuple[jax.Array, jax.Array]:
    """Return K and V of a group's rows, [num_rows, kv_len, num_kv_heads, head_dim] each."""
    _, page_size, num_combined_heads, head_dim = pool.shape
    used = table[:, : -(-group.kv_len // page_size)]
    kv = pool[used].reshape(len(group.rows), -1, num_combined_heads // 2, 2, head_dim)[:, : group.kv_len]
    return kv[..., 0, :], kv[..., 1, :]


def _of_tokens(q: jax.Array, tokens: np.ndarray) -> jax.Array:
    """Return q[tokens], as a slice if the tokens are consecutive."""
    first, count = int(tokens.flat[0]), tokens.size
    if (tokens.ravel() == np.arange(first, first + count)).all():
        return q[first : first + count].reshape(*tokens.shape, *q.shape[1:])
    return q[tokens]


def _assembled(q: jax.Array, calls: Sequence[_DenseCall], answers: Sequence[jax.Array]) -> jax.Array:
    """Return an array like q, with every group's answer at its tokens."""
    flat = [answer.reshape(-1, *q.shape[1:]).astype(q.dtype) for answer in answers]
    tokens = np.concatenate([call.group.tokens.ravel() for call in calls])
    whole = jnp.concatenate(flat)
    return _of_tokens(whole, np.argsort(tokens))


class _RoundRange(NamedTuple):
    """Rounds [begin, end), in which the same rows have a token left.

    Attributes:
      attend: function of q, the pool, the answers so far and `arrays`; returns the answers with these
        rounds'.
      arrays: tile lists by round, first token of every row, keys its first token sees, page_indices.
    """

    attend: Callable[..., jax.Array]
    arrays: tuple[jax.Array, ...]


def _round_range(inputs: Inputs, rows: np.ndarray, begin: int, end: int) -> _RoundRange:
    case, num_rows = inputs.case, len(rows)
    q_lens = np.diff(inputs.cu_q_lens)[rows]
    least_kv_lens = inputs.kv_lens[rows] - q_lens + 1
    one_token_each = Case(
        case.name, ((1, inputs.page_indices.shape[1]),) * num_rows, case.heads, case.page_size
    )
    spec = make_spec(one_token_each, inputs.q.dtype.name, "auto")
    cu_q_lens, num_seqs = np.arange(num_rows + 1, dtype=np.int32), np.array([num_rows], np.int32)
    tiles = np.stack(
        [build_tiles(spec, cu_q_lens, least_kv_lens + number, num_seqs) for number in range(begin, end)]
    )

    def attend(
        q: jax.Array, pool: jax.Array, out: jax.Array,
        tiles: jax.Array, first_tokens: jax.Array, least_kv_lens: jax.Array, page_indices: jax.Array,
    ) -> jax.Array:  # fmt: skip
        def one_round(number: jax.Array, out: jax.Array) -> jax.Array:
            tokens = first_tokens + number
            answer = ragged_paged_attention(
                q[tokens], pool, least_kv_lens + number, page_indices, jnp.asarray(cu_q_lens),
                jnp.asarray(num_seqs), sm_scale=inputs.sm_scale, metadata=(spec, tiles[number - begin]),
            )  # fmt: skip
            return out.at[tokens].set(answer)

        return jax.lax.fori_loop(begin, end, one_round, out)

    arrays = (tiles, inputs.cu_q_lens[rows], least_kv_lens, inputs.page_indices[rows])
    return _RoundRange(attend, tuple(map(jnp.asarray, arrays)))


_JAX_BASELINES: dict[str, Callable[[Inputs], Program]] = {
    "copy_out": copy_out,
    "rounds": rounds,
    "contiguous": contiguous,
}
BASELINES: dict[str, Callable[[Inputs], Program]] = {**_JAX_BASELINES, **TORCH_BASELINES}
