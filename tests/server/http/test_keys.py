"""The file of API keys: which of its lines is wrong."""

from __future__ import annotations

from hashlib import sha256

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


@pytest.mark.parametrize("line", [f"bob:{'0' * 64}", f"ann:{'0' * 64}:operator"])
def test_a_key_has_one_owner_and_one_form(tmp_path, line):
    path = tmp_path / "keys.txt"
    path.write_text(f"ann:{'0' * 64}\nann:{'0' * 64}\n")  # the same line twice says the same
    keys = ApiKeys(path)
    path.write_text(f"ann:{'0' * 64}\n\n{line}\n")
    with pytest.raises(ConfigError, match="one owner and one form; correct line 3, which repeats a digest"):
        ApiKeys(path)
    with pytest.raises(ConfigError):
        keys.reload()
    assert keys.has_owner("ann") and not keys.has_owner("bob")


def test_operators_are_named_in_the_file(tmp_path):
    path = tmp_path / "keys.txt"
    path.write_text(f"ann:{sha256(b'a').hexdigest()}\nops:{sha256(b'o').hexdigest()}:operator\n")
    keys = ApiKeys(path)
    assert keys.owner("Bearer o") == "ops" and keys.owner("Bearer a") == "ann"
    assert [keys.is_operator({"authorization": f"Bearer {key}"}) for key in "aox"] == [False, True, False]
    assert keys.is_operator({"x-api-key": "o"})
    assert ApiKeys(None).is_operator({})
