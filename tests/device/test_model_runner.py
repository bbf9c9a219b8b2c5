"""Hand-written steps through the real runner, compared with the dense reference.

Every scenario runs on pools full of NaN, so reading a page, slot or padded row that was never written shows
at once.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

from model_defs import LayerKind, load_model, make_mesh, preset, random_model
from pensieve_jax.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.core.errors import ConfigError, StepFailedError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding import adjustments
from pensieve_jax.decoding.adjustments import Adjustment
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_jax.device import kernel_choices, model_runner
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.device.kv_storage import read_page
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.device.transfers import host_pool
from pensieve_jax.runtime import device_memory
from pensieve_jax.runtime.compilation import keep_compilations_in
from pensieve_jax.runtime.executable_store import ExecutableStore
from pensieve_jax.scheduler.plan import FLAG_LOGPROBS, FLAG_SAMPLES, FLAG_TRUNCATES, StepPlan
from tests.collectives import collectives
from tests.device.poison import poisoned_pools

PAGE_SIZE = 16
GPU_PAGES = 24
BUCKETS = (8, 64)
EVERY_MODEL = [
    *(pytest.param(preset, 1, marks=pytest.mark.long) for preset in ("llama-tiny", "opt-tiny")),
    ("llama-tiny", 2),
]
GREEDY = SamplingParams()


def engine_config(num_devices=1, **cache):
    return EngineConfig(
        cache=CacheConfig(**{"gpu_pages": GPU_PAGES, "chunk_tokens": PAGE_SIZE} | cache),
        scheduler=SchedulerConfig(
            max_num_running=4,
            max_num_batched_tokens=BUCKETS[-1],
            token_buckets=BUCKETS,
            max_context_tokens=160,
        ),
        runner=RunnerConfig(
            attention_backend="xla", tensor_parallel_size=num_devices, max_logprobs=3, max_banned_ids=2
        ),
    )


@functools.cache
def _model(preset, num_devices, dtype="float32"):
    return load_model(f"random:{preset}", dtype=dtype, mesh=make_mesh(num_devices), seed=1)


@functools.cache
def _warm_runner(preset, num_devices):
    runner = ModelRunner(_model(preset, num_devices), engine_config(num_devices), make_mesh(num_devices))
    runner.warm_up()
    return runner


@functools.cache
def reference_for(preset):
    return DenseReference(_model(preset, 1))


def runner_for(preset="llama-tiny", num_devices=1):
    """Return a warm runner whose pages, including the dummy, hold only NaN."""
    runner = _warm_runner(preset, num_devices)
    runner.reset()
    runner.device_pools.replace(poisoned_pools(runner.storage))
    return runner


def random_ids(num_ids, seed=0):
    return np.random.default_rng(seed).integers(3, 320, num_ids).tolist()


@dataclass
class Talk:
    """A conversation by hand: its known ids, and its pages."""

    ids: list[int]
    pages: list[int]
    params: SamplingParams = GREEDY
    seed: int = 0
    outputs: list[int] = field(default_factory=list)


@dataclass
class Row:
    """Tokens [start, end) of a talk; `prev_sample` is the previous step's row that sampled the last one."""

    talk: Talk
    start: int
    end: int
    samples: bool = False
    prev_sample: int = -1


