"""`pensieve serve` with a model whose replies are written in a script.

    python -m pensieve_lab.programs.serve_scripted --script=replies.toml --port=8000

The process, the engine, the tokenizer, the masks and all routes are those of `pensieve serve`, and so are its
flags, except `--model`. Only the choice among the allowed tokens is the script's. So a client's program shows
whether client and server fit, whatever a small model can do. Without `--script`, the replies are those that
the programs of `run_clients` expect. `pensieve_lab.scripted.script` describes the file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

from absl import flags

from pensieve_jax import AsyncEngine
from pensieve_jax.commands import serve
from pensieve_jax.commands.launch import run
from pensieve_lab.scripted.model import make_model
from pensieve_lab.scripted.script import DEFAULT_SCRIPT

FLAGS = flags.FLAGS
_NAME = "scripted"


class ScriptedEngine(AsyncEngine):
    """Engine whose process replies by the script in the model's directory."""

    worker: ClassVar[str] = "pensieve_lab.scripted.worker"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="pensieve-scripted-") as directory:
        make_model(Path(directory), Path(FLAGS.script))
        FLAGS["model"].value = directory
        FLAGS["served_model_name"].value = FLAGS.served_model_name or _NAME
        return serve.serve(ScriptedEngine)


def define_flags() -> None:
    serve.define_flags()
    flags.DEFINE_string("script", str(DEFAULT_SCRIPT), "File of replies.")
    FLAGS.set_default("cpu_bytes", None)


if __name__ == "__main__":
    define_flags()
    run(main)
