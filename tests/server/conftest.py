"""One server with the model in the package for tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving.served import ServedProcess

SIZES = ("--model=chat", "--gpu_pages=256", "--cpu_pages=64", "--max_num_running=8", "--token_buckets=8,64")


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory, compilation_cache: str) -> Iterator[ServedProcess]:
    """`pensieve serve` without keys, float32 on a CPU; every test has conversations of its own."""
    history = tmp_path_factory.mktemp("served") / "chats.sqlite"
    flags = [*SIZES, f"--history={history}", f"--compilation_cache_dir={compilation_cache}"]
    with ServedProcess(flags) as served:
        yield served