class Stepper:
    """Creates and numbers plans."""

    buckets = BUCKETS

    def __init__(self, runner):
        self.runner = runner
        self.num_steps = 0

    def start(self, *rows, logprobs=False, words=None, adjustment=None):
        num_tokens = sum(row.end - row.start for row in rows)
        bucket = min(bucket for bucket in self.buckets if bucket >= num_tokens)
        plan = StepPlan(self.runner.layouts[bucket], self.num_steps, self.runner.storage.padding_slot)
        self.num_steps += 1
        self._fill(plan, rows, num_tokens)
        plan.flags[FLAG_LOGPROBS] = logprobs
        plan.adjustment = adjustment
        self.runner.fill_tiles(plan)
        handle = self.runner.launch(plan)
        self.runner.choose(handle, words)
        return handle

    def step(self, *rows, **options):
        """Run one step and append what was sampled."""
        result = self.runner.fetch(self.start(*rows, **options))
        for row, token_id in zip([row for row in rows if row.samples], result.token_ids, strict=False):
            row.talk.ids.append(int(token_id))
            row.talk.outputs.append(int(token_id))
        return result

    def _fill(self, plan, rows, num_tokens):
        plan.num_rows[0] = len(rows)
        at, num_samples = 0, 0
        for i, row in enumerate(rows):
            talk, num_new = row.talk, row.end - row.start
            positions = np.arange(row.start, row.end)
            plan.positions[at : at + num_new] = positions
            plan.write_slots[at : at + num_new] = (
                np.array(talk.pages)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
            )
            known = talk.ids[row.start : row.end]
            plan.token_ids[at : at + len(known)] = known
            if row.prev_sample >= 0:
                plan.prev_samples[at + num_new - 1] = row.prev_sample
                plan.token_ids[at + num_new - 1] = 319  # must not be read
            plan.page_indices[i, : len(talk.pages)] = talk.pages
            plan.kv_lens[i] = row.end
            at += num_new
            plan.cu_q_lens[i + 1] = at
            if row.samples:
                self._fill_sample(plan, num_samples, talk, at - 1, row.end)
                num_samples += 1
        plan.cu_q_lens[len(rows) + 1 :] = num_tokens
        plan.num_samples[0] = num_samples

    @staticmethod
    def _fill_sample(plan, sample_row, talk, token, position):
        params = talk.params
        plan.sample_tokens[sample_row], plan.sample_positions[sample_row] = token, position
        plan.temperature[sample_row], plan.top_k[sample_row] = params.temperature, params.top_k
        plan.top_p[sample_row], plan.min_p[sample_row] = params.top_p, params.min_p
        plan.seed[sample_row] = talk.seed & 0xFFFFFFFF, talk.seed >> 32
        if len(talk.outputs) < params.min_tokens:
            plan.banned_ids[sample_row, : len(params.stop_token_ids)] = params.stop_token_ids
        plan.flags[FLAG_SAMPLES] |= params.temperature > 0
        plan.flags[FLAG_TRUNCATES] |= params.top_k > 0 or params.top_p < 1


def assert_equals_reference(preset, talk):
    """Every emitted token of the talk is the dense reference's."""
    context_ids = talk.ids[: len(talk.ids) - len(talk.outputs)]
    replay = reference_for(preset).replay_turn([], context_ids, talk.outputs, talk.params, talk.seed)
    assert replay.margins.min() > 1e-3, "pick other prompts: this scenario is too close to call"
    assert replay.token_ids.tolist() == talk.outputs
    return replay


@pytest.mark.parametrize(("preset", "num_devices"), EVERY_MODEL)
def test_chunked_prompts_and_mixed_steps(preset, num_devices):
    """A prompt in three pieces, and decoding beside another conversation's prompt."""
    stepper = Stepper(runner_for(preset, num_devices))
    first = Talk(random_ids(50, seed=1), pages=[5, 2, 9, 7, 11])
    second = Talk(random_ids(37, seed=32), pages=[3, 1, 8])
    stepper.step(Row(first, 0, 16))
    stepper.step(Row(first, 16, 43))
    stepper.step(Row(first, 43, 50, samples=True))
    for num_done in range(3):  # 20, 8 and 9 tokens of the second beside one of the first
        start, end = (0, 20, 28, 37)[num_done : num_done + 2]
        length = len(first.ids)
        stepper.step(Row(first, length - 1, length, samples=True), Row(second, start, end, samples=end == 37))
    for _ in range(4):
        rows = [Row(talk, len(talk.ids) - 1, len(talk.ids), samples=True) for talk in (second, first)]
        stepper.step(*rows)
    assert (len(first.outputs), len(second.outputs)) == (8, 5)
    assert_equals_reference(preset, first)
    assert_equals_reference(preset, second)


