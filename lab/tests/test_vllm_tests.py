"""vLLM's own tests: their copy, the packages that are empty, and the causes of failures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from pensieve_jax import ConfigError
from pensieve_lab.programs.run_vllm_tests import SCRIPT
from pensieve_lab.scripted.script import load_script
from pensieve_lab.vllm_tests.copying import Selection, copy_tests, load_selection
from pensieve_lab.vllm_tests.outcomes import result_of
from tests.deadlines import TIMEOUT_S

TEST = """
import pytest
from tests.utils import RemoteOpenAIServer
from vllm.sampling_params import SamplingParams
from .conftest import greeting

MODEL_NAME = "Qwen/Qwen3-8B"
OTHER = ["openai/gpt-oss-20b", "not/a model"]
ARGUMENTS = ["--served-model-name", "claude"]
"""
SELECTION = Selection(
    (), {"beam search": re.compile("use_beam_search")}, {"test_poem": ("other model", "a poem must rhyme")}
)


@pytest.fixture
def sdist(tmp_path):
    folder = tmp_path / "vllm" / "tests" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    (folder / "test_one.py").write_text(TEST)
    (folder / "conftest.py").write_text('MODEL = "Qwen/Qwen3-8B"\n')
    (folder.parent / "conftest.py").write_text("")
    return tmp_path / "vllm"


def test_the_copy_asks_for_the_served_model(sdist, tmp_path):
    target = tmp_path / "copy"
    target.mkdir()
    assert copy_tests(sdist, target, ("openai/test_one.py",), "scripted") == [
        "tests/entrypoints/openai/test_one.py"
    ]
    copied = (target / "tests" / "entrypoints" / "openai" / "test_one.py").read_text()
    assert 'MODEL_NAME = "scripted"' in copied and '["scripted", "not/a model"]' in copied
    assert '["--served-model-name", "scripted"]' in copied
    assert (target / "tests" / "entrypoints" / "openai" / "conftest.py").read_text() == 'MODEL = "scripted"\n'
    assert "RemoteOpenAIServer" in (target / "tests" / "utils.py").read_text()


def test_a_directory_without_the_tests_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--sdist"):
        copy_tests(tmp_path, tmp_path, ("openai/test_one.py",), "scripted")


def line(outcome="failed", message="", used=(), errors=(), test="test_one"):
    name = f"tests/entrypoints/openai/test_one.py::{test}"
    return {"test": name, "outcome": outcome, "message": message, "used": list(used), "errors": list(errors)}


REFUSED = '400 POST localhost/v1/responses: {"error":{"code":"unsupported_parameter","param":"tools"}}'


@pytest.mark.parametrize(
    ("found", "outcome", "cause"),
    [
        (line("passed"), "passed", ""),
        (line("skipped"), "skipped", ""),
        (line("not collected", "no module"), "stand-in", "no module"),
        (line(errors=["400: use_beam_search"]), "by design", "beam search"),
        (line(errors=[REFUSED]), "refused", "unsupported_parameter (tools): 400"),
        (line(used=["vllm.LLM"], errors=[REFUSED]), "stand-in", "vllm.LLM"),
        (line(message="AssertionError: no rhyme", test="TestIt::test_poem[a]"), "other model", "a poem"),
        (line(message="TypeError: '_Meta' and 'int'"), "stand-in", "TypeError"),
        (line(message="AssertionError: 1 == 2"), "answer", "AssertionError: 1 == 2"),
        (line(message="Error code: 400 - {'code': 'x', 'param': 'y'}"), "refused", "x (y)"),
    ],
)
def test_the_cause_is_found(found, outcome, cause):
    result = result_of(found, SELECTION)
    assert (result.file, result.outcome) == ("openai/test_one.py", outcome)
    assert result.cause.startswith(cause)


def test_the_selection_and_the_script_are_read():
    selection = load_selection()
    assert len(set(selection.files)) == len(selection.files) and selection.by_design
    load_script(SCRIPT)


def test_names_of_empty_packages_do_what_a_test_needs_at_import(tmp_path):
    """In a process of its own, because the plugin changes what can be imported."""
    import pensieve_lab.vllm_tests as room

    shutil.copy(f"{room.__path__[0]}/stand_in/plugin.py", tmp_path / "plugin.py")
    (tmp_path / "requests.py").write_text("class Session:\n    def send(self, request): ...\n")
    code = (
        "import json, plugin, pytest\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.exceptions import VLLMValidationError\n"
        "import torch.nn as nn\n"
        "class Module(nn.Module): pass\n"
        "with pytest.raises(VLLMValidationError): raise VLLMValidationError('x')\n"
        "print(json.dumps([plugin._used[-1], bool(current_platform.is_rocm())]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    assert json.loads(done.stdout) == ["vllm.exceptions.VLLMValidationError", False]
