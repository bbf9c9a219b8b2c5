"""The engine's process of a scripted model.

Owns: the joining of a script in the model's directory with its engine.
Does not know: what the script says.
"""

from __future__ import annotations

import sys
from pathlib import Path

from model_defs import source_config
from pensieve_jax.assembly import Assembled
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.engine.runner import Runner
from pensieve_jax.server.engine_process import worker
from pensieve_jax.server.engine_process.messages import Start
from pensieve_jax.text import load_tokenizer
from pensieve_lab.scripted.model import SCRIPT_FILE
from pensieve_lab.scripted.runner import ScriptedRunner, Sizes, check_without_host_tier
from pensieve_lab.scripted.script import load_script
from pensieve_lab.scripted.writer import Writer


def make(start: Start) -> Assembled:
    """Build an engine that replies by the script in the model's directory."""
    check_without_host_tier(start.config.cache.num_cpu_pages)
    script = load_script(Path(start.model) / SCRIPT_FILE)
    tokenizer = load_tokenizer(start.model)
    assert tokenizer is not None
    model_config = source_config(start.model, start.config.runner.max_position_embeddings)
    writer = Writer(script, tokenizer)

    def wrap(runner: ModelRunner) -> Runner:
        sizes = Sizes(start.config.cache.chunk_tokens, runner.storage.num_pages, model_config.vocab_size)
        return ScriptedRunner(runner, writer, sizes)

    return worker.assembled(start, wrap)


if __name__ == "__main__":
    sys.exit(worker.main(make))