@pytest.mark.parametrize(("preset", "num_devices"), EVERY_MODEL)
def test_dropped_chunks_are_recomputed_as_sub_requests(preset, num_devices):
    """Chunks 0 and 2 are lost; two rows refill them, on other pages, beside the row of the new prompt."""
    runner = runner_for(preset, num_devices)
    stepper = Stepper(runner)
    talk = Talk(random_ids(60, seed=3), pages=[4, 6, 10, 2, 12])
    stepper.step(Row(talk, 0, 60, samples=True))
    assert_equals_reference(preset, talk)
    talk.ids += random_ids(6, seed=4)  # the next turn
    talk.outputs.clear()
    talk.pages[0], talk.pages[2] = 20, 21
    rows = Row(talk, 0, 16), Row(talk, 32, 48), Row(talk, 60, 67, samples=True)
    stepper.step(*rows)
    stepper.step(Row(talk, 67, 68, samples=True))
    assert_equals_reference(preset, talk)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_steps_chain_without_fetching(num_devices):
    """Ids pass from step to step on the device, to other rows and buckets; they are fetched at the end."""
    stepper = Stepper(runner_for("llama-tiny", num_devices))
    talks = [Talk(random_ids(12, seed=5), pages=[1, 2]), Talk(random_ids(19, seed=6), pages=[3, 4])]
    handles = [stepper.start(*(Row(talk, 0, len(talk.ids), samples=True) for talk in talks))]
    for num_done in range(1, 5):
        rows = []
        for i, talk in enumerate(talks):
            length = len(talk.ids) + num_done
            prev_sample = i if num_done % 2 else 1 - i  # the rows change places with every step
            rows.append(Row(talk, length - 1, length, samples=True, prev_sample=prev_sample))
        handles.append(stepper.start(*(rows[::-1] if num_done % 2 else rows)))
    results = [stepper.runner.fetch(handle) for handle in handles]
    for i, talk in enumerate(talks):
        talk.outputs = [int(result.token_ids[i ^ (step % 2)]) for step, result in enumerate(results)]
        talk.ids += talk.outputs
        assert_equals_reference("llama-tiny", talk)


@pytest.mark.parametrize(("preset", "num_devices"), EVERY_MODEL)
def test_sampling_modes_in_one_batch(preset, num_devices):
    """Greedy, random, truncated and banned rows together, with log-probabilities."""
    stepper = Stepper(runner_for(preset, num_devices))
    settings = [
        SamplingParams(),
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=0.9, top_k=12, top_p=0.8),
        SamplingParams(temperature=4.0, min_tokens=3, stop_token_ids=(7, 11)),
    ]
    talks = [
        Talk(random_ids(9 + i, seed=10 + i), pages=[2 * i + 1, 2 * i + 2], params=params, seed=2**33 + i)
        for i, params in enumerate(settings)
    ]
    results = [stepper.step(*(Row(talk, 0, len(talk.ids), samples=True) for talk in talks), logprobs=True)]
    for _ in range(5):
        rows = [Row(talk, len(talk.ids) - 1, len(talk.ids), samples=True) for talk in talks]
        results.append(stepper.step(*rows, logprobs=True))
    for i, talk in enumerate(talks):
        replay = assert_equals_reference(preset, talk)
        logprobs = [result.logprobs[i] for result in results]
        np.testing.assert_allclose(logprobs, replay.logprobs, atol=1e-3)
        logits = reference_for(preset).logits(talk.ids)[-len(talk.outputs) - 1 : -1]
        for result, row in zip(results, logits, strict=True):
            order = np.argsort(-row)[:3]
            np.testing.assert_allclose(
                result.top_logprobs[i], row[order] - np.log(np.exp(row).sum()), atol=1e-3
            )
            assert set(result.top_ids[i].tolist()) == set(order.tolist())


@pytest.mark.parametrize(("preset", "num_devices"), EVERY_MODEL)
def test_padding_and_other_pages_are_left_alone(preset, num_devices):
    """A step writes its own slots and nothing else, in pools that stay where they are."""
    runner = runner_for(preset, num_devices)
    talk = Talk(random_ids(21, seed=7), pages=[6, 3])
    stepper = Stepper(runner)
    stepper.step(Row(talk, 0, 20))
    pointers = [pool.addressable_shards[0].data.unsafe_buffer_pointer() for pool in runner.pools]
    stepper.step(Row(talk, 20, 21, samples=True))
    assert [pool.addressable_shards[0].data.unsafe_buffer_pointer() for pool in runner.pools] == pointers
    for page in range(GPU_PAGES + 1):
        num_written = {6: 16, 3: 5}.get(page, 0)
        is_nan = np.isnan(read_page(runner.pools, page))
        assert not is_nan[:, :num_written].any()
        assert is_nan[:, num_written:].all()


