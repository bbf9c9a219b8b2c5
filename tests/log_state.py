"""Restores the log's configuration after a test, or a command that it runs, has changed it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = (
    *("pensieve_jax", "pensieve_jax.server", "jax", "asyncio", "opentelemetry"),
    *("uvicorn", "uvicorn.error"),
)


@contextmanager
def kept_log() -> Iterator[None]:
    """Restore what `server.logs.log_to` changes when the block ends."""
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
