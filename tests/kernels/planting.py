"""Bugs planted in kernels: a function of a module or class with a small change of its text."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

import pytest


def plant(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    """Replace `old` by `new` in the function `name` of `owner`; fail if it no longer has this text once.

    Programs that were traced before keep the function as it was.
    """
    function = getattr(owner, name)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(old) == 1, f"the bug is out of date: {old!r} is {text.count(old)} times in {name}"
    module = sys.modules[function.__module__]
    found: dict[str, Any] = {}
    exec(compile(text.replace(old, new), f"<planted in {name}>", "exec"), module.__dict__, found)
    monkeypatch.setattr(owner, name, found[name])