def test_no_compilation_after_warm_up():
    """Neither steps, copies nor a reset compile; the counter does detect a stray jit."""
    runner = runner_for()
    num_before = runner.num_compilations
    stepper = Stepper(runner)
    talk = Talk(random_ids(9, seed=8), pages=[1], params=SamplingParams(temperature=1.0, top_k=5))
    stepper.step(Row(talk, 0, 9, samples=True), logprobs=True)
    talk.params = GREEDY
    stepper.step(Row(talk, 9, 10, samples=True))
    runner.reset()
    assert runner.num_compilations == num_before
    jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert runner.num_compilations == num_before + 1


def test_reset_forgets_everything():
    """New pools hold zeros, and the first step after it may have any number."""
    runner = runner_for()
    stepper = Stepper(runner)
    talk = Talk(random_ids(9, seed=9), pages=[1])
    stepper.step(Row(talk, 0, 9, samples=True))
    runner.reset()
    assert not read_page(runner.pools, 1).any()
    stepper.num_steps = 17
    again = Talk(talk.ids[:9], pages=[2])
    stepper.step(Row(again, 0, 9, samples=True))
    assert again.outputs == talk.outputs


def test_a_skipped_step_is_a_bug():
    """`prev_samples` would mean another step's rows."""
    stepper = Stepper(runner_for())
    talk = Talk(random_ids(9), pages=[1])
    stepper.step(Row(talk, 0, 9, samples=True))
    stepper.num_steps += 1
    with pytest.raises(AssertionError):
        stepper.step(Row(talk, 9, 10, samples=True))


@pytest.mark.parametrize("num_devices", [1, 2])
def test_memory_analysis(num_devices):
    """The pools are updated in place: all their bytes are aliased, in every bucket."""
    runner = runner_for("llama-tiny", num_devices)
    analysis = runner.memory_analysis()
    pool_bytes = 2 * (GPU_PAGES + 1) * PAGE_SIZE * 2 * 2 * 32 * 4 // num_devices
    assert analysis["kv_pool_bytes"] == pool_bytes
    assert analysis["page_bytes"] * (GPU_PAGES + 1) == pool_bytes
    assert set(analysis["buckets"]) == set(BUCKETS)
    for bucket in analysis["buckets"].values():
        assert bucket["alias_bytes"] >= pool_bytes
        assert bucket["new_output_bytes"] < 24_000
        assert bucket["peak_bytes"] >= analysis["weights_bytes"] + pool_bytes + bucket["temp_bytes"]


def test_exchanges_between_two_devices(monkeypatch):
    """Sums after attention and MLP and of the embedding, a few words for a greedy row; the plan goes once."""
    runner = runner_for("llama-tiny", 2)
    executables = runner._executables
    for (_, kinds), executable in executables.run_layers.items():
        assert collectives(executable.as_text()) == {"all-reduce": 2 * len(kinds)}
    for executable in executables.embed.values():
        assert collectives(executable.as_text()) == {"all-reduce": 1}
    for executable in executables.score.values():
        assert collectives(executable.as_text()) == {}
    for (_, mode), executable in executables.choose.items():
        draws = mode.draws and not mode.truncates
        expected = {"all-gather": 1 + mode.truncates} | ({"all-reduce": 1} if draws else {})
        assert collectives(executable.as_text()) == expected, mode
    talk, puts, device_put = Talk(random_ids(9, seed=2), pages=[1]), [], jax.device_put
    stepper = Stepper(runner)
    monkeypatch.setattr(
        jax, "device_put", lambda *args, **kwargs: puts.append(args) or device_put(*args, **kwargs)
    )
    stepper.step(Row(talk, 0, 9, samples=True))
    assert len(puts) == 1


