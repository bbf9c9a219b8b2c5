"""External kernels over the same values: PyTorch's own attention, FlashInfer, FlashAttention-3.

Owns: the calls of each kernel, and the check of PyTorch's memory. PyTorch is imported only when one of them
is prepared; a failed import is an ImportError of that kernel.
Does not know: how a program is timed, or how failures are reported.
Called by `kernels.baselines` and `programs.benchmark_kernels`.

Queries and pages are passed by dlpack, without a copy. The paged kernels get separate pools of K and of V in
their own layout, with the same page numbers; the contiguous ones get one array per row. Both are made
beforehand, so they cost no time, but memory beside JAX's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax import ConfigError
from pensieve_lab.kernels.cases import Group, Inputs, groups
from pensieve_lab.kernels.timing import Program, TorchProgram

_WORKSPACE_BYTES = 256 << 20
# Answers, workspaces and the memory that cuDNN and cuBLAS keep.
_SPARE_BYTES = 1 << 30


def check_torch_has_room(names: list[str], pool_bytes: int) -> None:
    """Raise ConfigError if these baselines, with a pool of that size, would not fit beside JAX's memory."""
    if not set(names) & set(TORCH_BASELINES):
        return
    try:
        torch = _torch()
    except ImportError:
        return  # each of them reports the missing package
    if not torch.cuda.is_available():
        return
    needed = pool_bytes * 5 // 4 + _SPARE_BYTES
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        raise ConfigError(
            "--peers",
            ",".join(names),
            f"without those of PyTorch where it has {free / 2**30:.1f} GiB and needs {needed / 2**30:.1f}",
            "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.5, so that JAX leaves half, or give fewer --cases",
        )


def sdpa(inputs: Inputs, *, backend: str | None = None) -> Program:
    """Return PyTorch's attention over contiguous keys, one call per shape; None picks the kernel."""
    torch, q, pool = _exchanged(inputs)
    attention = importlib.import_module("torch.nn.attention")
    table = _to(pool, inputs.readable_pages)
    found = [_contiguous(torch, pool, table, group) for group in groups(inputs, ragged_decodes=False)]
    calls = [call._replace(mask=_mask(torch, call, is_bool=backend is not None)) for call in found]
    order = _to(pool, np.argsort(np.concatenate([call.group.tokens.ravel() for call in calls])))
    chosen = None if backend is None else getattr(attention.SDPBackend, backend)

    def call() -> Any:
        with contextlib.nullcontext() if chosen is None else attention.sdpa_kernel(chosen):
            answers = [one.attend(torch, q, inputs.sm_scale).reshape(-1, *q.shape[1:]) for one in calls]
        return answers[0] if len(answers) == 1 else torch.cat(answers)[order]

    return TorchProgram(f"torch {torch.__version__} calls={len(calls)}", torch, call)


class _SdpaCall(NamedTuple):
    """Rows of one shape."""

    group: Group
    k: Any  # [num_rows, num_kv_heads, kv_len, head_dim]
    v: Any
    mask: Any = None

    def attend(self, torch: Any, q: Any, scale: float) -> Any:
        """Return [num_rows, q_len, num_q_heads, head_dim]."""
        tokens = self.group.tokens
        # Tokens of consecutive rows are one slice; otherwise rows are sliced one by one.
        if tokens.size == tokens.max() - tokens.min() + 1:
            rows = q[tokens.min() : tokens.max() + 1].unflatten(0, tokens.shape)
        else:
            rows = torch.stack([q[row[0] : row[-1] + 1] for row in tokens])
        out = torch.nn.functional.scaled_dot_product_attention(
            rows.transpose(1, 2), self.k, self.v, attn_mask=self.mask, scale=scale,
            is_causal=self.mask is None and self.group.q_len > 1, enable_gqa=q.shape[1] != self.k.shape[1],
        )  # fmt: skip
        return out.transpose(1, 2)


