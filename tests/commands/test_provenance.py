"""The commit in a document is that of the files that ran."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from pensieve_jax import ConfigError
from pensieve_jax.commands import provenance
from tests.launching import load

_GIT = (
    "-c",
    "user.name=A",
    "-c",
    "user.email=a@b.c",
    "-c",
    "commit.gpgsign=false",
    "-c",
    "core.autocrlf=false",
)


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *_GIT, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def commit(root: Path, message: str = "a commit") -> str:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", message)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a repository with one commit of source files and a page."""
    root = tmp_path / "tree"
    for name in ("scripts/a.py", "pensieve_jax/deep/b.json", "docs/page.md", "scripts/notes.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"content of {name}\n")
    git(root.parent, "init", "-q", str(root))
    commit(root)
    return root


def test_a_clean_tree(tree: Path) -> None:
    state = provenance.read_source_state(tree, None)
    assert state.revision == git(tree, "rev-parse", "HEAD") and state.tree_is_clean is True
    assert state.source_digest == provenance.commit_digest(tree, "HEAD") and len(state.source_digest) == 64


@pytest.mark.parametrize("name", ["scripts/a.py", "scripts/new.py", "pensieve_jax/deep/b.json"])
def test_another_source_file_makes_it_dirty(tree: Path, name: str) -> None:
    (tree / name).write_text("changed")
    state = provenance.read_source_state(tree, None)
    assert state.tree_is_clean is False and state.revision == git(tree, "rev-parse", "HEAD")


def test_a_file_that_moved_makes_it_dirty(tree: Path) -> None:
    (tree / "scripts/a.py").rename(tree / "scripts/b.py")
    assert provenance.read_source_state(tree, None).tree_is_clean is False


@pytest.mark.parametrize(
    "name", ["docs/page.md", "scripts/notes.txt", "scripts/__pycache__/a.json", "out.json"]
)
def test_other_files_do_not_make_it_dirty(tree: Path, name: str) -> None:
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text("changed")
    assert provenance.read_source_state(tree, None).tree_is_clean is True


def test_a_copy_without_a_history_uses_the_given_commit(tree: Path, tmp_path: Path) -> None:
    state = provenance.read_source_state(tree, None)
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".git"))
    assert provenance.read_source_state(copy, f"{state.revision}:{state.source_digest}") == state
    assert provenance.read_source_state(copy, None) == (None, None, state.source_digest)
    (copy / "scripts/a.py").write_text("changed")
    with pytest.raises(ConfigError, match=r"PENSIEVE_REVISION .* of these source files"):
        provenance.read_source_state(copy, f"{state.revision}:{state.source_digest}")


@pytest.mark.parametrize("named", ["", "HEAD", "0" * 40, "0" * 40 + ":", ":" + "0" * 64])
def test_a_malformed_name_is_refused(tree: Path, tmp_path: Path, named: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".git"))
    with pytest.raises(ConfigError, match=r"COMMIT:DIGEST"):
        provenance.read_source_state(copy, named)


def test_a_copy_with_an_older_history_uses_the_given_commit(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy)
    (tree / "scripts/a.py").write_text("changed")
    commit(tree)
    shutil.copy(tree / "scripts/a.py", copy / "scripts/a.py")
    state = provenance.read_source_state(tree, None)
    assert provenance.read_source_state(copy, None).tree_is_clean is False
    assert provenance.read_source_state(copy, f"{state.revision}:{state.source_digest}") == state


def test_an_unknown_commit_has_no_digest(tree: Path) -> None:
    assert provenance.commit_digest(tree, "0" * 40) is None


def test_print_revision_prints_the_commit(monkeypatch, capsys) -> None:
    script = load("print_revision")
    monkeypatch.setattr(script, "source_state", lambda: provenance.SourceState("c" * 40, True, "d" * 64))
    assert script.main() == 0 and capsys.readouterr().out == f"{'c' * 40}:{'d' * 64}\n"
    monkeypatch.setattr(script, "source_state", lambda: provenance.SourceState("c" * 40, False, "d" * 64))
    assert script.main() == 1 and capsys.readouterr().out == ""


def test_every_document_has_its_provenance() -> None:
    line = load("pensieve_jax.commands.report").json_line("name", {}, units={}, device="none")
    document = json.loads(line)
    assert {"revision", "tree_is_clean", "source_digest", "command", "versions"} <= document.keys()
    assert document["hardware"]["num_cpus"] >= 1 and document["hardware"]["memory_bytes"] > 2**20
    assert document["hardware"]["device"] == "none" and "gpus" in document["hardware"]


def test_gpus_and_their_driver(monkeypatch) -> None:
    told = SimpleNamespace(stdout="NVIDIA H200, 580.95.05\nNVIDIA H200, 580.95.05\n")
    monkeypatch.setattr(provenance.subprocess, "run", lambda *_, **__: told)
    assert provenance._gpus() == [{"name": "NVIDIA H200", "driver": "580.95.05"}] * 2


def test_a_module_is_named_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file would be a path of this machine."""
    spec = SimpleNamespace(name="tests.search", origin="/somewhere/tests/search.py")
    monkeypatch.setitem(provenance.sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr("sys.argv", ["/somewhere/tests/search.py", "--max_s=3"])
    assert provenance.provenance("cpu")["command"].partition(" ")[2] == "-m tests.search --max_s=3"
    monkeypatch.setattr("sys.argv", ["scripts/one.py", "--max_s=3"])
    assert provenance.provenance("cpu")["command"].partition(" ")[2] == "scripts/one.py --max_s=3"
