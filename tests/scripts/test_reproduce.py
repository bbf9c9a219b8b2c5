"""Experiments: single steps, kernels, documents, what points are made of, and flags that cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_defs import num_parameters, preset
from pensieve_jax import ConfigError
from pensieve_jax.cache.cost import CostPoint, MeasuredCostModel
from pensieve_jax.simulator import DeviceProfile, Replica, run
from pensieve_jax.simulator.routing import AffinityRouter
from pensieve_jax.workload import Client
from tests.launching import ROOT, load
from tests.simulator.workloads import MAX_CONTEXT_TOKENS, PROFILE, make_sessions, small_config

SMALL = {"small": "true", "seeds": "0", "device": "h200", "num_processes": 1, "progress": "false"}
ALONE = {"progress": "false"}  # for experiments that simulate no workload


@pytest.fixture
def reproduce(launch, capsys):
    """Run an experiment; gives what it printed and its document."""

    def reproduce(experiment, **flags):
        flags = (ALONE if experiment in ("fig3", "fig4", "fig12") else SMALL) | flags
        assert launch("reproduce", shared_llm=False, experiment=experiment, **flags) == 0
        out = capsys.readouterr().out
        return out, json.loads(out.splitlines()[-1])

    return reproduce


@pytest.fixture
def experiments():
    """Modules of `experiments`."""
    return lambda name: load(f"experiments.{name}")


@pytest.mark.parametrize("device", ["a100", "h200"])
def test_a_history_comes_to_outweigh_the_reply(reproduce, device):
    out, document = reproduce("fig3", device=device)
    results = document["results"]
    assert "prompt_tokens" in out and f"simulated, {device}_opt-13b" in out
    assert {turn["prompt_tokens"] for turn in results["turns"]} == {32, 200}
    for model in ("opt-13b", "llama2-13b-gqa10"):
        for prompt in (32, 200):
            turns = [t for t in results["turns"] if (t["model"], t["prompt_tokens"]) == (model, prompt)]
            ratios = [turn["stateless_prefill_s"] / turn["generation_s"] for turn in turns]
            assert ratios == sorted(ratios) and ratios[0] < 0.3 and ratios[-1] > 1
            assert all(turn["stateful_prefill_s"] <= turn["stateless_prefill_s"] for turn in turns)
            assert turns[-1]["stateful_prefill_s"] < 0.05 * turns[-1]["stateless_prefill_s"]


def test_a_batch_that_needs_many_steps_takes_the_sum_of_them(experiments):
    """32 prompts of 128 tokens are two steps of 2,048."""
    steps, profile = experiments("single_steps"), PROFILE
    one_s = experiments("recompute").StepTime(profile.step, (2048,))
    load_of = experiments("recompute").StepLoad()
    for _ in range(16):
        load_of.add(128, 128)
    assert steps.prefill_s(profile, 0, 128) == pytest.approx(2 * one_s.seconds(load_of))


def test_the_cost_of_a_chunk_by_profile_is_the_measured_one(reproduce, experiments):
    """Although the profile was fitted to served steps, and not to these."""
    _, document = reproduce("fig4", device="h200")
    curves = document["results"]["curves"]
    measured = {p["context_len"]: p["total_s"] for p in curves["measured: h200_llama2-13b-gqa10"]}
    profile = {p["context_len"]: p["total_s"] for p in curves["h200_llama2-13b-gqa10"]}
    assert len(measured) > 5
    for context, seconds in measured.items():
        assert profile[context] == pytest.approx(seconds, rel=0.05)
    assert list(profile.values()) == sorted(profile.values())


def test_kernels_are_those_that_were_measured(reproduce):
    out, document = reproduce("fig12")
    results = document["results"]
    assert not results["simulated"]
    for path, command in results["document_commands"].items():
        assert json.loads((ROOT / path).read_text())["command"] == command
    assert "measured on NVIDIA H200" in out
    ours = [times for name, times in results["time_us"].items() if name.startswith("pallas")]
    assert ours and all(set(times) == {"1024", "4096", "16384"} for times in ours)


def test_the_figures_of_the_kernel_in_the_text_are_those_of_the_documents(reproduce):
    """A new document changes the text too, or this fails."""
    _, document = reproduce("fig12")
    page = (ROOT / "docs" / "evaluation.md").read_text()
    text = page.partition("## Figure 12")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    said = {int(row[0].replace(",", "")): row[1:] for row in rows if row[0][:1].isdigit()}
    assert set(said) == {1024, 4096, 16384}
    for context, cells in said.items():
        figures = [times.get(str(context)) for times in document["results"]["time_us"].values()]
        measured = sorted(round(us) for us in figures if us is not None)
        assert sorted(int(cell.replace(",", "")) for cell in cells if cell) == measured
    [summary] = [line for line in page.splitlines() if line.startswith("| 12, ")]
    assert f"| {said[4096][0]} us; cuDNN on contiguous keys {said[4096][2]} |" in summary


def test_kernels_that_were_only_tried_or_failed_are_left_out(experiments):
    entry = {"case": "multi_32x8x4096_mha40", "kernel": "flash_attention_3", "time_us": 5.0}
    tried = entry | {"kernel": "pallas_triton", "is_tried": True}
    failed = {"case": "multi_32x8x4096_mha40", "kernel": "torch_cudnn", "reason": "failed"}
    other = entry | {"case": "tiny"}
    document = {"results": {"measurements": [entry, tried, failed, other]}}
    assert experiments("kernels")._times_us(document) == {"flash_attention_3": {4096: 5.0}}


def test_the_document_and_the_plot_for_any_number_of_processes(reproduce, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "fig10b.png"
    out, document = reproduce("fig10b", seeds="0,1", plot=plot)
    assert {"versions", "hardware", "command", "units", "revision"} <= document.keys()
    assert document["results"]["profiles"]["h200_llama2-13b-gqa10"]["source"] == "measured"
    assert "h200_llama2-13b-gqa10" in document["hardware"]["device"]
    assert plot.read_bytes().startswith(b"\x89PNG") and 10_000 < plot.stat().st_size < 150_000
    _, again = reproduce("fig10b", seeds="0,1", num_processes=2)
    assert again["results"] == document["results"]
    assert "pensieve-gpu" in out and "x stateless" in out


def test_shows_progress(launch, capsys):
    assert launch("reproduce", shared_llm=False, experiment="fig10b", **SMALL | {"progress": "true"}) == 0
    # The bar's first state: a later one is drawn only if enough time has passed since the one before.
    assert "fig10b:" in (shown := capsys.readouterr().err) and "0/3" in shown


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"seeds": "0,x"}, "--seeds is '0,x'"),
        ({"seeds": "1,1"}, "--seeds is '1,1'"),
        ({"seeds": "-1"}, "--seeds is '-1'"),
        ({"num_processes": 0}, "--num_processes is 0"),
        ({"plot": "/nowhere/fig.png"}, "a directory that exists"),
        ({"experiment": "traces"}, "--traces is ''"),
        ({"experiment": "traces", "traces": "mooncake"}, "--traces is 'mooncake'"),
        ({"experiment": "traces", "traces": "mooncake:/nowhere"}, "--traces is 'mooncake:/nowhere'"),
        ({"experiment": "traces", "traces": f"sharegpt:{__file__}"}, "--traces is 'sharegpt'"),
    ],
)
def test_refuses(launch, flags, says):
    with pytest.raises(ConfigError, match=says):
        launch("reproduce", shared_llm=False, **{"experiment": "fig10a"} | SMALL | flags)


@pytest.mark.parametrize(
    ("experiment", "name", "value"),
    [
        ("fig3", "seeds", "0,1"),
        ("fig3", "num_processes", 2),
        ("fig4", "small", "true"),
        ("fig12", "device", "a100"),
        ("fig10a", "traces", f"pensieve:{__file__}"),
        ("fig15", "traces", ""),
    ],
)
def test_refuses_flags_that_change_nothing(launch, experiment, name, value):
    with pytest.raises(ConfigError, match=f"--{name} is .* left out: --experiment={experiment}"):
        launch("reproduce", shared_llm=False, experiment=experiment, **{name: value})


@pytest.mark.parametrize("policy", ["retention", "lru", "conversation", "trailing"])
def test_seconds_from_answers_are_those_of_what_was_granted(experiments, policy):
    """Answers say how much was recomputed, not where: what that leaves out is small."""
    chunk_tokens = 16
    points = [CostPoint(length, 0.0, 0.0, 1 + length / 100) for length in (16, 400)]
    costs = MeasuredCostModel(points)
    recompute = experiments("recompute")
    granted_s = 0.0

    def observe(output):
        nonlocal granted_s
        for request, start, end, _ in output.grants:
            for position in range(start, min(end, request.num_history_tokens - 1)):
                context_len = (position // chunk_tokens + 1) * chunk_tokens
                granted_s += costs.chunk_cost_s(context_len) / chunk_tokens

    # So many staged copies and so few at once that nobody is suspended: that would be recomputed as well.
    config = small_config(policy=policy, gpu_pages=80, cpu_pages=60, max_num_running=3)
    replica = Replica(config, PROFILE, costs, observe=observe)
    sessions = make_sessions(0, num_sessions=40, think_s=2.0)
    answers = list(run(Client(sessions, MAX_CONTEXT_TOKENS), [replica], AffinityRouter(0)))
    assert not sum(answer.usage.resume_recomputed_tokens for answer in answers)
    seconds = recompute.RecomputeSeconds(costs, chunk_tokens, MAX_CONTEXT_TOKENS)
    recompute_s, history_s = seconds.of(answers, policy)
    assert 0.05 * history_s < recompute_s < 0.9 * history_s
    assert recompute_s == pytest.approx(granted_s, rel=0.05)


def test_a_profile_of_four_devices_goes_by_counts(experiments):
    machines = experiments("machines")
    one, four = DeviceProfile.load("h200_opt-13b"), machines.load_profile("h200", "opt-66b")
    assert machines.profile_name("h200", "opt-66b") == "h200x4_opt-66b"
    assert four.source == "derived" and "assumed" in four.provenance["interconnect"]
    weights = num_parameters(preset("opt-66b")) / num_parameters(preset("opt-13b")) / 4
    assert four.step.weight_read_s == pytest.approx(weights * one.step.weight_read_s)
    assert four.kv_token_bytes == 2 * 64 * 72 * 128 * 2
    assert four.step.kv_read_s == pytest.approx(
        one.step.kv_read_s * four.kv_token_bytes / one.kv_token_bytes / 4
    )
    assert four.to_device.bytes_per_s == 4 * one.to_device.bytes_per_s
    gpu_bytes, cpu_bytes = machines.memory_bytes("opt-66b")
    assert (gpu_bytes, cpu_bytes) == (160_000_000_000, 880_000_000_000)


def test_a_curve_is_read_where_it_first_rises_over_the_level():
    crossing_at = load("common.crossing").crossing_at
    assert crossing_at(20, [(1, 10), (2, 15), (3, 25), (4, 12), (5, 30)]) == 2.5
    assert crossing_at(20, [(1, 10), (2, 19)]) is None
    assert crossing_at(20, [(1, 30), (2, 40)]) is None


def test_systems_without_host_memory_are_not_simulated_far_beyond_the_level(experiments):
    sweeps, settings = (
        experiments("paper_sweeps"),
        experiments("settings").Settings(device="a100", seeds=(0,)),
    )
    points = experiments("registry").EXPERIMENTS["fig10a"].points(settings)
    rates = {
        name: [point.x for point in points if point.series == name]
        for name in ("pensieve", "pensieve-gpu", "stateless")
    }
    until = sweeps.OPT_SHAREGPT.one_tier_until_per_s["a100"]
    assert (
        rates["stateless"] == rates["pensieve-gpu"] == [rate for rate in rates["pensieve"] if rate <= until]
    )
    assert rates["pensieve"] == list(sweeps.OPT_SHAREGPT.rates_per_s["a100"])


@pytest.mark.parametrize(
    "name", ["fig10a", "fig10b", "fig10c", "fig10d", "fig11", "fig13", "fig14", "fig15", "thesis3.15"]
)
def test_runs_begin_when_the_longest_of_the_first_conversations_may_be_over(experiments, name):
    """Otherwise the longest histories of a steady state would be missing."""
    settings = experiments("settings").Settings(device="a100", seeds=(0,))
    for workload in {point.workload for point in experiments("registry").EXPERIMENTS[name].points(settings)}:
        num_turns = max(len(conversation.turns) for conversation in workload.conversations(0).conversations)
        assert workload.mid_life_s >= num_turns * workload.think.mean_s


def test_memory_for_a_trace_has_room_for_its_longest_conversation_and_a_host_tier(experiments):
    place = experiments("recorded_traces")._place
    assert place(33_333, 1000, 32) == (8256, 33_000 - 8256), "a quarter on the device, in whole chunks"
    assert place(6000, 4000, 64) == (5056, 2528), "1.25 conversations, and half as much beside them"


def test_results_are_of_experiments_that_there_are(experiments):
    """Committed documents, whatever they were called with, are of this registry."""
    paths = sorted(Path(ROOT / "docs" / "results").glob("sim_*.json"))
    assert paths
    for path in paths:
        results = json.loads(path.read_text())["results"]
        experiment = experiments("registry").EXPERIMENTS[results["experiment"]]
        assert ("small" in results, "seeds" in results) == tuple(
            name in experiment.flags for name in ("small", "seeds")
        ), path.name
        assert not results.get("small")
        seeds = {str(seed) for seed in results.get("seeds", ())}
        for point in results.get("points", ()):
            by_seed = [set(figures) for name, figures in point.items() if name.endswith("_by_seed")]
            assert len(by_seed) == 2 and all(found == seeds for found in by_seed), path.name
        for one in results.get("at_level", ()):  # which some seeds may not reach
            by_seed = [set(figures) for name, figures in one.items() if name.endswith("_by_seed")]
            assert by_seed and all(found <= seeds for found in by_seed), path.name