def _contiguous(torch: Any, pool: Any, table: Any, group: Group) -> _SdpaCall:
    pages = table[torch.as_tensor(group.rows, device=pool.device)][:, : -(-group.kv_len // pool.shape[1])]
    k, v = (
        pool[:, :, offset::2][pages].flatten(1, 2)[:, : group.kv_len].contiguous().transpose(1, 2)
        for offset in (0, 1)
    )
    return _SdpaCall(group, k, v)


def _mask(torch: Any, call: _SdpaCall, *, is_bool: bool) -> Any:
    """Return None if no mask, or the causal one that starts at the first key, is right."""
    q_len, kv_len = call.group.q_len, call.group.kv_len
    if q_len in (1, kv_len):
        return None
    if is_bool:
        return torch.ones(q_len, kv_len, dtype=torch.bool, device=call.k.device).tril(kv_len - q_len)
    return importlib.import_module("torch.nn.attention.bias").causal_lower_right(q_len, kv_len)


def flash_infer(inputs: Inputs) -> Program:
    """Return planned FlashInfer: its decode kernel for rows of one token, otherwise its prefill kernel."""
    torch, q, pool = _exchanged(inputs)
    library = importlib.import_module("flashinfer")
    kv = _paged(pool)
    heads, page_size = inputs.case.heads, inputs.case.page_size
    counts = -(-inputs.kv_lens // page_size)
    used = np.arange(inputs.page_indices.shape[1]) < counts[:, None]
    pages = (
        np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        inputs.page_indices[used],
        (inputs.kv_lens - 1) % page_size + 1,
    )
    indptr, indices, last_page_lens = (_to(pool, array) for array in pages)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
    shape = (heads.num_q_heads, heads.num_kv_heads, heads.head_dim, page_size)
    options = {"sm_scale": inputs.sm_scale, "q_data_type": q.dtype, "kv_data_type": q.dtype}
    if max(q_len for q_len, _ in inputs.case.rows) == 1:
        # Its documentation recommends tensor cores from four query heads per KV head on.
        use_tensor_cores = heads.num_q_heads >= 4 * heads.num_kv_heads
        decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=use_tensor_cores)
        decode.plan(indptr, indices, last_page_lens, *shape, **options)
        return TorchProgram(_version("decode", library), torch, lambda: decode.run(q, kv))
    prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace)
    cu_q_lens = _to(pool, inputs.cu_q_lens)
    prefill.plan(cu_q_lens, indptr, indices, last_page_lens, *shape, causal=True, **options)
    return TorchProgram(_version("prefill", library), torch, lambda: prefill.run(q, kv))


def flash_attention_3(inputs: Inputs, *, page_size: int | None = None) -> Program:
    """Return FlashAttention-3 over pages, from its own package or from vLLM, which plans once for all layers.

    With a `page_size`, pages have that many tokens: it is faster if a page holds a whole block of keys.
    """
    torch, q, pool = _exchanged(inputs)
    page_size = page_size or inputs.case.page_size
    attend, label = _flash_attention_3(inputs, page_size)
    k, v = _paged(pool)
    table = inputs.readable_pages
    if page_size != inputs.case.page_size:
        pieces, table = _larger_pages(inputs, page_size)
        k, v = (one[_to(pool, pieces)].reshape(-1, page_size, *one.shape[2:]) for one in (k, v))
    lens, table, cu_q_lens = (_to(pool, array) for array in (inputs.kv_lens, table, inputs.cu_q_lens))
    call = functools.partial(
        attend,
        q, k, v,
        lens=lens,
        table=table,
        cu_q_lens=cu_q_lens,
        max_q_len=max(q_len for q_len, _ in inputs.case.rows),
        max_kv_len=int(inputs.kv_lens.max()),
        scale=inputs.sm_scale,
    )  # fmt: skip
    return TorchProgram(f"{label}, pages of {page_size}", torch, call)


def _larger_pages(inputs: Inputs, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the case's pages in each page of `page_size`, and every row's new pages in random order.

    The arrays are ids [num_larger_pages, pieces] and [num_rows, larger_pages_per_row].
    """
    num_pieces = page_size // inputs.case.page_size
    counts = -(-inputs.kv_lens // page_size)
    used = np.arange(counts.max()) < counts[:, None]
    num_missing = num_pieces * counts.max() - inputs.readable_pages.shape[1]
    wide = np.pad(inputs.readable_pages, ((0, 0), (0, max(num_missing, 0))), mode="edge")
    by_row = wide[:, : num_pieces * counts.max()].reshape(len(counts), -1, num_pieces)
    order = np.random.default_rng(0).permutation(int(counts.sum()))
    pieces = np.empty((len(order), num_pieces), np.int32)
    pieces[order] = by_row[used]
    table = np.zeros(used.shape, np.int32)
    table[used] = order
    return pieces, table


def _flash_attention_3(inputs: Inputs, page_size: int) -> tuple[Callable[..., Any], str]:
    """Return a function of q, K, V and the rows from any installed package; raises ImportError."""
    try:
        own = importlib.import_module("flash_attn_interface")
    except ImportError:
        try:
            vllm = importlib.import_module("vllm.vllm_flash_attn")
        except ImportError as error:
            raise ImportError("neither flash_attn_interface nor vllm.vllm_flash_attn") from error

        q, heads = _exchanged(inputs)[1], inputs.case.heads
        plan = vllm.get_scheduler_metadata(
            batch_size=len(inputs.kv_lens), max_seqlen_q=max(q_len for q_len, _ in inputs.case.rows),
            max_seqlen_k=int(inputs.kv_lens.max()), num_heads_q=heads.num_q_heads,
            num_heads_kv=heads.num_kv_heads, headdim=heads.head_dim, cache_seqlens=_to(q, inputs.kv_lens),
            qkv_dtype=q.dtype, cu_seqlens_q=_to(q, inputs.cu_q_lens), page_size=page_size,
            causal=True,
        )  # fmt: skip

        def by_vllm(q: Any, k: Any, v: Any, *, lens: Any, table: Any, cu_q_lens: Any, **rest: Any) -> Any:
            return vllm.flash_attn_varlen_func(
                q, k, v, max_seqlen_q=rest["max_q_len"], cu_seqlens_q=cu_q_lens,
                max_seqlen_k=rest["max_kv_len"], seqused_k=lens, block_table=table,
                softmax_scale=rest["scale"], causal=True, scheduler_metadata=plan, fa_version=3,
            )  # fmt: skip

        return by_vllm, "out of vllm"

    def by_itself(q: Any, k: Any, v: Any, *, lens: Any, table: Any, cu_q_lens: Any, **rest: Any) -> Any:
        out = own.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lens, page_table=table, cu_seqlens_q=cu_q_lens,
            max_seqlen_q=rest["max_q_len"], softmax_scale=rest["scale"], causal=True,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out  # some versions also return the sums of the softmax

    return by_itself, "flash_attn_interface"


def _torch() -> Any:
    return importlib.import_module("torch")


def _exchanged(inputs: Inputs) -> tuple[Any, Any, Any]:
    """Return the module, and queries and pages as its tensors in JAX's memory."""
    torch = _torch()
    inputs.pool.block_until_ready()
    return torch, torch.from_dlpack(inputs.q), torch.from_dlpack(inputs.pool)


def _paged(pool: Any) -> tuple[Any, Any]:
    """Return K and V, [num_pages, page_size, num_kv_heads, head_dim] each."""
    return pool[:, :, 0::2].contiguous(), pool[:, :, 1::2].contiguous()


def _to(pool: Any, array: np.ndarray) -> Any:
    """Copy a host array to the pool's device."""
    return _torch().as_tensor(array, device=pool.device)


def _version(label: str, library: Any) -> str:
    return f"{label} {getattr(library, '__version__', '')}".strip()


TORCH_BASELINES: dict[str, Callable[[Inputs], Program]] = {
    "torch_sdpa": sdpa,
    "torch_cudnn": functools.partial(sdpa, backend="CUDNN_ATTENTION"),
    "flashinfer": flash_infer,
    "flash_attention_3": flash_attention_3,
    **{
        f"flash_attention_3_page{page_size}": functools.partial(flash_attention_3, page_size=page_size)
        for page_size in (64, 128, 256)
    },
}
