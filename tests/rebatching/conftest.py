"""Where the runners of these tests find each other's programs.

Owns: the directory that `real_models` compiles into. Does not know: what is compiled. Called by: pytest.
"""

from __future__ import annotations

import pytest

from tests.rebatching import real_models


@pytest.fixture(scope="session", autouse=True)
def _shared_programs(compilation_cache: str) -> None:
    """Runners of several files, in either process, are alike: whoever comes first compiles."""
    real_models.shared_programs = compilation_cache
