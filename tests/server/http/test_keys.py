"""API keys: which line of the file is wrong, and one key without a file."""

from __future__ import annotations

from hashlib import sha256

import pytest

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.settings import ServerSettings


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


def test_one_key_without_a_file_has_the_owner_of_a_server_without_keys():
    """So a server that gets a key finds the conversations of before."""
    keys = ApiKeys(None, sha256(b"only").hexdigest())
    assert keys.are_required and not ApiKeys(None).are_required
    assert keys.owner("Bearer only") == keys.owner(None, "only") == ApiKeys(None).owner(None) == ""
    assert keys.owner("Bearer other") is None and keys.owner(None) is None
    assert keys.has_owner("") and not keys.has_owner("ann")
    assert keys.is_operator({"authorization": "Bearer only"}) and not keys.is_operator({})
    assert keys.reload() == 1, "there is no file to read again"


def test_one_key_lets_other_machines_connect_and_limits_nothing_else():
    digest = sha256(b"only").hexdigest()
    settings = ServerSettings(host="0.0.0.0", api_key_sha256=digest)
    assert settings.needs_keys and settings.storage_quota == ServerSettings().storage_quota
    assert not ServerSettings().needs_keys and ServerSettings(api_keys_file="keys").needs_keys
    with pytest.raises(ConfigError, match="set PENSIEVE_API_KEY or give --api_keys_file"):
        ServerSettings(host="0.0.0.0")
    with pytest.raises(ConfigError, match="api_keys_file is 'keys', but must be left out beside one key"):
        ServerSettings(api_keys_file="keys", api_key_sha256=digest)
    with pytest.raises(ConfigError, match="64 hexadecimal digits") as raised:
        ServerSettings(api_key_sha256="pasted-by-mistake")
    assert "pasted" not in str(raised.value)
