"""Interrupted trainings that go on as if nothing had happened.

Owns: the Orbax checkpoints of a training, and the record of the settings that they belong to.
Does not know: what the settings mean, or how a step is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import jax
import orbax.checkpoint as ocp

from pensieve_jax import ConfigError
from pensieve_lab.chat_training.step import TrainState

_SETTINGS_FILE: Final = "settings.json"
_CHECKPOINTS: Final = "checkpoints"
_MAX_KEPT: Final = 2


class Checkpoints:
    """The checkpoints of one training, in its directory. Close it, or use it as a context manager."""

    def __init__(self, directory: Path) -> None:
        """Make what is not there yet."""
        options = ocp.CheckpointManagerOptions(max_to_keep=_MAX_KEPT, create=True)
        self._manager = ocp.CheckpointManager((directory / _CHECKPOINTS).absolute(), options=options)

    @property
    def last_step(self) -> int:
        """The steps that the newest checkpoint has behind it; 0 without one."""
        return self._manager.latest_step() or 0

    def save(self, num_steps: int, state: TrainState) -> None:
        """Keep the state after so many steps; writing goes on in the background."""
        if num_steps != self._manager.latest_step():
            self._manager.save(num_steps, args=ocp.args.StandardSave(state._asdict()))

    def restore(self, like: TrainState) -> TrainState:
        """The newest state; `like` has its shapes, dtypes and devices."""
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        values = self._manager.restore(self.last_step, args=ocp.args.StandardRestore(target))
        return TrainState(**values)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is being written."""
        self._manager.close()


def has_training(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a training of these settings was begun there; raises ConfigError if one of others was.

    Args:
      directory: of the training.
      settings: JSON values by the name of their flag.
    """
    path = directory / _SETTINGS_FILE
    if not path.is_file():
        return False
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("--work_dir", str(directory), "a directory of this script", str(error)) from error
    if not isinstance(saved, dict):
        hint = f"{_SETTINGS_FILE} in it is no JSON object"
        raise ConfigError("--work_dir", str(directory), "a directory of this script", hint)
    for name, value in settings.items():
        if saved.get(name) != value:
            hint = "the training in --work_dir has that; give it, or take an empty directory"
            raise ConfigError(f"--{name}", value, repr(saved.get(name)), hint)
    return True


def record_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Say that a training of these settings begins there."""
    (directory / _SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