def _masks(*rows):
    """Return masks of four rows; the first rows allow these ids alone."""
    allowed = np.ones((4, 320), bool)
    for row, ids in enumerate(rows):
        allowed[row] = np.isin(np.arange(320), ids)
    return np.packbits(allowed, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_masks_biases_and_penalties_of_rows(num_devices):
    """Each changes its own row alone, log-probabilities stay the model's, and nothing is compiled."""
    runner = runner_for("llama-tiny", num_devices)
    num_compilations = runner.num_compilations

    def first_ids(**options):
        stepper = Stepper(runner)
        runner.reset()
        runner.device_pools.replace(poisoned_pools(runner.storage))
        talks = [Talk(random_ids(9 + i, seed=i), pages=[2 * i + 1, 2 * i + 2]) for i in range(3)]
        rows = [Row(talk, 0, len(talk.ids), samples=True) for talk in talks]
        result = stepper.step(*rows, logprobs=True, **options)
        return result.token_ids[:3].tolist(), result

    plain, expected = first_ids()
    masked, found = first_ids(words=_masks([7], [int(expected.top_ids[1, 2])]))
    assert masked == [7, int(expected.top_ids[1, 2]), plain[2]]
    np.testing.assert_array_equal(found.top_logprobs, expected.top_logprobs)
    assert found.logprobs[1] == expected.top_logprobs[1, 2]
    assert found.logprobs[2] == expected.logprobs[2]

    bias, counted = adjustments.no_bias(4), adjustments.not_counted(4)
    bias[:, 2, :1] = adjustments.bias_words(SamplingParams(logit_bias={319: 100}))
    assert first_ids(adjustment=Adjustment(bias=bias))[0] == [plain[0], plain[1], 319]

    penalized = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    counted[:, 1] = [3, -1, *adjustments.penalty_words(penalized)]
    seeds = adjustments.seeds(3, [], [plain[1]] * 50, clears=True)
    ids, found = first_ids(adjustment=Adjustment(counted=counted, seeds=seeds), words=_masks([7]))
    assert ids == [7, int(expected.top_ids[1, 1]), plain[2]]
    assert found.logprobs[1] == expected.top_logprobs[1, 1]
    assert runner.num_compilations == num_compilations


def test_ids_in_flight_are_counted():
    """A talk whose ids the host has not seen is penalized for them, on another row of the next step."""
    runner = runner_for()
    talks = [Talk(random_ids(12, seed=5), pages=[1, 2]), Talk(random_ids(19, seed=6), pages=[3, 4])]
    penalty = adjustments.penalty_words(SamplingParams(presence_penalty=2.0, frequency_penalty=2.0))
    bias = adjustments.no_bias(4)
    bias[:, :2, :1] = adjustments.bias_words(SamplingParams(logit_bias={11: 3.0}))[:, None]
    stepper, handles = Stepper(runner), []
    for step in range(5):
        rows, counted = [], adjustments.not_counted(4)
        for number in (0, 1) if step % 2 == 0 else (1, 0):
            talk, row = talks[number], len(rows)
            length = len(talk.ids) + step
            prev_sample = (number if step % 2 else 1 - number) if step else -1
            counted[:, row] = [number, (number if step % 2 else 1 - number) if step else -1, *penalty]
            rows.append(Row(talk, length - 1 if step else 0, length, samples=True, prev_sample=prev_sample))
        seeds = [one for slot in (0, 1) for one in adjustments.seeds(slot, [], [], clears=True)]
        adjustment = Adjustment(bias=bias, counted=counted, seeds=[] if step else seeds)
        handles.append(stepper.start(*rows, adjustment=adjustment))
    results = [runner.fetch(handle).token_ids for handle in handles]
    for number, talk in enumerate(talks):
        ids = [int(result[number ^ (step % 2)]) for step, result in enumerate(results)]
        context = list(talk.ids)
        for step, token_id in enumerate(ids):
            logits = reference_for("llama-tiny").logits(context)[-1].astype(np.float64)
            logits[11] += 3.0
            logits -= 2.0 * np.bincount(ids[:step], minlength=320)
            logits[ids[:step]] -= 2.0
            assert token_id == logits.argmax()
            context.append(token_id)


@pytest.mark.parametrize("preset", ["llama-tiny", pytest.param("opt-tiny", marks=pytest.mark.long)])
def test_groups_of_layers_are_one_model(preset):
    """Only a tied head's arrays are used twice; there are at most as many groups as layers."""
    talks, leaves = [], []
    for num_groups in (1, 9):
        config = engine_config()
        config = dataclasses.replace(
            config, runner=dataclasses.replace(config.runner, num_layer_groups=num_groups)
        )
        runner = ModelRunner(_model(preset, 1), config, make_mesh(1))
        runner.warm_up()
        assert len(runner.storage.groups) == len(runner.device_pools.groups) == min(num_groups, 2)
        programs = runner._programs
        leaves.append([len(part) for part in (programs.front, *programs.groups, programs.back)])
        stepper, talk = Stepper(runner), Talk(random_ids(30, seed=12), pages=[3, 6, 8])
        stepper.step(Row(talk, 0, 30, samples=True))
        stepper.step(Row(talk, 30, 31, samples=True))
        talks.append(talk)
    assert talks[0].outputs == talks[1].outputs
    assert_equals_reference(preset, talks[1])
    (front, whole, back), (first, *halves, last) = leaves
    assert (first, last) == (front, back) and len(set(halves)) == 1 and sum(halves) == whole
    all_of_them = len(ModelStructure.split(_model(preset, 1))[1])
    assert front + whole + back == all_of_them + _model(preset, 1).config.tie_word_embeddings


@pytest.mark.parametrize(("num_devices", "num_groups"), [(1, 2), (2, 1)])
def test_chunks_are_whole_where_each_device_has_a_part_of_them(num_devices, num_groups):
    assert len(runner_for(num_devices=num_devices).storage.groups) == num_groups


def test_uneven_groups_are_one_model():
    """Two groups of one layer share a program, and one of two layers has its own."""
    model = random_model(preset("llama-tiny", num_layers=4), dtype="float32", mesh=make_mesh(1), seed=1)
    config = engine_config()
    config = dataclasses.replace(
        config,
        runner=dataclasses.replace(config.runner, num_layer_groups=3),
        scheduler=dataclasses.replace(config.scheduler, token_buckets=(64,)),
    )
    runner = ModelRunner(model, config, make_mesh(1))
    runner.warm_up()
    assert [len(layers) for layers in runner.storage.groups] == [1, 1, 2]
    assert set(runner._executables.run_layers) == {(64, (LayerKind(),) * 1), (64, (LayerKind(),) * 2)}
    stepper, talk = Stepper(runner), Talk(random_ids(30, seed=12), pages=[3, 6, 8])
    stepper.buckets = (64,)
    stepper.step(Row(talk, 0, 30, samples=True))
    stepper.step(Row(talk, 30, 31, samples=True))
    replay = DenseReference(model).replay_turn([], talk.ids[:30], talk.outputs, GREEDY, 0)
    assert replay.margins.min() > 1e-3 and replay.token_ids.tolist() == talk.outputs


def test_one_hidden_state_is_kept(monkeypatch):
    """A group's input is released when the next program is launched, so the count is one."""
    runner, read = runner_for(), []
    executables = runner._executables
    key = 64, (LayerKind(),)
    run_layers, score = executables.run_layers[key], executables.score[64]

    def run_and_note(leaves, pools, hidden, *rest):
        assert not any(past() is not None for past in read)
        read.append(weakref.ref(hidden))
        return run_layers(leaves, pools, hidden, *rest)

    def note_and_score(*given):
        assert len(read) == 2 and not any(past() is not None for past in read)
        return score(*given)

    monkeypatch.setitem(executables.run_layers, key, run_and_note)
    monkeypatch.setitem(executables.score, 64, note_and_score)
    Stepper(runner).step(Row(Talk(random_ids(9), pages=[1]), 0, 9, samples=True))


def test_different_layers_form_no_group():
    """One program runs every group of the same kinds, so layers of a kind must be alike."""
    model = load_model("random:opt-tiny", dtype="float32", mesh=make_mesh(1), seed=1)
    model.layers[1].activation = "gelu"
    with pytest.raises(AssertionError, match="layers differ"):
        ModelRunner(model, engine_config(), make_mesh(1))


def test_layouts():
    """Rows, samples and the context's pages, capped by the bucket."""
    small, large = (runner_for().layouts[bucket] for bucket in BUCKETS)
    assert (small.num_tokens, small.max_num_rows, small.max_num_samples) == (8, 8, 4)
    assert (large.num_tokens, large.max_num_rows, large.max_num_samples) == (64, 8, 4)
    assert small.pages_per_row == large.pages_per_row == 10


def test_warm_up_reports_progress(monkeypatch):
    """One call per executable: two buckets' layers and ends, six samplers, four of adjustments and counts,
    three of prompts' scores.

    Equal models share them.
    """
    runner_for()
    runner = ModelRunner(_model("llama-tiny", 1), engine_config(), make_mesh(1))
    calls = []
    runner.warm_up(lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(i, 19) for i in range(1, 20)]
    assert runner.num_compilations == 0
    assert not any(np.asarray(pool).any() for pool in runner.pools), "a plan of no rows writes nothing"
    monkeypatch.setattr(host_pool, "keeps_host_memory", lambda storage: True)
    runner = ModelRunner(_model("llama-tiny", 1), engine_config(cpu_pages=70), make_mesh(1))
    calls.clear()
    runner.warm_up(lambda *call: calls.append(call))
    are_pieces = [name.endswith("of host memory") for _, _, name in calls]
    assert are_pieces[0] and are_pieces == sorted(are_pieces, reverse=True), "before minutes of compiling"
    assert calls[-1][:2] == (len(calls), len(calls))


def test_pools_that_cannot_fit_are_refused(monkeypatch):
    """The check comes before their creation, and includes a step's temporaries once those are known."""
    model, mesh = _model("llama-tiny", 1), make_mesh(1)
    analysis = runner_for().memory_analysis()
    resident_bytes = sum(analysis[name] for name in ("weights_bytes", "kv_pool_bytes", "counts_bytes"))
    monkeypatch.setattr(device_memory, "memory_limit_bytes", lambda device: resident_bytes - 1)
    with pytest.raises(ConfigError, match=rf"cache\.gpu_pages is {GPU_PAGES}.*at most {GPU_PAGES - 1}"):
        ModelRunner(model, engine_config(), mesh)
    monkeypatch.setattr(device_memory, "memory_limit_bytes", lambda device: resident_bytes + 100)
    runner = ModelRunner(model, engine_config(), mesh)
    with pytest.raises(ConfigError, match=r"cache\.gpu_pages"):
        runner.warm_up()


@pytest.mark.parametrize("gpu_pages", [10**7, 10**9, 10**18])
def test_pools_beyond_any_memory_are_refused(gpu_pages):
    """Without a reported limit, the allocation itself or the range of slot numbers refuses them."""
    with pytest.raises(ConfigError, match=rf"cache\.gpu_pages is {gpu_pages}, but must be (fewer|at most)"):
        ModelRunner(_model("llama-tiny", 1), engine_config(gpu_pages=gpu_pages), make_mesh(1))


def test_a_failed_reset_is_a_failed_step(monkeypatch):
    """The configuration is known to fit by then; the next reset may succeed."""
    runner = ModelRunner(_model("llama-tiny", 1), engine_config(), make_mesh(1))

    def fail():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner.storage, "new_pools", fail)
        with pytest.raises(StepFailedError, match=r"new pools.*RESOURCE_EXHAUSTED"):
            runner.reset()
    runner.reset()
    assert not read_page(runner.pools, 1).any()


