"""The device runner around its programs: stored programs that do not run, errors, and parked rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from model_defs import make_mesh
from pensieve_jax.core.errors import ConfigError, StepFailedError
from pensieve_jax.rebatching.device import runner as runner_module
from pensieve_jax.rebatching.device.runner import DeviceRunner, _Row
from pensieve_jax.rebatching.launches import FreeRow, Park
from tests.rebatching.real_models import config_of, model_of


def runner_of(folder: Path | None = None) -> DeviceRunner:
    """Return a runner whose programs are not compiled."""
    config = config_of("llama-tiny", "embed", compilation_cache_dir=folder and str(folder))
    return DeviceRunner(model_of("llama-tiny"), config, make_mesh(1), np.dtype(np.float32))


class Starting:
    """Records how a runner warms up; `errors` are raised by its rehearsals, in order."""

    def __init__(self, runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch, num_loaded: int = 0) -> None:
        self.done: list[str] = []
        self.errors: list[Exception] = []
        store = SimpleNamespace(
            num_loaded=num_loaded,
            discard_used=lambda: self.done.append("discard"),
            tidy=lambda: self.done.append("tidy"),
        )
        monkeypatch.setattr(runner_module, "ExecutableStore", lambda *_: store)
        monkeypatch.setattr(
            runner, "_compile", lambda found, _: self.done.append(f"compile {found is store}")
        )
        monkeypatch.setattr(runner, "_rehearse", self._rehearse)
        monkeypatch.setattr(runner, "reset", lambda kept: self.done.append(f"reset {kept}"))

    def _rehearse(self) -> None:
        self.done.append("rehearse")
        if self.errors:
            raise self.errors.pop(0)


def test_a_start_tidies_the_store_and_resets_the_ring(monkeypatch, tmp_path):
    runner = runner_of(tmp_path)
    starting = Starting(runner, monkeypatch)
    runner.warm_up()
    assert starting.done == ["compile True", "rehearse", "tidy", "reset ()"]


def test_a_start_without_a_store_tidies_none(monkeypatch):
    runner = runner_of()
    starting = Starting(runner, monkeypatch)
    runner.warm_up()
    assert starting.done == ["compile False", "rehearse", "reset ()"]


@pytest.mark.parametrize("error", [StepFailedError("planted"), jax.errors.JaxRuntimeError("planted")])
def test_stored_programs_that_do_not_run_are_compiled_again(monkeypatch, tmp_path, error):
    runner = runner_of(tmp_path)
    starting = Starting(runner, monkeypatch, num_loaded=1)
    starting.errors = [error]
    runner.warm_up()
    again = ["discard", "compile True", "rehearse"]
    assert starting.done == ["compile True", "rehearse", *again, "tidy", "reset ()"]


@pytest.mark.parametrize("with_store", [True, False])
def test_programs_that_were_compiled_here_and_do_not_run_are_an_error(monkeypatch, tmp_path, with_store):
    runner = runner_of(tmp_path if with_store else None)
    starting = Starting(runner, monkeypatch)
    starting.errors = [StepFailedError("planted")]
    with pytest.raises(StepFailedError, match="planted"):
        runner.warm_up()
    assert starting.done == [f"compile {with_store}", "rehearse"]


@pytest.mark.parametrize("kind", [StepFailedError, jax.errors.JaxRuntimeError])
def test_a_start_without_enough_memory_names_the_budget(monkeypatch, kind):
    runner = runner_of()
    starting = Starting(runner, monkeypatch)
    starting.errors = [kind("RESOURCE_EXHAUSTED: out of memory")]
    with pytest.raises(ConfigError, match=r"kv_bytes .*does not fit"):
        runner.warm_up()


def test_an_error_of_the_device_is_a_failed_step(monkeypatch):
    runner = runner_of()

    def fail(_: object) -> None:
        raise jax.errors.JaxRuntimeError("planted")

    monkeypatch.setattr(runner, "_park", fail)
    with pytest.raises(StepFailedError, match=r"a Park could not be launched.*planted"):
        runner.launch(Park(1, waits=False))
    lost: Any = type("Lost", (), {"__array__": fail})()
    with pytest.raises(StepFailedError, match=r"a step failed on the device.*planted"):
        runner.fetch(lost)


class Copy:
    """Copy in host memory that is complete when the test says so."""

    def __init__(self) -> None:
        self.is_complete = False

    def is_ready(self) -> bool:
        return self.is_complete

    def block_until_ready(self) -> None:
        self.is_complete = True


def test_a_row_has_left_when_its_copy_is_complete(monkeypatch):
    runner = runner_of()
    kv: Any = np.zeros(1)
    copy: Any = Copy()
    runner._rows[3] = row = _Row(kv, None, kv, 0)
    assert not runner.has_left(4) and not runner.has_left(3)
    monkeypatch.setattr(jax, "device_put", lambda *_: copy)
    runner.launch(Park(3, waits=False))
    assert not runner.has_left(3) and row.kv is kv
    copy.is_complete = True
    assert runner.has_left(3) and row.kv is None and row.host is copy
    runner.launch(FreeRow(3))
    assert not runner.has_left(3)


def test_parking_may_wait_for_a_copy_that_has_begun(monkeypatch):
    runner = runner_of()
    kv: Any = np.zeros(1)
    copy: Any = Copy()
    runner._rows[3] = row = _Row(kv, copy, kv, 0)
    runner.launch(Park(3, waits=True))
    assert copy.is_complete and row.kv is None and row.host is copy
