"""How launchers start and end: help, invalid flags, library output, and readers that close."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pensieve_jax import __version__
from tests.commands.starts import start_all
from tests.launching import ROOT

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'lab'}"}


def path_of(program: str) -> str:
    """Return the launcher of a program, or the program itself where it has none."""
    path = f"scripts/{program}.py"
    return path if (ROOT / path).is_file() else f"lab/pensieve_lab/programs/{program}.py"


def start(*command, **options):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        **options,
    )


HELPFUL = ("generate", "chat", "check_serving", "compare_variants", "benchmark_swaps")
BAD_FLAGS = (
    ("benchmark_scheduler", "--policy=x", "retention"),
    ("benchmark_scheduler", "--model=nope", "llama2-13b"),
    ("benchmark_scheduler", "--attention_backend=q", "pallas_triton"),
    ("benchmark_kernels", "--dtype=int8", "bfloat16"),
    ("benchmark_swaps", "--parts=x", "beside"),
    ("compare_variants", "--cpu_bytes=lots", "16GiB"),
    ("benchmark_kernels", "--backend=pallas_triton", "xla"),
    ("benchmark_kernels", "--cases=nope", "tiny"),
    ("generate", "--nope", "--help"),
    ("chat", "--gpu_pages=many", "error: flag --gpu_pages=many: must be an integer\n"),
    ("chat", "--top_p=most", "error: flag --top_p=most: must be a number\n"),
    ("chat", "--stateful=perhaps", "error: flag --stateful=perhaps: must be true or false\n"),
    ("chat", "one two", "error: ConfigError: model is"),
    (
        "generate",
        "--concurrency=2",
        "error: --input is missing: JSON lines of conversations, or lines of text (.gz too).",
    ),
    ("generate", "in.jsonl", "error: --input is missing: "),
    ("compare_variants", "model", "error: unexpected arguments: model\n"),
    ("convert_checkpoint", "--seed=1", "\n--target is missing: Directory to write"),
    ("reproduce", "--small", "error: --experiment is missing: "),
    ("simulate_serving", "--seed=1", "error: --trace is missing: "),
)
TYPED_ERROR = (
    "from pensieve_jax.commands.launch import run; from pensieve_jax import ConfigError\n"
    "def main(): raise ConfigError('x', 1, 'more')\nrun(main)"
)
NOISE = (
    "import logging; from absl import flags; flags.DEFINE_string('model', '', '')\n"
    "from pensieve_jax.commands.launch import run; run(lambda: logging.getLogger('jax').info('found') or 0)"
)
DOCUMENT = (
    "import os, sys; os.environ['PENSIEVE_REVISION'] = sys.argv.pop()\n"
    "from pensieve_jax.commands.launch import run\n"
    "from pensieve_jax.commands.report import define_document_flag\n"
    "define_document_flag(); run(lambda: print('measured') or 0)"
)
REVISIONS = (("HEAD", "COMMIT:DIGEST"), (f"{'0' * 40}:{'0' * 64}", "of these source files"))
QUIET, LOUD = "--model=x", "--verbosity=0"


@pytest.fixture(scope="module")
def starts():
    """Run all of these; return the results by command."""
    commands = [
        *((path_of(script), "--help") for script in HELPFUL),
        ("scripts/generate.py", "--helpfull"),
        ("scripts/chat.py", "--version"),
        *((path_of(script), flag) for script, flag, _ in BAD_FLAGS),
        ("-c", TYPED_ERROR),
        *(("-c", NOISE, flag) for flag in (QUIET, LOUD)),
        *(("-c", DOCUMENT, revision) for revision, _ in REVISIONS),
    ]
    return start_all(commands, root=ROOT, environment=ENVIRONMENT)


def test_every_launcher_shows_the_version(starts):
    done = starts["scripts/chat.py", "--version"]
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("script", HELPFUL)
def test_help_shows_the_shared_flags(starts, script):
    done = starts[path_of(script), "--help"]
    assert (done.returncode, done.stderr) == (0, "")
    for flag in ("--model", "--gpu_pages", "--cpu_bytes", "--policy", "--[no]progress"):
        assert f"  {flag}: " in done.stdout


def test_help_is_the_docstring_and_flags_by_group_with_defaults(starts):
    """A command's own flags come first; absl's are left to `--helpfull`."""
    text = starts["scripts/generate.py", "--help"].stdout
    assert text.startswith(
        "Batch generation: conversations in, turns out, both as JSON lines.\n\n    pensieve generate "
    )
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith((" ", "-"))]
    assert titles == [
        "flags:",
        "the model and the engine:",
        "the cache: pages, host memory, eviction:",
        "batches: the size of a step:",
        "the device: how steps run:",
        "sampling:",
    ]
    own, engine, cache, _, _, sampling = text.partition("\nflags:\n")[2].split("\n\n")[:6]
    assert (
        "  --concurrency: Most conversations in progress at once. (default: 64)\n" in own
        and "--history" in own
    )
    assert "--dtype" in engine and "  --gpu_pages: Pages of device memory for the KV cache; " in cache
    assert "  --[no]prefetch: " in cache and "--cpu_pages" in cache
    assert "  --[no]ignore_eos: " in sampling and "--temperature" in sampling
    assert "  --input: JSON lines of conversations, or lines of text (.gz too). (required)\n" in own
    assert "  --stop: A string that ends the reply. (may be given several times)\n" in sampling
    assert "--verbosity" not in text and "--helpfull" in text
    full = starts["scripts/generate.py", "--helpfull"]
    assert full.returncode == 0 and "--verbosity" in full.stdout and "--concurrency" in full.stdout


def test_every_launcher_starts_alike():
    """What is tested of some thus holds for all; one runs where this project is not installed."""
    folders = (ROOT / "scripts", ROOT / "lab" / "pensieve_lab" / "programs")
    for path in (path for folder in folders for path in folder.glob("*.py")):
        text = path.read_text()
        if "__main__" in text:
            is_launcher = "from lab_program import start" in text
            starts = f'    start("{path.stem}")\n' if is_launcher else "    define_flags()\n    run(main)\n"
            assert starts in text, path
            assert "required=True" not in text, f"{path}: `require` says what a flag is for, absl does not"


@pytest.mark.parametrize(("script", "flag", "known"), BAD_FLAGS)
def test_an_invalid_flag_is_reported_in_a_line(starts, script, flag, known):
    done = starts[path_of(script), flag]
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert known in done.stderr


@pytest.mark.parametrize(("revision", "says"), REVISIONS)
def test_a_wrong_revision_ends_a_launcher_before_its_main(starts, revision, says):
    """A launcher that ends with a document fails before it measures, not when it prints the document."""
    done = starts["-c", DOCUMENT, revision]
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ConfigError: PENSIEVE_REVISION is ") and says in done.stderr


def test_typed_errors_are_one_line_and_status_2(starts):
    """A separate process does so too: a forked one only skips imports."""
    done = start("-c", TYPED_ERROR, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (2, "error: ConfigError: x is 1, but must be more.\n")
    assert starts["-c", TYPED_ERROR] == (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("flag", ["--help", "--helpfull", "--helpshort", "-h", "-?"])
def test_help_for_a_closed_reader(flag):
    """The reader closes at once, as in `| head -0`. No traceback follows, and help goes nowhere else."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "from pensieve_jax.commands.launch import run\ndef main(): return 0\nrun(main)"
    done = start("-c", code, flag, stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("flush", [True, False])
def test_a_closed_reader_ends_the_launcher_quietly(flush):
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = f"from pensieve_jax.commands.launch import run; run(lambda: print('hello', flush={flush}) or 0)"
    done = start("-c", code, stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("flag", "shown"), [(LOUD, True), (QUIET, False)])
def test_library_messages_are_shown_on_demand(starts, flag, shown):
    done = starts["-c", NOISE, flag]
    assert done.returncode == 0
    assert ("found" in done.stderr) == shown


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_closed_stream_is_tolerated(number):
    """With `>&-` Python sets None for it, which has neither `flush` nor `isatty`."""
    code = (
        "import sys; from pensieve_jax.commands.launch import until_reader_leaves\n"
        "def main(): print('said', sys.stdin.isatty(), sys.stderr.isatty(), file=sys.stdout); return 3\n"
        "sys.exit(until_reader_leaves(main))"
    )
    closing = (
        f"import os, sys; os.close({number}); os.execv(sys.executable, [sys.executable, '-c', {code!r}])"
    )
    closed = start("-c", closing, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert (closed.returncode, closed.stderr) == (3, "")
    assert closed.stdout == ("" if number == 1 else "said False False\n")
