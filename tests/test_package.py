"""The package's metadata: its names, its version, and that it is typed."""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import model_defs.errors
import pensieve_jax
from pensieve_jax import version
from pensieve_jax.core import errors

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_error_that_a_caller_can_get_is_exported() -> None:
    found = {
        name: one
        for module in (errors, model_defs.errors)
        for name, one in inspect.getmembers(module, inspect.isclass)
        if issubclass(one, Exception)
    }
    assert {"PensieveError", "ModelError", "CheckpointError"} <= found.keys()
    for name, one in found.items():
        assert getattr(pensieve_jax, name) is one and name in pensieve_jax.__all__
    assert all(hasattr(pensieve_jax, name) for name in pensieve_jax.__all__)


def test_every_public_name_is_on_the_page_of_the_python_interface() -> None:
    page = (ROOT / "docs" / "site" / "python.md").read_text(encoding="utf-8")
    described = re.findall(r"^\.\. auto(?:class|exception):: (\w+)$", page, re.MULTILINE)
    assert sorted(described) == sorted(name for name in pensieve_jax.__all__ if name != "__version__")


def test_result_types_of_an_llm_are_exported() -> None:
    public = {
        name: inspect.get_annotations(method)["return"]
        for name, method in inspect.getmembers(pensieve_jax.LLM, inspect.isfunction)
        if not name.startswith("_")
    }
    named = {word for told in public.values() for word in re.findall(r"\b[A-Z]\w+", str(told))} - {
        "Any",
        "None",
    }
    assert {"Output", "Stream", "Turn", "ConversationRecord", "ConversationInfo"} <= named
    assert named <= set(pensieve_jax.__all__)
    assert pensieve_jax.TurnRecord.__module__ == pensieve_jax.ConversationRecord.__module__


def test_the_version_equals_pyprojects() -> None:
    assert pensieve_jax.__version__ == PROJECT["project"]["version"]
    with pytest.raises(AttributeError, match="no_such_name"):
        pensieve_jax.no_such_name  # noqa: B018


def test_a_version_without_a_checkout_is_the_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: f"{name} 9")
    for number, text in enumerate((None, "[project]\nname = 'other'\nversion = '7'\n", "no toml")):
        root = tmp_path / str(number)
        root.mkdir()
        if text is not None:
            (root / "pyproject.toml").write_text(text, encoding="utf-8")
        assert version.find_version(root) == "pensieve-jax 9"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert version.find_version(tmp_path) == version.UNKNOWN


def test_every_package_has_a_type_marker_in_the_wheel() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    for pattern in setuptools["packages"]["find"]["include"]:
        package = pattern.removesuffix("*")
        assert (ROOT / package / "py.typed").is_file()
        assert "py.typed" in setuptools["package-data"][package]
