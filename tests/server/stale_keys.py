"""An idempotency key whose result is deleted between the two reads of a look-up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def found_before_its_deletion(history: Any, known: Any) -> Iterator[None]:
    """Let the first look-up of a key in this block find `known`, which was read before the deletion."""
    assert known is not None
    stale, read = [known], history.idempotent

    def idempotent(*arguments: Any, **more: Any) -> Any:
        return stale.pop() if stale else read(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "idempotent", idempotent)
        yield
    assert not stale
