"""Checkpoints with which an interrupted training resumes.

Owns: the Orbax checkpoints of a training, and the record of the settings that they belong to.
Does not know: what the settings mean, or how a step is made.
Called by `chat_training.loop` and `programs.train_chat_model`.
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
    """Checkpoints of one training, in its directory. Close it, or use it as a context manager."""

    def __init__(self, directory: Path) -> None:
        """Create the directory if it is missing."""
        options = ocp.CheckpointManagerOptions(max_to_keep=_MAX_KEPT, create=True)
        self._manager = ocp.CheckpointManager((directory / _CHECKPOINTS).absolute(), options=options)

    @property
    def last_step(self) -> int:
        """Number of steps before the newest checkpoint; 0 without one."""
        return self._manager.latest_step() or 0

    def save(self, num_steps: int, state: TrainState) -> None:
        """Save the state after `num_steps` steps; writing goes on in the background."""
        if num_steps != self._manager.latest_step():
            self._manager.save(num_steps, args=ocp.args.StandardSave(state._asdict()))

    def restore(self, like: TrainState) -> TrainState:
        """Return the newest state; `like` has its shapes, dtypes and devices."""
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        values = self._manager.restore(self.last_step, args=ocp.args.StandardRestore(target))
        return TrainState(**values)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until pending writes are done."""
        self._manager.close()


def has_training(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether a training with these settings was begun there.

    Args:
      directory: of the training.
      settings: JSON values by the name of their flag.

    Raises:
      ConfigError: the directory holds a training with other settings.
    """
    path = directory / _SETTINGS_FILE
    if not path.is_file():
        return False
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("--work_dir", str(directory), "a directory of this script", str(error)) from error
    if not isinstance(saved, dict):
        hint = f"its {_SETTINGS_FILE} is not a JSON object"
        raise ConfigError("--work_dir", str(directory), "a directory of this script", hint)
    for name, value in settings.items():
        if saved.get(name) != value:
            hint = "the training in --work_dir has this value; pass it, or use an empty directory"
            raise ConfigError(f"--{name}", value, repr(saved.get(name)), hint)
    return True


def record_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a training that begins there."""
    (directory / _SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
