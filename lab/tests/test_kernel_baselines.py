"""The kernel benchmark: baselines compute what our kernel does, and failures of either are reported."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import AttentionArgumentError
from pallas_kernels.ragged_paged_attention.reference import reference_attention
from pallas_kernels.ragged_paged_attention.shapes import CASES, Case, Heads, draw_metadata
from pensieve_jax import ConfigError
from tests.launching import load

kernel_backends = load("pensieve_lab.kernels.backends")
kernel_cases = load("pensieve_lab.kernels.cases")
kernel_baselines = load("pensieve_lab.kernels.baselines")
kernel_table = load("pensieve_lab.kernels.table")
kernel_timing = load("pensieve_lab.kernels.timing")
torch_baselines = load("pensieve_lab.kernels.torch_baselines")
step_bounds = load("pensieve_lab.steps.bounds")

QUICK = {"target_ms": 0.01, "repeats": 1, "dtype": "float32"}
BATCHES = {
    "decodes": Case("decodes", ((1, 64),) * 2, Heads(2, 2, 32)),
    "ragged": Case("ragged", ((1, 70), (1, 3), (1, 32)), Heads(4, 1, 32)),
    "prompts": Case("prompts", ((33, 33),) * 2, Heads(4, 2, 32)),
    "continued": Case("continued", ((3, 65),) * 2, Heads(4, 2, 32)),
    "all": CASES["tiny"],  # and rows of one kind that do not follow each other
}


@pytest.fixture(scope="module")
def inputs():
    """Draw inputs like `make_inputs`, without compiling a program for each."""

    def drawn(case):
        rng = np.random.default_rng(1)
        kv_lens, page_indices, cu_q_lens, _, num_pages = draw_metadata(case, rng)
        heads = case.heads
        q = rng.standard_normal((case.num_tokens, heads.num_q_heads, heads.head_dim), np.float32)
        page = (case.page_size, 2 * heads.num_kv_heads, heads.head_dim)
        pool = rng.standard_normal((num_pages, *page), np.float32)
        pool[0] = np.nan
        return kernel_cases.Inputs(case, jnp.asarray(q), jnp.asarray(pool), kv_lens, page_indices, cu_q_lens)

    return {name: drawn(case) for name, case in BATCHES.items()}


def documented(out):
    document = json.loads(out.splitlines()[-1])
    return document, {one["kernel"]: one for one in document["results"]["measurements"]}


def dense(inputs):
    return reference_attention(
        np.asarray(inputs.q), np.asarray(inputs.pool), *inputs.rows, sm_scale=inputs.sm_scale
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("all", "ragged") else pytest.mark.long) for name in BATCHES],
)
@pytest.mark.parametrize("peer", ["copy_out", "contiguous", "rounds"])
def test_strawmen_compute_attention(inputs, name, peer):
    """Batches have rows of all kinds; unused columns are NaN."""
    batch = inputs[name]
    if peer == "rounds" and name in ("decodes", "ragged"):
        with pytest.raises(NotImplementedError):
            kernel_baselines.BASELINES[peer](batch)
        return
    program = kernel_baselines.BASELINES[peer](batch)
    np.testing.assert_allclose(program.answer(), dense(batch), atol=1e-5)


def test_what_a_strawman_does(inputs):
    """Calls over contiguous keys: one per shape, with decodes together; a round for every token."""
    labels = {name: kernel_baselines.contiguous(batch).label for name, batch in inputs.items()}
    assert labels == {
        "decodes": "xla calls=1",
        "ragged": "xla calls=1 lengths",
        "prompts": "xla calls=1",
        "continued": "xla calls=1 bias",
        "all": "xla calls=3 bias lengths",
    }
    assert kernel_baselines.rounds(inputs["all"]).label == "40 rounds of xla"


def test_repeating_computes_the_same_again(inputs):
    """The copy-out is repeated as well: its table is a loop variable."""
    batch = inputs["continued"]
    for program in (kernel_backends.backend_program(batch, "xla"), kernel_baselines.copy_out(batch)):
        queries = [program.tied[0], 2 * program.tied[0]]
        others = (*program.tied[1:], *program.fixed)
        compiled = program.chained(3).lower(queries, *others).compile()
        out, other = compiled(queries, *others)
        np.testing.assert_allclose(out, dense(batch), atol=1e-5)
        assert not np.allclose(other, out, atol=1e-2)
    loops = [line for line in compiled.as_text().splitlines() if " while(" in line]
    assert any("s32[2,3]" in line for line in loops)


def test_expected_answers_see_every_difference(inputs):
    batch = inputs["all"]
    expected = kernel_cases.expected_answer(batch)
    out = jnp.asarray(dense(batch))
    assert expected.difference(out) < 1e-5
    for wrong in (0.01, np.nan):
        for token in (0, 20, 46):
            assert not expected.difference(out.at[token, 3, 31].add(wrong)) < 1e-3


def test_parts_are_the_same_rows_over_the_same_pages(inputs):
    batch = inputs["all"]
    whole, parts = dense(batch), kernel_cases.parts(batch)
    tokens = {"decodes": [0, 46], "prompts": [*range(1, 46)]}
    assert parts.keys() == tokens.keys()
    for name, part in parts.items():
        assert part.pool is batch.pool and part.case.name == f"tiny:{name}"
        np.testing.assert_allclose(dense(part), whole[tokens[name]], atol=1e-6)
    assert sum(part.work.flop for part in parts.values()) == batch.work.flop
    assert sum(part.work.num_bytes for part in parts.values()) == batch.work.num_bytes
    assert not any(kernel_cases.parts(inputs[name]) for name in BATCHES if name != "all")


def test_bounds_and_ratios():
    """A case at half of its bound; a whole batch 25% over its parts."""
    work = step_bounds.Operation("a", num_bytes=2000, flop=6000)
    timing = kernel_timing.Timing(4e-6, 3, "so")
    result = kernel_table.Result(
        "xla", False, work, 2e-6, max_error=0.5, timing=timing, parts_s={"x": 3e-6, "y": 0.2e-6}
    )
    found = result.as_dict()
    assert found["share_of_bound"] == 0.5 and found["over_parts"] == 1.25
    assert found["time_us"] == 4 and found["bound_us"] == 2 and found["gb_per_s"] == 0.5
    peer = kernel_table.Result("peer", True, work, 2e-6, timing=kernel_timing.Timing(5e-6, 1, "so"))
    none = kernel_table.Result("none", True, work, 2e-6, max_error=np.nan, reason="wrong")
    assert none.as_dict()["max_error"] is None and "time_us" not in none.as_dict()
    assert kernel_table.summary([none, peer, result]).splitlines()[-1].split() == [
        "a", "xla", "4.0", "50.0%", "peer", "5.0", "1.25", "1.250",
    ]  # fmt: skip


@pytest.mark.long
def test_all_of_it(launch, monkeypatch, tmp_path, capsys):
    """PyTorch is made unavailable: its baselines report that, and nothing else changes."""
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "torch", None)
    case = Case("tiny", ((1, 20), (2, 40)), Heads(2, 1, 32))
    monkeypatch.setattr(load("benchmark_kernels"), "CASES", {"tiny": case})
    plot = tmp_path / "roofline.png"
    assert (
        launch(
            "benchmark_kernels", shared_llm=False, backend="all", peers="contiguous,torch", plot=plot, **QUICK
        )
        == 0
    )
    out = capsys.readouterr().out
    document, found = documented(out)
    assert [*found] == ["xla", "contiguous", *torch_baselines.TORCH_BASELINES]
    for name in ("xla", "contiguous"):
        assert found[name]["time_us"] > 0 and found[name]["max_error"] < 1e-5
        assert found[name]["is_peer"] is (name != "xla")
    for name in torch_baselines.TORCH_BASELINES:
        assert found[name]["reason"].startswith("not importable: ") and "time_us" not in found[name]
    assert found["xla"]["parts_us"].keys() == {"decodes", "prompts"}
    assert document["results"]["ceilings"].keys() == {"read_bytes_per_s", "copy_bytes_per_s", "flop_per_s"}
    assert {"versions", "hardware", "command", "units"} <= document.keys()
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000


@pytest.mark.parametrize("window", [None, 1, 5, 33, 70, 1000])
def test_work_within_a_window(window):
    """Pairs and keys are counted one by one."""
    rows = ((1, 70), (5, 33), (40, 40), (1, 1), (20, 60))
    seen = [
        (row, position, key)
        for row, (q_len, kv_len) in enumerate(rows)
        for position in range(kv_len - q_len, kv_len)
        for key in range(position + 1)
        if window is None or key > position - window
    ]
    case = Case("some", rows, Heads(4, 2, 32), window=window)
    assert case.flops == 4 * len(seen) * 4 * 32
    assert case.kv_bytes == len({(row, key) for row, _, key in seen}) * 2 * 2 * 32 * 2


def test_each_case_is_timed_with_each_window(launch, small, capsys):
    """The kernel is the XLA back end, within windows; a result without one would be wrong."""
    assert launch("benchmark_kernels", shared_llm=False, window="none,5", **QUICK) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["measurements"]
    assert [(one["case"], one["kernel"]) for one in measured] == [("tiny", "xla"), ("tiny_w5", "xla")]
    assert all(one["max_error"] < 1e-5 and one["time_us"] > 0 for one in measured)
    assert measured[1]["num_bytes"] < measured[0]["num_bytes"]


@pytest.fixture
def small(monkeypatch):
    """Use one small case, fixed ceilings, and fake kernels."""
    script = load("benchmark_kernels")
    ceilings = load("pensieve_lab.steps.ceilings").Ceilings(1e15, 1e15, 1e15)
    monkeypatch.setattr(script, "CASES", {"tiny": Case("tiny", ((2, 20),), Heads(2, 1, 32))})
    monkeypatch.setattr(script, "measure_ceilings", lambda **_: ceilings)

    def replace(name, attend):
        def prepare(inputs, *_):
            return kernel_timing.JaxProgram("", attend, (inputs.q,), ())

        if name == "xla":
            monkeypatch.setattr(script, "backend_program", prepare)
        else:
            monkeypatch.setitem(script.BASELINES, name, prepare)

    return replace


def is_wrong(q):
    return q


def fails(q):
    raise ValueError("too much\nof it")


@pytest.mark.long
def test_a_peer_that_is_wrong_is_not_timed(launch, small, capsys):
    """A wrong baseline does not change the exit status."""
    small("copy_out", is_wrong)
    small("contiguous", fails)
    assert launch("benchmark_kernels", shared_llm=False, peers="jax", **QUICK) == 0
    found = documented(capsys.readouterr().out)[1]
    assert found["copy_out"]["reason"].startswith("wrong: differs by") and "time_us" not in found["copy_out"]
    assert found["contiguous"]["reason"] == "failed: ValueError: too much"
    assert found["xla"]["time_us"] > 0 and found["rounds"]["time_us"] > 0


@pytest.mark.parametrize(("attend", "says"), [(is_wrong, "wrong: differs by"), (fails, "failed: ValueError")])
def test_ours_is_wrong(launch, small, attend, says, capsys):
    small("xla", attend)
    assert launch("benchmark_kernels", shared_llm=False, **QUICK) == 1
    found = documented(capsys.readouterr().out)[1]
    assert found["xla"]["reason"].startswith(says) and "time_us" not in found["xla"]


def test_an_implausibly_fast_result_is_rejected(launch, small, monkeypatch, capsys):
    slow = load("pensieve_lab.steps.ceilings").Ceilings(1.0, 1.0, 1.0)
    monkeypatch.setattr(load("benchmark_kernels"), "measure_ceilings", lambda **_: slow)
    assert launch("benchmark_kernels", shared_llm=False, **QUICK) == 1
    assert documented(capsys.readouterr().out)[1]["xla"]["reason"].startswith("not plausible")


def test_a_mistake_of_the_references_ends_no_other_case(launch, small, monkeypatch, capsys):
    def differ(inputs):
        raise kernel_cases.MismatchError("they differ")

    monkeypatch.setattr(load("benchmark_kernels"), "expected_answer", differ)
    assert launch("benchmark_kernels", shared_llm=False, **QUICK) == 1
    captured = capsys.readouterr()
    assert "error: they differ" in captured.err and documented(captured.out)[1] == {}


@pytest.mark.parametrize(
    ("flags", "error", "says"),
    [
        ({"peers": "vllm"}, ConfigError, "flash_attention_3"),
        ({"backend": "x"}, AttentionArgumentError, "pallas_mosaic_gpu"),
        ({"backend": "pallas_mosaic_gpu"}, AttentionArgumentError, "give auto or xla"),
        ({"backend": "jax_triton"}, AttentionArgumentError, "give auto or xla"),
        ({"window": "none,many"}, ConfigError, "--window is 'many', but must be integers of at least 1"),
        ({"window": ""}, ConfigError, "--window is '', but must be none, or numbers of keys"),
        ({"window": "128", "peers": "jax"}, AttentionArgumentError, "none has windows"),
        ({"plot": "/nowhere/x.png"}, ConfigError, "--plot is '/nowhere/x.png'"),
        ({"plot": "x.exe"}, ConfigError, "--plot is 'x.exe'"),
        ({"sweep": True, "sweep_matching": "("}, ConfigError, "--sweep_matching.*regular expression"),
        ({"sweep_matching": "e$"}, ConfigError, "without --sweep"),
    ],
)
def test_refused_before_anything_is_measured(launch, monkeypatch, flags, error, says):
    monkeypatch.setattr(load("benchmark_kernels"), "measure_ceilings", lambda **_: pytest.fail("measured"))
    with pytest.raises(error, match=says):
        launch("benchmark_kernels", shared_llm=False, **flags)


def test_without_matplotlib_it_says_so_first(launch, monkeypatch, tmp_path):
    monkeypatch.setattr(load("benchmark_kernels"), "measure_ceilings", lambda **_: pytest.fail("measured"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        launch("benchmark_kernels", shared_llm=False, plot=tmp_path / "roofline.png")


def test_block_sizes_of_each_kernel():
    """The spec accepts all sizes, and they differ from one another."""
    for name, backend in (
        ("decode_64x4096_gqa10", "pallas_triton"),
        ("prefill_4x2048_gqa10", "pallas_triton"),
        ("prefill_4x2048_gqa10", "pallas_mosaic_gpu"),
    ):
        tried = list(kernel_backends.block_variants(CASES[name], "bfloat16", backend))
        specs = {kernel_backends.make_spec(CASES[name], "bfloat16", backend, blocks) for blocks in tried}
        assert len(specs) == len(tried) > 3
    assert not list(kernel_backends.block_variants(CASES["tiny"], "float32", "xla"))


class Tensor(np.ndarray):
    """Tensor with the part of PyTorch's interface that the adapters of paged kernels use, in numpy."""

    device = "here"

    def contiguous(self):
        return np.ascontiguousarray(self).view(Tensor)


