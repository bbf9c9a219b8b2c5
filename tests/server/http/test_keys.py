"""The file of API keys: which of its lines is wrong."""

from __future__ import annotations

import pytest

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.server.http.keys import ApiKeys


def test_the_wrong_line_is_named_by_its_number_and_not_shown(tmp_path):
    path = tmp_path / "keys.txt"
    path.write_text(f"# owners\n\nann:{'0' * 64}\nsk-pasted-by-mistake\n")
    with pytest.raises(ConfigError, match="correct line 4") as raised:
        ApiKeys(path)
    assert "pasted" not in str(raised.value)


def test_a_file_without_a_key_is_refused(tmp_path):
    path = tmp_path / "keys.txt"
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="at least one key"):
        ApiKeys(path)