@pytest.mark.parametrize("backend", ["pallas_triton", "pallas_mosaic_gpu", "jax_triton"])
def test_a_back_end_that_cannot_run_here_is_refused(backend):
    """It is refused at construction, with the alternative."""
    config = EngineConfig(runner=RunnerConfig(attention_backend=backend))
    cpu = make_mesh(1, jax.devices("cpu"))
    message = rf"runner\.attention_backend is '{backend}', but must be 'auto' or 'xla'.*NVIDIA GPU"
    with pytest.raises(ConfigError, match=message):
        ModelRunner(_model("llama-tiny", 1), config, cpu)


@pytest.mark.parametrize(
    ("backend", "says"), [("pallas_triton", "head_dim = 80"), ("pallas_mosaic_gpu", "dtype = 'float32'")]
)
def test_unsupported_options_of_the_back_end_are_refused(backend, says, monkeypatch):
    """As on a GPU, the kernel package's own error becomes one that names the option."""
    monkeypatch.setattr(kernel_choices, "device_limit", lambda name, device: None)
    config = EngineConfig(runner=RunnerConfig(attention_backend=backend))
    mesh = make_mesh(1)
    model = random_model(preset("llama-tiny", head_dim=80), mesh=mesh)
    with pytest.raises(ConfigError, match=rf"runner\.attention_backend .* for this model; {says}"):
        ModelRunner(model, config, mesh)