@pytest.fixture
def torch(monkeypatch):
    """Replace PyTorch; there is no GPU until a test adds one."""
    module = types.ModuleType("torch")
    module.from_dlpack = lambda array: np.asarray(array).view(Tensor)
    module.as_tensor = lambda array, device: np.asarray(array).view(Tensor)
    module.empty = lambda *shape, dtype, device: np.empty(1, dtype)
    module.uint8 = np.uint8
    module.cuda = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def attention_by_pages(q, k, v, lens, table, cu_q_lens, scale):
    """Compute what another project's paged kernel does, over its own two pools."""
    pool = np.stack([np.asarray(k), np.asarray(v)], axis=3).reshape(*k.shape[:2], -1, k.shape[-1])
    rows = (np.asarray(one) for one in (lens, table, cu_q_lens))
    out = reference_attention(np.asarray(q), pool, *rows, np.array([len(lens)]), sm_scale=scale)
    assert np.isfinite(pool[np.asarray(table)]).all()  # entries past a row's keys name readable pages, too
    return out.view(Tensor)


def check_peer(name, batch):
    program = torch_baselines.TORCH_BASELINES[name](batch)
    np.testing.assert_allclose(program.answer(), dense(batch), atol=1e-6)
    timing = program.time(1e-9, 1)
    assert timing.seconds > 0 and timing.timed_by == "wall clock"
    return program.label


