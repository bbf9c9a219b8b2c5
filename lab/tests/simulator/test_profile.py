"""Profiles: the measurements that they must reproduce, the effects on a step's time, and invalid files."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from pensieve_jax import ConfigError
from pensieve_lab.common.attention_work import reads_and_pairs
from pensieve_lab.simulator import DeviceProfile, profile_names
from pensieve_lab.simulator import profile as profile_module
from pensieve_lab.simulator.profile import ExpertCosts
from pensieve_lab.simulator.step_time import StepLoad, StepTime, ThermalModel

H200 = DeviceProfile.load("h200_llama2-13b-gqa10")
TILED = DeviceProfile.load("h200_llama2-13b-gqa10_tiles")
PATH = Path(profile_module.__file__).parent / "profiles" / "h200_llama2-13b-gqa10.json"


def load_of(rows):
    load = StepLoad()
    for count, q_len, kv_len in rows:
        for _ in range(count):
            load.add(q_len, kv_len)
    return load


def seconds(*rows, bucket=2048, profile=H200):
    return StepTime(profile.step, (bucket,)).seconds(load_of(rows))


def _figures():
    for name in profile_names():
        profile = DeviceProfile.load(name)
        for figure in profile.figures:
            yield pytest.param(profile, figure, id=f"{profile.model}, {figure.what[:40]}")


@pytest.mark.parametrize(("profile", "figure"), list(_figures()))
def test_reproduces_what_was_measured(profile, figure):
    modelled_s = seconds(*figure.rows, bucket=figure.bucket_tokens, profile=profile)
    assert modelled_s == pytest.approx(figure.measured_s, rel=figure.tolerance)
    assert figure.tolerance <= 0.1


def test_reproduces_the_parts_of_a_step():
    """Attention with its merges, and the rest, by the traces of the steps that it was fitted to."""
    time = StepTime(H200.step, (128, 2048))
    decode, prompt = load_of([(128, 1, 1024)]), load_of([(1, 2048, 2048)])
    for load, attention_s, others_s in ((decode, 6.76e-3, 7.36e-3), (prompt, 4.31e-3, 71.1e-3)):
        assert time.attention_s(load, 2048) == pytest.approx(attention_s, rel=0.05)
        assert time.seconds(load) - time.attention_s(load, 2048) == pytest.approx(others_s, rel=0.12), (
            "served: longer than bare"
        )


def test_every_profile_says_where_it_is_from():
    assert set(profile_names()) >= {"h200_llama2-13b-gqa10", "a100_llama2-13b-gqa10", "a100_opt-13b"}
    for name in profile_names():
        profile = DeviceProfile.load(name)
        assert profile.provenance and profile.model in name
        assert (profile.source == "measured") == bool(profile.figures), name
        assert 5e-3 < seconds((1, 1, 100), bucket=16, profile=profile) < 30e-3


def test_heat_follows_what_steps_do():
    heat = ThermalModel(2.0)
    assert heat.step(2.0, is_heating=True) == pytest.approx(math.exp(-1.0)), "the mean of 1 - exp(-t / 2)"
    first = heat.step(1e-9, is_heating=False)
    assert first == pytest.approx(1 - math.exp(-1.0))
    assert heat.step(1000.0, is_heating=True) == pytest.approx(1.0, abs=1e-3)
    heat.rest(2.0)
    assert heat.step(1e-9, is_heating=True) == pytest.approx(math.exp(-1.0))
    heat.rest(-5.0)
    assert heat.step(1e-9, is_heating=True) == pytest.approx(math.exp(-1.0)), "the device did not rest"
    assert ThermalModel(0.0).step(3.0, is_heating=True) == 0.0


def test_heat_is_felt_by_products_alone():
    time, costs = StepTime(H200.step, (128, 2048)), H200.step
    decode, prompt = load_of([(128, 1, 1024)]), load_of([(1, 2048, 2048)])
    assert not time.is_heating(128, 128) and time.is_heating(2048, 2048)
    assert time.seconds(decode) == time.seconds(decode, 0.0)
    assert time.seconds(prompt) == time.seconds(prompt, 1.0)
    products_s = costs.token_s * 2048
    extra_s = time.seconds(prompt, 1.0) - time.seconds(prompt, 0.0)
    assert extra_s == pytest.approx(costs.hot_share * products_s, rel=0.01)
    assert 0 < time.seconds(decode, 1.0) - time.seconds(decode, 0.0) < costs.hot_share * products_s / 16


def test_rows_of_either_kind_are_counted():
    load = load_of([(3, 1, 10), (2, 5, 5)])
    assert (load.num_rows, load.num_tokens) == (5, 13)
    load = load_of([(3, 1, 10)])
    load.lengthen()
    assert load.num_rows == 3


def test_the_launching_thread_selects_the_host_costs():
    assert H200.launches == "jaxlib" and H200.host == H200.hosts["jaxlib"]
    older = H200.launching("engine")
    assert older.host == H200.hosts["engine"] and older.launches == "engine"
    with pytest.raises(ConfigError, match="launches is 'engine', but must be one of the profile's hosts"):
        DeviceProfile.load("a100_opt-13b").launching("engine")


def test_state_may_take_fewer_bytes():
    """Steps read the KV cache by the byte, at its own speed; everything else is unchanged."""
    profile = DeviceProfile.load("h200_llama2-13b-gqa10")
    half = profile.keeping(profile.kv_token_bytes // 2)
    assert half.kv_token_bytes == profile.kv_token_bytes // 2
    assert half.step.kv_read_s == pytest.approx(profile.step.kv_read_s / 2)
    slow = profile.keeping(profile.kv_token_bytes // 2, rate=0.5)
    assert slow.step.kv_read_s == pytest.approx(profile.step.kv_read_s)
    assert dataclasses.replace(slow, kv_token_bytes=profile.kv_token_bytes, step=profile.step) == profile


def test_padding_is_what_a_step_would_take_less_in_a_bucket_of_its_size():
    time, exact = StepTime(H200.step, (16, 512)), StepTime(H200.step, (300,))
    load = load_of([(299, 1, 1000), (1, 1, 4000)])
    assert time.padding_s(300) == pytest.approx(time.seconds(load, 0.0) - exact.seconds(load, 0.0))
    assert time.padding_s(300) > 0 == time.padding_s(512) == time.padding_s(16)
    assert time.padding_s(17) > time.padding_s(300), "more of it"


def test_more_takes_longer():
    base = seconds((64, 1, 1000), bucket=512)
    assert seconds((64, 1, 1000)) > seconds((64, 1, 1000), bucket=1024) > base
    assert seconds((64, 1, 2000), bucket=512) > base
    assert seconds((64, 1, 1000), (1, 256, 256), bucket=512) > base
    assert seconds((1, 256, 4096), bucket=512) > seconds((1, 256, 256), bucket=512)
    assert seconds((1, 1, 16384), bucket=16) > seconds((1, 1, 16), bucket=16) + 1e-3  # serial, not bandwidth


def test_lengthening_is_looking_again():
    load = load_of([(3, 1, 10), (1, 1, 40)])
    load.lengthen()
    assert (load.num_tokens, load.num_single_kv, load.longest_kv) == (4, 74, 41)
    again = load_of([(3, 1, 11), (1, 1, 41)])
    assert StepTime(H200.step, (16,)).seconds(load) == StepTime(H200.step, (16,)).seconds(again)


def windowed(profile, *windows):
    """Return the profile of a model with these windows, each with its share of layers."""
    return dataclasses.replace(profile, step=dataclasses.replace(profile.step, windows=windows))


@pytest.mark.parametrize("profile", [H200, TILED], ids=["rows", "tiles"])
def test_layers_with_a_window_read_at_most_the_window(profile):
    rows = (3, 1, 900), (1, 1, 4000), (1, 700, 3000), (1, 60, 300)
    for some in (rows, rows[:2], rows[2:]):
        whole = seconds(*some, profile=profile)
        assert seconds(*some, profile=windowed(profile, (4096, 1.0))) == whole
        halves = windowed(profile, (None, 0.5), (1024, 0.5))
        within = seconds(*some, profile=windowed(profile, (1024, 1.0)))
        assert seconds(*some, profile=halves) == pytest.approx((whole + within) / 2)
        narrow = seconds(*some, profile=windowed(profile, (128, 1.0)))
        assert narrow < within < whole


def test_the_work_of_a_window_by_hand():
    for q_len, kv_len, window in ((5, 5, 3), (5, 12, 3), (5, 12, 9), (5, 12, 10), (1, 12, 3), (7, 7, 7)):
        keys = [range(max(p - window + 1, 0), p + 1) for p in range(kv_len - q_len, kv_len)]
        expected = len(set().union(*keys)), sum(map(len, keys))
        assert reads_and_pairs(q_len, kv_len, window) == expected


def test_decodes_lengthen_up_to_their_window():
    load = load_of([(3, 1, 10), (1, 1, 40)])
    for steps in range(6):
        again = load_of([(3, 1, 10 + steps), (1, 1, 40 + steps)])
        for window in (1, 12, 41, 100, None):
            found = load.num_single_kv_within(window)
            assert found == again.num_single_kv_within(window)
            assert found == sum(min(kv, window or 99) for kv in [10 + steps] * 3 + [40 + steps])
        load.lengthen()


@pytest.mark.parametrize(
    "windows",
    [3, [], [[0, 1.0]], [[None, 0.5]], [[8, 0.4], [16, 0.4]], [[8]], [["8", 1.0]], [[8, -1], [9, 2]]],
)
def test_impossible_windows_are_refused(tmp_path, windows):
    values = json.loads(PATH.read_text())
    values["step"]["windows"] = windows
    (tmp_path / "profile.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="windows"):
        DeviceProfile.load(tmp_path / "profile.json")
    values["step"]["windows"] = [[None, 0.25], [1024, 0.75]]
    (tmp_path / "profile.json").write_text(json.dumps(values))
    assert DeviceProfile.load(tmp_path / "profile.json").step.windows == ((None, 0.25), (1024, 0.75))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "another"}, "a file of format"),
        ({"source": "guessed"}, "source is one of"),
        ({"provenance": []}, "provenance"),
        ({"model": 3}, "a text 'model'"),
        ({"kv_token_bytes": 0}, "'kv_token_bytes' above 0"),
        ({"step": 1}, "an object 'step'"),
        ({"step": {"weight_read_s": "long"}}, "'weight_read_s' from 0 on"),
        ({"to_host": {"bytes_per_s": 0, "latency_s": 0}}, "'bytes_per_s' above 0"),
        ({"both_ways_share": 0}, "both_ways_share above 0"),
        ({"page_copy_byte_s": True}, "'page_copy_byte_s'"),
        ({"hosts": {}}, "hosts of jaxlib and engine, the first at least"),
        ({"hosts": {"jaxlib": {}, "users": {}}}, "found jaxlib, users"),
        ({"hosts": {"jaxlib": {"step_s": -1}}}, "'step_s' from 0 on"),
        ({"fetch_s": float("nan")}, "'fetch_s'"),
        ({"fitted_runs": [1]}, "texts in the list 'fitted_runs'"),
        ({"figures": {}}, "a list 'figures'"),
        ({"figures": [1]}, "figures are objects"),
        ({"figures": [{"rows": [[1, 2]]}]}, "rows of three numbers"),
    ],
)
def test_refuses_other_files(tmp_path, change, says):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(PATH.read_text()) | change))
    with pytest.raises(ConfigError, match=says):
        DeviceProfile.load(path)


def test_refuses_what_is_no_file_and_an_overlap_below_1(tmp_path):
    with pytest.raises(ConfigError, match="or one of a100_llama2-13b-gqa10"):
        DeviceProfile.load("b200")
    (tmp_path / "text").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        DeviceProfile.load(tmp_path / "text")
    values = json.loads(PATH.read_text())
    values["step"]["overlap"] = 0.5
    (tmp_path / "overlap").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"step\.overlap"):
        DeviceProfile.load(tmp_path / "overlap")
    assert DeviceProfile.load(PATH) == H200


# Prompt attention by tiles.

UNIFORM = DeviceProfile.load("h200_llama2-13b-gqa10_uniform_tiles")
RESULTS = Path(__file__).parents[2] / "results"
FITTED = {  # case, kernel, rule; with the rule "rounds" two of them have the list of "uniform"
    *(("p512of8512", "bf16", "rounds"), ("p2048of22048", "bf16", "uniform")),
    *(("p2048of2048", "bf16", "uniform"), ("p512of20512", "int8_scratch", "rounds")),
    ("p512of8512", "int8", "rounds"),
}
OTHER_HOST = {  # of h200_kernels_prompts.json: rows of (query tokens, context)
    "prefill_4x2048_gqa10": [(2048, 2048)] * 4,
    "prefill_1x8192_gqa10": [(8192, 8192)],
    "prefill_4x512of2560_gqa10": [(512, 2560)] * 4,
}


def measured(name):
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["results"]


def kernel_us(tiles, rows):
    return tiles.seconds(rows, sum(q_len for q_len, _ in rows)) / tiles.num_layers * 1e6


def tiles_of(kernel, cuts):
    """Return the costs of a kernel and a rule of `benchmark_prompts`."""
    return dataclasses.replace(
        TILED.step.tiles,
        fills_rounds=cuts == "rounds",
        decodes_pages=kernel == "int8_scratch",
        in_bytes=kernel != "bf16",
    )


def _timed_prompts():
    for found in measured("h200_prompts_rounds")["measurements"]:
        if "us" in found and (found["case"], found["kernel"], found["cuts"]) not in FITTED:
            yield pytest.param(found, id=f"{found['case']} {found['kernel']} {found['cuts']}")


@pytest.mark.parametrize("found", list(_timed_prompts()))
def test_tiles_reproduce_prompts_that_were_not_fitted(found):
    q_len, kv_len = map(int, found["case"][1:].split("of"))
    modelled_us = kernel_us(tiles_of(found["kernel"], found["cuts"]), [(q_len, kv_len)])
    assert modelled_us == pytest.approx(found["us"], rel=0.06)


@pytest.mark.parametrize(("case", "rows"), OTHER_HOST.items())
def test_tiles_reproduce_prompts_of_another_host(case, rows):
    (found,) = (
        one
        for one in measured("h200_kernels_prompts")["measurements"]
        if (one["case"], one["kernel"]) == (case, "pallas_mosaic_gpu") and not one["is_tried"]
    )
    assert kernel_us(TILED.step.tiles, rows) == pytest.approx(found["time_us"], rel=0.04)


@pytest.mark.parametrize(("name", "kv_bytes"), [("bfloat16", 204_800), ("int8", 105_600)])
def test_tiles_reproduce_a_whole_step_behind_a_long_history(name, kv_bytes):
    step_s = measured(f"h200_prompt_step_{name}")["steps"]["prompt of 512 of 8512"]["step_s"]["median"]
    modelled_s = seconds((1, 512, 8512), bucket=512, profile=TILED.keeping(kv_bytes))
    assert modelled_s == pytest.approx(step_s, rel=0.03)


def test_whole_rounds_and_decoded_pages_save_what_the_kernel_saves():
    rounds, uniform = TILED.step.tiles, UNIFORM.step.tiles
    assert kernel_us(rounds, [(512, 8512)]) < 0.85 * kernel_us(uniform, [(512, 8512)])
    assert kernel_us(rounds, [(2048, 2048)]) == kernel_us(uniform, [(2048, 2048)])
    per_token = [kernel_us(uniform, [(count, 20_000 + count)]) / count for count in (512, 2048)]
    assert per_token[0] > 1.1 * per_token[1], "short chunks leave programs without work"
    decoded, converted = (one.keeping(105_600).step.tiles for one in (TILED, UNIFORM))
    assert kernel_us(decoded, [(512, 8512)]) == pytest.approx(
        1.13 * kernel_us(rounds, [(512, 8512)]), rel=0.02
    )
    assert kernel_us(converted, [(512, 8512)]) > 1.45 * kernel_us(uniform, [(512, 8512)])


def test_rows_of_every_length_have_a_time():
    """Few tokens have tiles of other classes; the smallest steps have another kernel, not modelled here."""
    for profile in (TILED, UNIFORM, TILED.keeping(105_600)):
        tiles = profile.step.tiles
        for bucket, rows in (
            (16, [(2, 2)]),
            (256, [(100, 9000), (2, 50)]),
            (512, [(5, 900), (300, 131_000)]),
        ):
            assert 0 < tiles.seconds(rows, bucket) < tiles.seconds([*rows, (bucket, 131_072)], 2 * bucket)


def test_a_prompt_beside_decodes_adds_to_them():
    decodes, both = [(8, 1, 5000)], [(8, 1, 5000), (1, 500, 8500)]
    alone = seconds(*decodes, bucket=512, profile=TILED)
    assert seconds(*both, bucket=512, profile=TILED) > alone + 40 * 170e-6


def test_a_profile_of_tiles_needs_every_number(tmp_path):
    values = json.loads(PATH.with_name("h200_llama2-13b-gqa10_tiles.json").read_text("utf-8"))
    path = tmp_path / "device.json"
    for name, says in (("num_kv_heads", "'num_kv_heads' above 0"), ("fills_rounds", "true or false")):
        changed = json.loads(json.dumps(values))
        changed["step"]["tiles"][name] = 0
        path.write_text(json.dumps(changed), "utf-8")
        with pytest.raises(ConfigError, match=says):
            DeviceProfile.load(path)


EXPERTS = ExpertCosts(num_experts=128, num_chosen=8, read_s=12.8)


def test_a_step_reads_the_experts_that_its_tokens_choose():
    """Padding chooses none; arithmetic is that of the bucket."""
    costs = dataclasses.replace(H200.step, experts=EXPERTS)
    time = StepTime(costs, (16, 2048))
    read_s = {num: time.seconds(load_of([(num, 1, 10)])) for num in (1, 2, 16)}
    assert read_s[1] == pytest.approx(0.8, rel=0.01)
    assert read_s[2] - read_s[1] == pytest.approx(0.8 * (1 - 8 / 128), rel=0.01)
    assert time.seconds(load_of([(1, 2000, 2000)])) == pytest.approx(12.8, rel=0.01)
    assert time.padding_s(2) < 1e-3, "padding reads no experts"
    assert not time.is_heating(2048, 2048) and StepTime(H200.step, (2048,)).is_heating(2048, 2048)


def test_a_step_whose_padding_reads_no_experts_heats():
    """Arithmetic for 2,048 padded tokens takes longer than reading the experts of one token, not of all."""
    arithmetic_s = H200.step.token_s * 2048
    experts = dataclasses.replace(EXPERTS, read_s=4 * arithmetic_s)
    costs = dataclasses.replace(H200.step, experts=experts, weight_read_s=0.0)
    time = StepTime(costs, (2048,))
    assert time.is_heating(2048, 1) and not time.is_heating(2048, 2048)
    load = load_of([(1, 1, 10)])
    assert time.seconds(load) == time.seconds(load, 1.0) > time.seconds(load, 0.0)


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        ({"num_experts": 4, "num_chosen": 5, "read_s": 1.0}, "num_chosen from 1 to num_experts"),
        ({"num_experts": 4.0, "num_chosen": 2, "read_s": 1.0}, "integers num_experts"),
        ({"num_experts": 4, "num_chosen": 2, "read_s": 0}, "'read_s' above 0"),
        ([], "experts"),
    ],
)
def test_experts_of_a_profile_are_checked(tmp_path, experts, says):
    values = json.loads(PATH.read_text())
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(values | {"step": values["step"] | {"experts": experts}}))
    with pytest.raises(ConfigError, match=says):
        DeviceProfile.load(path)
    good = {"num_experts": 128, "num_chosen": 8, "read_s": 12.8}
    path.write_text(json.dumps(values | {"step": values["step"] | {"experts": good}}))
    assert DeviceProfile.load(path).step.experts == EXPERTS