def test_more_logprobs_than_ids_are_refused():
    """The model's vocabulary is the limit."""
    config = EngineConfig(runner=RunnerConfig(max_logprobs=321))
    with pytest.raises(ConfigError, match=r"runner\.max_logprobs is 321.*320"):
        ModelRunner(_model("llama-tiny", 1), config, make_mesh(1))


def test_a_failed_step_is_a_typed_error(monkeypatch):
    """The device's error becomes a `StepFailedError`, at the start or at the fetch."""
    runner = runner_for()
    stepper = Stepper(runner)
    talk = Talk(random_ids(9), pages=[1])

    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setitem(runner._executables.embed, 64, fail)
        with pytest.raises(StepFailedError, match="RESOURCE_EXHAUSTED"):
            stepper.step(Row(talk, 0, 9, samples=True))
    runner.reset()
    stepper.step(Row(talk, 0, 9, samples=True))
    assert_equals_reference("llama-tiny", talk)


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("out of memory"), KeyboardInterrupt()])
def test_old_pools_are_freed_before_new_ones_are_created(monkeypatch, error):
    """The traceback of the current exception still refers to them, but two sets may not fit."""
    runner, num_left = runner_for(), []
    stepper, old = Stepper(runner), runner.pools
    new_pools = runner.storage.new_pools

    def fail(*_):
        raise error

    def counted():
        num_left.append(sum(not pool.is_deleted() for pool in old))
        return new_pools()

    with monkeypatch.context() as patch:
        patch.setitem(runner._executables.run_layers, (64, runner._programs.group_kinds[0]), fail)
        patch.setattr(runner.storage, "new_pools", counted)
        try:
            stepper.step(Row(Talk(random_ids(9), pages=[1]), 0, 9, samples=True))
        except (StepFailedError, KeyboardInterrupt):
            runner.reset()
    assert num_left == [0]
    talk, stepper.num_steps = Talk(random_ids(9), pages=[1]), 0
    stepper.step(Row(talk, 0, 9, samples=True))
    assert_equals_reference("llama-tiny", talk)