@pytest.mark.parametrize("name", ["ragged", "all"])
def test_flash_attention_3_gets_its_arguments(inputs, torch, monkeypatch, name):
    def with_kvcache(
        q, k, v, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal
    ):
        assert causal and max_seqlen_q == max(q_len for q_len, _ in BATCHES[name].rows)
        out = attention_by_pages(q, k, v, cache_seqlens, page_table, cu_seqlens_q, softmax_scale)
        return (out, None) if name == "all" else out

    def varlen(q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, block_table, **rest):
        assert rest.pop("causal") and rest.pop("fa_version") == 3 and rest.pop("scheduler_metadata") == "plan"
        assert rest.keys() == {"softmax_scale"} and max_seqlen_k == 70
        return attention_by_pages(q, k, v, seqused_k, block_table, cu_seqlens_q, rest["softmax_scale"])

    def plan(*, batch_size, cache_seqlens, cu_seqlens_q, num_heads_q, num_heads_kv, headdim, **rest):
        batch = inputs[name]
        assert batch_size == len(batch.kv_lens)
        assert Heads(num_heads_q, num_heads_kv, headdim) == batch.case.heads
        np.testing.assert_array_equal(cache_seqlens, batch.kv_lens)
        np.testing.assert_array_equal(cu_seqlens_q, batch.cu_q_lens)
        assert rest.pop("max_seqlen_k") == 70 and rest.pop("page_size") == batch.case.page_size
        assert rest.pop("causal") and rest.keys() == {"max_seqlen_q", "qkv_dtype"}
        return "plan"

    with pytest.raises(ImportError, match=r"neither flash_attn_interface nor vllm\.vllm_flash_attn"):
        torch_baselines.flash_attention_3(inputs[name])
    vllm = types.SimpleNamespace(flash_attn_varlen_func=varlen, get_scheduler_metadata=plan)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", vllm)
    assert check_peer("flash_attention_3", inputs[name]) == "out of vllm, pages of 32"
    own = types.SimpleNamespace(flash_attn_with_kvcache=with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", own)
    assert check_peer("flash_attention_3", inputs[name]) == "flash_attn_interface, pages of 32"
    for page_size in (64, 128):
        label = check_peer(f"flash_attention_3_page{page_size}", inputs[name])
        assert label == f"flash_attn_interface, pages of {page_size}"


@pytest.mark.parametrize(("name", "kernel"), [("ragged", "decode"), ("all", "prefill")])
def test_flash_infer_gets_its_plan(inputs, torch, monkeypatch, name, kernel):
    class Wrapper:
        def __init__(self, workspace, **options):
            assert options == ({"use_tensor_cores": True} if kernel == "decode" else {})

        def plan(self, *pages, causal=False, sm_scale, q_data_type, kv_data_type):
            assert causal is (kernel == "prefill") and q_data_type == kv_data_type == np.float32
            if kernel == "decode":
                pages = (np.arange(len(pages[0])), *pages)
            self.cu_q_lens, indptr, indices, last_lens, *shape = pages
            heads = BATCHES[name].heads
            assert shape == [heads.num_q_heads, heads.num_kv_heads, heads.head_dim, 32]
            counts = np.diff(indptr)
            self.lens = (counts - 1) * 32 + last_lens
            self.table = np.full((len(counts), counts.max()), indices[0])
            self.table[np.arange(counts.max()) < counts[:, None]] = indices
            self.scale = sm_scale

        def run(self, q, kv):
            return attention_by_pages(q, *kv, self.lens, self.table, self.cu_q_lens, self.scale)

    wrapper = {
        "decode": "BatchDecodeWithPagedKVCacheWrapper",
        "prefill": "BatchPrefillWithPagedKVCacheWrapper",
    }
    library = types.SimpleNamespace(__version__="9", **{wrapper[kernel]: Wrapper})
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    assert check_peer("flashinfer", inputs[name]) == f"{kernel} 9"


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("backend", [None, "MATH"], ids=["chosen", "named"])
def test_attention_of_pytorch(inputs, name, backend):
    """The real PyTorch, if it is installed, with its own mask and with one of numbers."""
    pytest.importorskip("torch")
    program = torch_baselines.sdpa(inputs[name], backend=backend)
    np.testing.assert_allclose(program.answer(), dense(inputs[name]), atol=1e-5)


class Cuda:
    """GPU on which a launch takes a millisecond."""

    def __init__(self, *, has_graphs=True, free=0):
        self.now_ms, self.has_graphs, self.is_capturing, self.graph_ms = 0.0, has_graphs, False, 0.0
        self.is_available, self.mem_get_info, self.CUDAGraph = lambda: True, lambda: (free, 0), lambda: self

    def Event(self, *, enable_timing):
        event = types.SimpleNamespace(synchronize=lambda: None)
        event.record = lambda: setattr(event, "ms", self.now_ms)
        event.elapsed_time = lambda end: end.ms - event.ms
        return event

    def graph(self, graph, *, capture_error_mode):
        return self

    def __enter__(self):
        self.is_capturing = True

    def __exit__(self, *_):
        self.is_capturing = False
        if not self.has_graphs:
            raise RuntimeError("operation not permitted when stream is capturing")

    def launch(self):
        if self.is_capturing:
            self.graph_ms += 1
        else:
            self.now_ms += 1

    def replay(self):
        self.now_ms += self.graph_ms / 2  # without the time of the host


@pytest.mark.parametrize(
    ("has_graphs", "ms", "timed_by"), [(True, 0.5, "CUDA events, graph"), (False, 1, "CUDA events")]
)
def test_kernels_of_pytorch_are_timed_on_the_device(has_graphs, ms, timed_by):
    cuda = Cuda(has_graphs=has_graphs)
    program = kernel_timing.TorchProgram("", types.SimpleNamespace(cuda=cuda), cuda.launch)
    timing = program.time(target_s=8e-3, repeats=3)
    assert timing == (pytest.approx(1e-3 * ms), 8, timed_by)


def test_pytorch_without_memory_is_refused(torch, monkeypatch):
    torch.cuda = Cuda(free=3 << 30)
    torch_baselines.check_torch_has_room(["torch_sdpa"], 1 << 30)
    torch_baselines.check_torch_has_room(["rounds"], 2 << 30)
    with pytest.raises(ConfigError, match=r"3\.0 GiB and needs 3\.5; export XLA_PYTHON_CLIENT_MEM_FRACTION"):
        torch_baselines.check_torch_has_room(["rounds", "flashinfer"], 2 << 30)
    monkeypatch.setitem(sys.modules, "torch", None)
    torch_baselines.check_torch_has_room(["flashinfer"], 2 << 30)


@pytest.mark.usefixtures("small")
def test_a_run_that_is_out_of_time_still_reports(launch, capsys):
    """Skipped cases are named."""
    assert launch("benchmark_kernels", shared_llm=False, time_limit_s=0, **QUICK) == 0
    out = capsys.readouterr().out
    document, found = documented(out)
    assert (
        document["results"]["left_out"] == ["tiny"]
        and not found
        and "skipped because of --time_limit_s: tiny" in out
    )
