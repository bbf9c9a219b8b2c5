"""Steps that devices share: the arithmetic of their time line, the variants, and a small run of
everything."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from pensieve_jax import ConfigError, EngineConfig
from tests.launching import load

time_lines = load("pensieve_lab.parallel.time_line")
timed_process = load("pensieve_lab.parallel.timed_process")
shared_steps = load("pensieve_lab.parallel.shared_steps")
variants = load("pensieve_lab.parallel.variants")
Kernel = load("pensieve_lab.steps.device_trace").Kernel

SMALL = {
    "model": "random:llama-tiny", "num_layers": 1, "decodes": "2,4", "prompts": "40", "context_tokens": 40,
    "chunk_tokens": 16, "num_repeats": 1, "num_launches": 2, "ceiling_bytes": 2**20, "ceiling_matrix": 32,
}  # fmt: skip
TRACED = {
    0: [Kernel("gemm", 0, 10), Kernel("ncclDevKernel_AllReduce", 12, 20), Kernel("gemm", 33, 7)],
    1: [Kernel("gemm", 0, 18), Kernel("ncclDevKernel_AllReduce", 22, 11), Kernel("gemm", 33, 7)],
}


def test_a_time_line():
    """The first device reaches an all-reduce 10 ns early, which then takes 11 ns, with gaps around it."""
    found = time_lines.time_line(TRACED, num_steps=1, num_events=2)
    assert found["exchanges"]["counts"] == [1, 1]
    assert found["exchanges"]["waited_s"] == pytest.approx(10e-9)
    assert found["exchanges"]["exchanged_s"] == pytest.approx(11e-9)
    assert found["exchanges"]["skew_s"]["max"] == pytest.approx(10e-9)
    first = found["devices"]["0"]
    assert first["exchange_s"] == pytest.approx(20e-9) and first["num_exchanges"] == 1
    assert first["gaps_at_exchanges_s"] == pytest.approx(3e-9) and first["other_gaps_s"] == 0
    assert first["span_s"] == pytest.approx(40e-9) and first["computed_beside_s"] == 0
    assert found["events"]["names"] == ["gemm", "ncclDevKernel_AllReduce"]
    assert found["events"]["rows"]["1"] == [[1, 0.01, 0.011], [0, 0.021, 0.007]]
    assert time_lines.time_line({0: []}, 1, 5) == {}


def test_what_runs_beside_an_exchange():
    """Kernels before an exchange, across its start, inside, across its end and after it."""
    beside = [Kernel("gemm", start, 4) for start in (0, 8, 14, 18, 30)]
    found = time_lines.time_line({0: [*beside[:2], Kernel("all-reduce", 10, 10), *beside[2:]]}, 1, 0)
    assert found["devices"]["0"]["computed_beside_s"] == pytest.approx((2 + 4 + 2) * 1e-9)
    assert found["exchanges"] == {"counts": [1]}, "one device waits for no other"
    assert found["events"] == {"names": [], "rows": {"0": []}}, "none are asked for"


def test_memory_is_what_jax_says_and_what_the_driver_says(monkeypatch):
    """Sizes are in bytes; the driver counts all devices of the machine, from the first."""
    memory = load("pensieve_lab.parallel.memory")
    devices = [SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 5, "num_allocs": 1})]
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=devices))
    monkeypatch.setattr(memory, "_driver_lines", lambda: ["3, 7", "4, 7"])
    expected = {"bytes_in_use": 5, "driver_used_bytes": 3 << 20, "driver_total_bytes": 7 << 20}
    assert memory.devices_memory(mesh) == [expected]


@pytest.mark.parametrize(
    ("name", "exchanges"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", True),
        ("all-reduce-start_fusion", True),
        ("sum_of_rows", True),
        ("shares_by_peer_buffer", True),
        ("shares_by_handshake", True),
        ("MultiGpuBarrierKernel", True),
        ("add_and_norm_rms", False),
        ("loop_reduce_fusion", False),
        ("gemm_fusion_dot_12", False),
    ],
)
def test_names_of_exchanges(name, exchanges):
    assert time_lines.is_exchange(name) is exchanges


def test_the_pool_holds_the_larger_case_and_no_more():
    """128 contexts of 1,024 tokens, then one prompt of 2,048: not 128 sequences as long as that."""
    cases = shared_steps.Cases((32, 128), (2048,), 1024)
    config = cases.sized(EngineConfig())
    assert config.cache.gpu_pages == 128 * 32
    assert config.scheduler.token_buckets == (32, 128, 2048)
    assert [(name, len(rows), count) for name, rows, count in cases] == [
        ("decode 32 x 1024", 32, 128), ("decode 128 x 1024", 128, 128), ("prompt of 2048", 1, 1)
    ]  # fmt: skip


def test_variants_are_processes_with_flags_of_their_own(launch, monkeypatch, capsys, tmp_path):
    """The failure of one variant is reported, and the others continue; the document has all."""
    started = []

    def run_with_limit(command, environment, limit_s):
        started.append((command, environment["XLA_FLAGS"], limit_s))
        if len(started) == 2:
            return timed_process.ProcessResult(50.0, "took longer than 50 s", None, "compiling")
        if len(started) == 3:
            return timed_process.ProcessResult(3.0, "ended with status 1", 1, "a stack")
        if len(started) == 4:
            return timed_process.ProcessResult(4.0, None, 0, "")
        (path,) = [word.removeprefix("--json=") for word in command if word.startswith("--json=")][-1:]
        document = {"results": {"variants": {"default": {"device": "a GPU", "sums": {}}}}}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)
        return timed_process.ProcessResult(2.0, "ended with status 134", 134, "as it ended")

    monkeypatch.setattr(load("profile_parallel"), "run_with_limit", run_with_limit)
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    path = tmp_path / "found.json"
    names = ["default", "graphs", "own", "xla"]
    launch("profile_parallel", shared_llm=False, variants=",".join(names), timeout_s=50, json=str(path))
    document = json.loads(path.read_text(encoding="utf-8"))
    found = document["results"]["variants"]
    assert document["hardware"]["device"] == "a GPU" and found["default"]["xla_flags"] == "--mine"
    assert found["default"]["wall_s"] == 2.0 and "failed" not in found["default"], "it had measured"
    assert found["graphs"]["failed"] == "took longer than 50 s" and found["graphs"]["output"] == "compiling"
    assert found["own"]["failed"] == "ended with status 1" and found["own"]["output"] == "a stack"
    assert found["xla"]["failed"] == "wrote no document"
    assert [flags for _, flags, _ in started] == [
        "--mine", f"--mine {variants.VARIANTS['graphs'].xla_flags[0]}", "--mine", "--mine"
    ]  # fmt: skip
    assert "--all_reduce=jax_triton" in started[2][0] and all("--apart=false" in one[0] for one in started)
    assert all(
        one[0][-4:-1] == [f"--variants={name}", "--num_rounds=1", "--apart=false"]
        for name, one in zip(names, started, strict=True)
    )
    assert "took longer than 50 s" in capsys.readouterr().out


def test_rounds_alternate_between_variants(launch, monkeypatch, capsys):
    """Both variants run, then both again, each with its own flags under its own name."""
    turns = []

    def measure_in_process(name, variant, timeout_s):
        turns.append((name, variant))
        return {"turn": len(turns)}

    monkeypatch.setattr(load("profile_parallel"), "measure_in_process", measure_in_process)
    launch("profile_parallel", shared_llm=False, variants="default,xla", num_rounds=2)
    assert turns == [(name, variants.VARIANTS[name]) for name in ("default", "xla", "default", "xla")]
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["variants"]
    assert [(name, one["turn"]) for name, one in found.items()] == [
        ("default", 1), ("xla", 2), ("default_2", 3), ("xla_2", 4)
    ]  # fmt: skip


def test_when_time_is_up_no_variant_is_begun(launch, capsys):
    launch("profile_parallel", shared_llm=False, variants="default", budget_s=1.0)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["variants"]
    assert found == {"default": {"failed": "not started: 1 s were left"}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"variants": "nccl,none"}, "--variants is 'none'.*among default, own, own_stream_graphs"),
        ({"apart": False, "decodes": "x"}, "--decodes"),
        ({"apart": False, "model": "chat", "num_layers": 2}, "--num_layers is 2.*random:<preset>"),
    ],
)
def test_what_cannot_work_is_refused(launch, values, says):
    with pytest.raises(ConfigError, match=says):
        launch("profile_parallel", shared_llm=False, **values)


@pytest.mark.long
def test_on_two_virtual_devices(launch, compilation_cache, capsys):
    """All-reduces and steps of one variant run in this process."""
    launch(
        "profile_parallel", shared_llm=False, apart=False, traces=True,
        compilation_cache_dir=compilation_cache, **SMALL,
    )  # fmt: skip
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["variants"]["default"]
    assert set(found["sums"]) == {"2 x 64", "4 x 64", "40 x 64"}
    assert all(one["compiler_s"]["median"] > 0 for one in found["sums"].values())
    assert set(found["steps"]) == {"decode 2 x 40", "decode 4 x 40", "prompt of 40"}
    for one in found["steps"].values():
        assert one["share_of_bound"] == pytest.approx(one["bound_s"] / one["step_s"]["median"])
        assert one["trace"] == {}  # GPUs'
    assert len(found["memory"]) == 2