def test_a_plan_is_sent_before_chunks_start(monkeypatch):
    """Chunks start behind a mark that waits for earlier transfers; a plan behind them would be late."""
    runner = runner_for()
    calls, put, start = [], jax.device_put, runner.transfers.start
    monkeypatch.setattr(
        model_runner.jax, "device_put", lambda *arguments: (calls.append("plan"), put(*arguments))[1]
    )
    monkeypatch.setattr(runner.transfers, "start", lambda: (calls.append("chunks"), start()))
    Stepper(runner).step(Row(Talk(random_ids(9), pages=[1]), 0, 9, samples=True))
    assert calls == ["plan", "chunks"]


def test_compilations_are_kept_on_disk(tmp_path):
    """The next runner fills the given directory."""
    options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, option) for option in options]
    try:
        jax.config.update(options[1], 0)
        keep_compilations_in(str(tmp_path))
        ModelRunner(_model("opt-tiny", 1), EngineConfig(cache=CacheConfig(gpu_pages=33)), make_mesh(1))
        assert list(tmp_path.iterdir())
    finally:
        keep_compilations_in(before[0])
        jax.config.update(options[1], before[1])


def test_executables_that_load_and_do_not_run_are_compiled_again(tmp_path, monkeypatch, caplog):
    """A driver may have changed unnoticed, for example; if nothing was loaded, the failure is an error."""
    runner, num_loaded, discards, imported = runner_for(), iter((3, 0, 0)), [], []
    works = runner._executables.embed[64]

    def fail(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: Function fusion not found")

    fail.memory_analysis = works.memory_analysis

    def compile_all(_, store):
        assert imported == ["xla"] * len(BUCKETS), "what is loaded may need it"
        store.num_loaded = next(num_loaded)
        runner._executables.embed[64] = works if discards else fail
        yield "a step"

    monkeypatch.setattr(model_runner, "compile_all", compile_all)
    monkeypatch.setattr(ExecutableStore, "discard_used", lambda store: discards.append(store))
    monkeypatch.setattr(runner, "_cache_dir", str(tmp_path))
    monkeypatch.setattr(model_runner, "import_backend", imported.append)
    runner.warm_up()
    assert (
        "do not run here; compiling all of them again: a step could not be started: INTERNAL" in caplog.text
    )
    assert len(discards) == 1
    talk = Talk(random_ids(40, seed=3), pages=[1, 2, 3])
    stepper = Stepper(runner)
    stepper.step(Row(talk, 0, 40, samples=True))
    assert_equals_reference("llama-tiny", talk)

    discards.clear()
    imported.clear()
    with pytest.raises(StepFailedError, match="INTERNAL"):
        runner.warm_up()
    runner._executables.embed[64] = works
    assert not discards
