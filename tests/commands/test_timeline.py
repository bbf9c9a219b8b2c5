"""The picture of pages by state: sampling, thinning, drawing and refusals."""

from __future__ import annotations

import importlib.util

import pytest

from pensieve_jax import InvalidRequestError
from pensieve_jax.cache.states import ChunkState
from tests.launching import load

timeline = load("pensieve_jax.commands.timeline")
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an optional extra"
)


class FakeEngine:
    """The part of an engine that a recorder uses: one more step at every look."""

    def __init__(self, num_gpu=8, num_cpu=4):
        self.num_gpu, self.num_cpu, self.num_looks = num_gpu, num_cpu, 0

    def census(self):
        self.num_looks += 1
        on_gpu = self.num_looks % self.num_gpu
        states = {*timeline.GPU_STATES, *timeline.CPU_STATES}
        counts = dict.fromkeys(states, 0)
        on_both = min(on_gpu, self.num_cpu)
        return counts | {
            "on gpu": on_gpu - on_both,
            "on both": on_both,
            "free pages": self.num_gpu - on_gpu,
            "free slots": self.num_cpu - on_both,
        }

    def stats(self):
        return {"num_running": 2, "num_waiting": 1, "num_suspensions": self.num_looks // 3}


def test_a_sample_after_every_step():
    recorder = timeline.Recorder(FakeEngine())
    for _ in range(5):
        recorder.after_step()
    assert [sample.census["free pages"] for sample in recorder.samples] == [7, 6, 5, 4, 3]
    assert all(b.time_s >= a.time_s for a, b in zip(recorder.samples, recorder.samples[1:], strict=False))


def test_a_long_run_is_thinned_out_evenly(monkeypatch):
    monkeypatch.setattr(timeline, "MAX_NUM_SAMPLES", 10)
    recorder = timeline.Recorder(FakeEngine(num_gpu=10**6))
    for _ in range(200):
        recorder.after_step()
    # The recorder reads the engine only for samples, so the number of looks is not that of steps; the strides
    # show the spacing.
    assert 5 <= len(recorder.samples) <= 10
    looks = [sample.census["on gpu"] + sample.census["on both"] for sample in recorder.samples]
    assert looks == sorted(looks)


@needs_matplotlib
@pytest.mark.parametrize("num_cpu", [0, 4])
def test_it_draws(tmp_path, num_cpu):
    recorder = timeline.Recorder(FakeEngine(num_cpu=num_cpu))
    for _ in range(20):
        recorder.after_step()
    path = tmp_path / "out.png"
    recorder.draw(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_empty_record_draws_nothing(tmp_path):
    timeline.Recorder(FakeEngine()).draw(str(tmp_path / "out.png"))
    assert not (tmp_path / "out.png").exists()


def test_states_equal_the_caches():
    states = {state.value for state in ChunkState if state is not ChunkState.DROPPED}
    assert {*timeline.GPU_STATES, *timeline.CPU_STATES} == states | {"free pages", "free slots"}


@needs_matplotlib
@pytest.mark.parametrize("name", ["out.txt", "nowhere/out.png", "in.png"])
def test_an_invalid_path_of_a_picture_is_refused(tmp_path, name):
    with pytest.raises(InvalidRequestError, match="--timeline"):
        timeline.check_timeline(str(tmp_path / name), others=[tmp_path / "in.png"])


def test_without_matplotlib_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match="pip install matplotlib"):
        timeline.check_timeline(str(tmp_path / "out.png"), others=[])
    timeline.check_timeline(None, others=[])
