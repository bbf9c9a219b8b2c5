"""Experiments: single steps, kernels, documents, the contents of points, and invalid flags."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lab.tests.simulator.workloads import MAX_CONTEXT_TOKENS, PROFILE, make_sessions, small_config
from model_defs import num_parameters, preset
from pensieve_jax import ConfigError
from pensieve_jax.cache.order.cost import CostPoint, MeasuredCostModel
from pensieve_lab.simulator import DeviceProfile, Replica, run
from pensieve_lab.simulator.routing import AffinityRouter
from pensieve_lab.workload import Client
from tests.launching import ROOT, load

SMALL = {"small": "true", "seeds": "0", "device": "h200", "num_processes": 1, "progress": "false"}
ALONE = {"progress": "false"}  # for experiments that simulate no workload


@pytest.fixture
def reproduce(launch, capsys):
    """Run an experiment; returns what it printed and its document."""

    def reproduce(experiment, **flags):
        simulates_no_workload = experiment in ("fig3", "fig4", "fig11-measured", "fig12", "thesis3.10")
        flags = (ALONE if simulates_no_workload else SMALL) | flags
        assert launch("reproduce", shared_llm=False, experiment=experiment, **flags) == 0
        out = capsys.readouterr().out
        return out, json.loads(out.splitlines()[-1])

    return reproduce


@pytest.fixture
def experiments():
    """Return the modules of `experiments` by name."""
    return lambda name: load(f"pensieve_lab.experiments.{name}")


@pytest.mark.parametrize("experiment", ["baton-table1", "cells2.7"])
def test_a_long_experiment_announces_that_it_takes_minutes(launch, monkeypatch, capsys, experiment):
    """It printed nothing until it had finished."""

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(load("reproduce"), "measure_all", stop)
    for flags, is_announced in (({}, True), ({"small": "true"}, False), ({"progress": "false"}, False)):
        with pytest.raises(KeyboardInterrupt):
            launch("reproduce", shared_llm=False, experiment=experiment, **flags)
        assert ("may take minutes; --small takes seconds" in capsys.readouterr().err) is is_announced


@pytest.mark.parametrize("device", ["a100", "h200"])
def test_a_long_history_costs_more_than_the_reply(reproduce, device):
    out, document = reproduce("fig3", device=device)
    results = document["results"]
    assert "prompt_tokens" in out and f"simulated on {device}_opt-13b" in out
    assert {turn["prompt_tokens"] for turn in results["turns"]} == {32, 200}
    for model in ("opt-13b", "llama2-13b-gqa10"):
        for prompt in (32, 200):
            turns = [t for t in results["turns"] if (t["model"], t["prompt_tokens"]) == (model, prompt)]
            ratios = [turn["stateless_prefill_s"] / turn["generation_s"] for turn in turns]
            assert ratios == sorted(ratios) and ratios[0] < 0.3 and ratios[-1] > 1
            assert all(turn["stateful_prefill_s"] <= turn["stateless_prefill_s"] for turn in turns)
            assert turns[-1]["stateful_prefill_s"] < 0.05 * turns[-1]["stateless_prefill_s"]


def test_a_batch_that_needs_many_steps_takes_the_sum_of_them(experiments):
    """32 prompts of 128 tokens take two steps of 2,048."""
    steps, profile = experiments("single_steps"), PROFILE
    one_s = experiments("recompute").StepTime(profile.step, (2048,))
    load_of = experiments("recompute").StepLoad()
    for _ in range(16):
        load_of.add(128, 128)
    assert steps.prefill_s(profile, 0, 128) == pytest.approx(2 * one_s.seconds(load_of))


def test_the_cost_of_a_chunk_by_profile_is_the_measured_one(reproduce, experiments):
    """The profile was fitted to served steps, not to these."""
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
    measured = json.loads((ROOT / results["document"]).read_text())
    assert measured["command"] == results["document_command"]
    assert "measured on NVIDIA H200" in out and "straw man" in out
    assert set(results["time_us"]) == {"1024", "4096", "16384"}
    for context, by_kernel in results["time_us"].items():
        case = f"multi_32x8x{context}_mha40"
        times = {e["kernel"]: e["time_us"] for e in measured["results"]["measurements"] if e["case"] == case}
        best = by_kernel.pop("flash_attention_3_best")
        assert best == min(us for kernel, us in times.items() if kernel.startswith("flash_attention_3"))
        assert by_kernel.items() <= times.items() and len(by_kernel) == 5


def label_of(loop):
    """Return the series of a loop's point: vLLM's series differ by the maximum tokens of a step."""
    if loop["system"] == "vllm-offload":
        return f"vLLM ({loop['options']['max_num_batched_tokens']:,})"
    labels = {"pensieve": "both tiers", "pensieve-gpu": "device alone", "stateless": "no state"}
    return labels[loop["system"]]


def test_loops_are_those_that_were_measured(reproduce, tmp_path):
    """Every committed loop of several GPUs is there, with its figures, by system and users."""
    out, document = reproduce("fig11-measured", plot=str(tmp_path / "loops.png"))
    results = document["results"]
    assert not results["simulated"] and (tmp_path / "loops.png").stat().st_size > 10_000
    found = [part for part in results.values() if isinstance(part, dict) and "documents" in part]
    named = [name for part in found for name in part["documents"]]
    committed = [
        path.name
        for pattern in ("h200x2_open_*.json", "h200x4_open_*.json", "h100x4_open_*.json")
        for path in (ROOT / "lab" / "results").glob(pattern)
    ]
    replaced = {"h100x4_open_llama2-70b_stateless_1_first_sums.json"}
    assert sorted(named) == sorted(set(committed) - replaced) and len(found) == 4
    for part in found:
        curves = [*part["measured"].values(), *part["of_other_users"].values()]
        assert sum(map(len, curves)) == len(part["documents"])
        for name in part["documents"]:
            loop = json.loads((ROOT / "lab" / "results" / name).read_text())["results"]
            [point] = loop["points"]
            mean_ms = 1e3 * point["normalized_latency_s"]["mean"]
            # Documents written before several seeds were possible have none in their points.
            users = "of_other_users" if point.get("seed", loop["settings"].get("seed", 0)) else "measured"
            assert [point["requests_per_s"], pytest.approx(mean_ms)] in part[users][label_of(loop)]
            assert f"{mean_ms:.1f}" in out


def test_tried_and_failed_kernels_are_left_out(experiments):
    entry = {"case": "multi_32x8x4096_mha40", "kernel": "flash_attention_3", "time_us": 5.0}
    other_pages = entry | {"kernel": "flash_attention_3_page64", "time_us": 4.0}
    tried = entry | {"kernel": "pallas_mosaic_gpu", "is_tried": True}
    failed = {"case": "multi_32x8x4096_mha40", "kernel": "torch_cudnn", "reason": "failed"}
    unknown = entry | {"kernel": "somebody's"}
    other = entry | {"case": "tiny"}
    document = {"results": {"measurements": [entry, other_pages, tried, failed, unknown, other]}}
    assert experiments("kernels").times_of(document) == {
        4096: {"flash_attention_3": 5.0, "flash_attention_3_best": 4.0}
    }


@pytest.mark.long
def test_the_document_and_the_plot_for_any_number_of_processes(reproduce, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "fig10b.png"
    out, document = reproduce("fig10b", plot=plot)
    assert {"versions", "hardware", "command", "units", "revision"} <= document.keys()
    assert document["results"]["profiles"]["h200_llama2-13b-gqa10"]["source"] == "measured"
    assert "h200_llama2-13b-gqa10" in document["hardware"]["device"]
    assert plot.read_bytes().startswith(b"\x89PNG") and 10_000 < plot.stat().st_size < 150_000
    _, again = reproduce("fig10b", num_processes=2)
    assert again["results"] == document["results"]
    assert "pensieve-gpu" in out and "x stateless" in out


@pytest.mark.long
def test_an_interrupted_run_goes_on_where_it_stopped(reproduce, experiments, monkeypatch, tmp_path):
    """Each point is simulated once; any difference makes a new one."""
    simulated, known, simulate = [], {}, experiments("points").measure

    def measure(point):
        simulated.append(point)
        place = point.series, point.x
        if place not in known:
            known[place] = simulate(point)
        return known[place]._replace(point=point)

    monkeypatch.setattr(experiments("point_cache"), "measure", measure)
    _, first = reproduce("fig13", keep=tmp_path)
    num_points = len(simulated)
    assert num_points == len(list(tmp_path.iterdir())) > 2
    lost = sorted(tmp_path.iterdir())[0]
    lost.unlink()
    _, second = reproduce("fig13", keep=tmp_path)
    assert second["results"] == first["results"]
    assert len(simulated) == num_points + 1 and lost.exists()
    reproduce("fig13", keep=tmp_path, seeds="1")
    assert len(simulated) == 2 * num_points + 1


def test_a_cached_point_is_of_the_same_trace_and_code(experiments, monkeypatch, tmp_path):
    cache, points = experiments("point_cache"), experiments("points")
    workloads = experiments("workloads")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    workload = workloads.Workload(trace=(trace, "pensieve"), rate_per_s=1.0)

    def key(**fields):
        cache._digest.cache_clear()
        described = {"panel": "", "series": "", "x": 1.0, "seed": 0, "device": "h200", "model": "opt-13b"}
        return cache.key(points.Point(**described | {"engine": None, "workload": workload} | fields))

    first = key()
    assert key() == first
    assert key(seed=1) != first and key(earlier_workload=workload) != first
    trace.write_text("{ }")
    assert key() != first
    trace.write_text("{}")
    elsewhere = trace.rename(tmp_path / "elsewhere.jsonl")
    assert key(workload=dataclasses.replace(workload, trace=(elsewhere, "pensieve"))) == first
    elsewhere.rename(trace)
    monkeypatch.setattr(cache, "_code_digest", lambda: "other code")
    assert key() != first


@pytest.mark.long
def test_shows_progress(launch, capsys):
    assert launch("reproduce", shared_llm=False, experiment="fig10b", **SMALL | {"progress": "true"}) == 0
    # The bar's first state: a later one is drawn only if enough time has passed since the one before.
    assert "fig10b:" in (shown := capsys.readouterr().err) and "0/9" in shown


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"seeds": "0,x"}, "--seeds is '0,x'"),
        ({"seeds": "1,1"}, "--seeds is '1,1'"),
        ({"seeds": "-1"}, "--seeds is '-1'"),
        ({"num_processes": 0}, "--num_processes is 0"),
        ({"keep": __file__}, "--keep is .*a directory"),
        ({"keep": f"{__file__}/below"}, "--keep is .*a directory"),
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
        ("fig3", "keep", "kept"),
        ("fig4", "small", "true"),
        ("fig12", "device", "a100"),
        ("fig10a", "traces", f"pensieve:{__file__}"),
        ("fig15", "traces", ""),
        ("thesis3.10", "device", "a100"),
    ],
)
def test_refuses_flags_that_change_nothing(launch, experiment, name, value):
    with pytest.raises(ConfigError, match=f"--{name} is .* left out: --experiment={experiment}"):
        launch("reproduce", shared_llm=False, experiment=experiment, **{name: value})


@pytest.mark.parametrize("policy", ["retention", "lru", "conversation", "trailing"])
def test_seconds_from_answers_are_those_of_what_was_granted(experiments, policy):
    """Answers say how much was recomputed, not where; the difference is small."""
    chunk_tokens = 16
    points = [CostPoint(length, 0.0, 0.0, 1 + length / 100) for length in (16, 400)]
    costs = MeasuredCostModel(points)
    recompute = experiments("recompute")
    granted_s = 0.0

    def observe(output):
        nonlocal granted_s
        for request, start, end, *_ in output.grants:
            for position in range(start, min(end, request.num_history_tokens - 1)):
                context_len = (position // chunk_tokens + 1) * chunk_tokens
                granted_s += costs.chunk_cost_s(context_len) / chunk_tokens

    # Many staged copies and few running requests, so that no request is suspended, which would also
    # recompute.
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


def test_profiles_are_found_by_name(experiments):
    """Profiles of the package, those of several GPUs, and of an H100, whose memory is slower."""
    machines = experiments("machines")
    assert machines.find_profile("h200_opt-13b") == DeviceProfile.load("h200_opt-13b")
    assert {"a100x4_opt-66b", "h200x4_llama2-70b", "h100x4_llama2-70b"} <= set(machines.derived_names())
    two, four = (machines.find_profile(f"h200x{count}_opt-66b") for count in (2, 4))
    assert (two.num_devices, four.num_devices) == (2, 4) and two.device == "2 x NVIDIA H200 (PCIe 5 x16)"
    assert two.step.kv_read_s == pytest.approx(2 * four.step.kv_read_s)
    assert "5 us" in two.provenance["interconnect"] and "10 us" in four.provenance["interconnect"]
    fast, slow = (machines.find_profile(f"{device}x4_llama2-70b") for device in ("h200", "h100"))
    assert fast == machines.load_profile("h200", "llama2-70b")
    assert slow.step.weight_read_s / fast.step.weight_read_s == pytest.approx(4.61 / 3.17)
    assert slow.step.kv_read_s / fast.step.kv_read_s == pytest.approx(4.61 / 3.17)
    assert slow.step.token_s == fast.step.token_s and slow.kv_token_bytes == fast.kv_token_bytes
    assert slow.device == "4 x NVIDIA H100 (PCIe 5 x16)" and "x 1.45" in slow.provenance["derivation"]
    one = machines.find_profile("h100_llama2-13b-gqa10")
    assert one == machines.load_profile("h100", "llama2-13b-gqa10") and one.device.startswith("NVIDIA H100")
    with pytest.raises(ConfigError, match="h300x4_llama2-70b"):
        machines.find_profile("h300x4_llama2-70b")


def test_a_curve_is_read_where_it_first_rises_over_the_level():
    crossing_at = load("pensieve_lab.common.crossing").crossing_at
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
    place = experiments("trace_studies")._place
    assert place(33_333, 1000, 32) == (8256, 33_000 - 8256), "a quarter on the device, in whole chunks"
    assert place(6000, 4000, 64) == (5056, 2528), "1.25 conversations, and half as much beside them"


def test_results_are_of_experiments_that_there_are(experiments):
    """Committed documents belong to this registry, whatever command produced them."""
    paths = sorted(Path(ROOT / "lab" / "results").glob("sim_*.json"))
    assert paths
    for path in paths:
        results = json.loads(path.read_text())["results"]
        experiment = experiments("registry").EXPERIMENTS[results["experiment"]]
        assert ("small" in results, "seeds" in results) == tuple(
            name in experiment.flags for name in ("small", "seeds")
        ), path.name
        assert not results.get("small")
        seeds = {str(seed) for seed in results.get("seeds", ())}
        points = results.get("points", ())
        if points and "seed" in points[0]:  # a row for each seed, of cells
            assert {str(point["seed"]) for point in points} == seeds, path.name
            continue
        for point in points:
            by_seed = [set(figures) for name, figures in point.items() if name.endswith("_by_seed")]
            assert len(by_seed) >= 2 and all(found == seeds for found in by_seed), path.name
        for one in results.get("at_level", ()):
            by_seed = [set(figures) for name, figures in one.items() if name.endswith("_by_seed")]
            assert by_seed and all(found <= seeds for found in by_seed), path.name


def test_the_levels_and_ratios_of_sweeps_are_those_of_the_papers(experiments):
    claims, sweeps = experiments("claims"), experiments("paper_sweeps")
    panels = {
        "10a": sweeps.OPT_SHAREGPT,
        "10b": sweeps.LLAMA_SHAREGPT,
        "10c": sweeps.OPT_ULTRACHAT,
        "10d": sweeps.LLAMA_ULTRACHAT,
        "11a": sweeps.OPT_66B,
        "11b": sweeps.LLAMA_70B,
    }
    for figure, panel in panels.items():
        (level_ms,) = {claim.level_ms for claim in claims.claims_of(figure)}
        assert panel.level_s["a100"] == level_ms / 1e3
        assert f"at {level_ms:g} ms (section 6." in panel.paper
    assert panels["10d"].paper == "1.58 x vLLM, 1.47 x TensorRT-LLM at 100 ms (section 6.2)"
    assert claims.in_words("3.15b") == "1.70 x vLLM (thesis section 3.6.4)"


def test_claims_have_names_of_their_own_and_sources(experiments):
    claims = experiments("claims")
    every = claims.all_claims()
    assert len({claim.id for claim in every}) == len(every) > 30
    sources = tomllib.loads(claims.PAPERS.read_text())["sources"]
    assert {claim.source for claim in every} == set(sources)
    assert all(claim.section and claim.condition and claim.unit for claim in every)
    with pytest.raises(KeyError, match="no claim of Figure 99"):
        claims.claims_of("99")
    with pytest.raises(KeyError, match="no level of Figure 14"):
        claims.level_s_of("14")


def test_a_seed_that_never_reaches_the_level_is_announced(experiments):
    levels = experiments("levels")
    reaches, never = {0: 2.0, 1: 4.0}, {0: 1.0, 1: None}
    assert levels.ratios(reaches, never) == {0: 2.0, 1: None}
    assert levels.in_cell(reaches) == "3.00 (2.00-4.00)"
    assert levels.in_cell(never) == "1.00 (1.00-1.00), 1 of 2 seeds"
    assert levels.in_cell({0: None}) == "-"


def test_nearly_all_sessions_have_returned_before_a_window_begins(experiments):
    """A session in mid-life that has not returned has a history in no memory, which would count as lost."""
    settings = experiments("settings").Settings(device="a100", seeds=(0,))
    for name in ("fig10a", "fig10d", "fig11", "fig13", "fig14", "fig15", "thesis3.15"):
        points = experiments("registry").EXPERIMENTS[name].points(settings)
        for workload in {point.workload for point in points}:
            assert math.exp(-workload.warm_up_s / workload.think.mean_s) < 0.02, name


def test_what_is_cut_off_is_counted(experiments):
    panel = experiments("panels").Panel(
        title="", x_label="", y_label="", curves={"a": [(1, 5), (2, 11)], "b": [(1, 12)]}, y_max=10
    )
    assert panel.num_cut_off == 2


@pytest.mark.parametrize(("level", "side"), [(18, "top"), (3, "bottom")])
def test_one_place_is_in_the_middle_and_a_level_is_written_inside(experiments, level, side):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    panel = experiments("panels").Panel(
        title="", x_label="", y_label="", curves={"a": [(1000, 9)]}, seeds={"a": [[(1000, 8)], [(1000, 10)]]},
        level=level, log_x=True,
    )  # fmt: skip
    axes = figure.subplots()
    experiments("panels")._draw(axes, panel, with_title=True, with_legend=True)
    assert axes.get_xlim() == (500, 2000) and len(axes.lines) == 1 + 2 + 1
    assert [text.get_va() for text in axes.texts] == [side]


@pytest.mark.long
def test_made_conversations_are_near_the_thesis(reproduce):
    _, document = reproduce("thesis3.10", seeds="0")
    results = document["results"]
    made = results["made"]["sharegpt"]["0"]
    assert made["mean_turns"] == pytest.approx(5.56, rel=0.02)
    assert made["many_turns_share"] == pytest.approx(0.36, abs=0.04)
    assert made["over_cap_share"] < 0.0057, "the tail of contexts is lighter than ShareGPT's"
    assert not results["simulated"]


@pytest.mark.long
def test_kept_points_go_by_all_code_that_a_point_runs(experiments):
    """This runs in its own process, since this one has imported more."""
    kept = experiments("point_cache")
    hashed = {path.resolve() for pattern in kept._CODE for path in kept._ROOT.glob(pattern)}
    script = (
        "import sys, pensieve_lab.experiments.points\n"
        "print('\\n'.join(filter(None, (getattr(m, '__file__', None) for m in sys.modules.values()))))"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'lab'}"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    ours = {
        path
        for line in done.stdout.split()
        if (path := Path(line).resolve()).is_relative_to(ROOT) and ".venv" not in path.parts
    }
    assert len(ours) > 50 and ours <= hashed
