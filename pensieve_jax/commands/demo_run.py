"""Runs of the demonstration: engines on one runner, the turns with little memory, and the dense reference.

Owns: the configuration of the engines, the order of turns, and the lines of progress.
Does not know: the output, what must have happened, or how speed is measured (`demo_speed`).
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence

import numpy as np
from absl import flags
from tqdm import tqdm

from model_defs import load_model, make_mesh
from pensieve_jax import LLM, ConfigError, ContextLengthError, EngineConfig
from pensieve_jax.assembly import assemble
from pensieve_jax.commands.demo_conversations import CONVERSATIONS, SYSTEM_PROMPT
from pensieve_jax.commands.demo_screen import DemoTurn
from pensieve_jax.commands.engine_flags import command_config
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.engine.engine import Engine
from pensieve_jax.history import open_store
from pensieve_jax.model_source import resolve_model
from pensieve_jax.text import ChatFormat, EarlierTurn

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
_TOLD_TURNS = 12  # replayed turns between two lines of progress


class DemoEngines:
    """One runner of the sizes that all commands have, and one engine on it at a time.

    So the demonstration compiles nothing that another command has compiled.
    """

    def __init__(self, model: str, compilation_cache_dir: str | None) -> None:
        """Load the model and compile; raises PensieveError or ModelError."""
        config = command_config(compilation_cache_dir)
        self._parts = assemble(
            model,
            dtype="float32",
            history=None,
            synchronous="normal",
            config=config,
            progress=sys.stderr.isatty(),
        )

    @property
    def config(self) -> EngineConfig:
        """Configuration of the runner, with all sizes in pages."""
        return self._parts.config

    def start(self, config: EngineConfig) -> LLM:
        """Return a model on empty pools, whose tiers may be smaller than the runner's. Close the one before.

        Raises:
          ConfigError: a tier is larger than the runner's.
        """
        have, wanted = self.config.cache, config.cache
        for name in ("gpu_pages", "cpu_pages"):
            if getattr(wanted, name) > getattr(have, name):
                limit = f"at most {getattr(have, name)}, the number that other commands have"
                raise ConfigError(f"--{name}", getattr(wanted, name), limit)
        parts, runner = self._parts, self._parts.runner
        parts.engine.close()
        runner.reset()
        room = config.resolve_context_tokens(parts.model_config.max_position_embeddings)
        engine = Engine(
            runner,
            config,
            dataclasses.replace(parts.engine.limits, max_context_tokens=room),
            open_store(None, fingerprint=parts.fingerprint),
            tokenizer=parts.tokenizer,
            cost_model=parts.costs.model,
        )
        return LLM.of_parts(dataclasses.replace(parts, engine=engine, config=config))


def tight_config(config: EngineConfig, *, gpu_pages: int, cpu_pages: int, policy: str) -> EngineConfig:
    """Return a configuration with far fewer pages than the conversations need.

    It reserves no pages for running requests: replies are short, and with a reserve no request would be
    suspended.
    """
    cache = dataclasses.replace(
        config.cache, gpu_pages=gpu_pages, cpu_pages=cpu_pages, policy=policy, reserve_fraction=0.0
    )
    return dataclasses.replace(config, cache=cache)


def run(engines: DemoEngines) -> tuple[list[DemoTurn], dict[str, int | float]]:
    """Run all turns with little memory; return them with the engine's counters."""
    config = tight_config(
        engines.config, gpu_pages=FLAGS.gpu_pages, cpu_pages=FLAGS.cpu_pages, policy=FLAGS.policy
    )
    with engines.start(config) as llm:
        try:
            return serve(llm), llm.stats()
        except ContextLengthError as error:
            room = f"{llm.engine.limits.max_context_tokens:,} tokens"
            limit = f"more, since the conversations exceed the {room} that fit"
            raise ConfigError(
                "--gpu_pages", FLAGS.gpu_pages, limit, "the model must have as many positions, too"
            ) from error


def serve(llm: LLM) -> list[DemoTurn]:
    """Run all conversations, one turn of each at a time.

    Raises:
      ChatTemplateError, TokenizerMissingError: the model is not a chat model.
    """
    turns: list[DemoTurn] = []
    template = ChatFormat(llm.tokenizer)
    names = list(CONVERSATIONS)
    params = [script.params for script in CONVERSATIONS.values()]
    system = {"role": "system", "content": SYSTEM_PROMPT}
    earlier: dict[str, list[EarlierTurn]] = {name: [] for name in names}
    num_rounds = max(len(script.messages) for script in CONVERSATIONS.values())
    for index in range(num_rounds):
        texts = [CONVERSATIONS[name].messages[index] for name in names]
        messages = [[*([] if index else [system]), {"role": "user", "content": text}] for text in texts]
        prompts: list[list[int]] = []
        histories: list[tuple[int, ...]] = []
        for name, one in zip(names, messages, strict=True):
            history = tuple(llm.history(name).token_ids.tolist()) if index else ()
            keep, ids = template.turn_prompt(earlier[name], history, one)
            histories.append(history[:keep])
            prompts.append(ids)
        shared = [] if index else common_beginning(prompts)
        tiers = [tuple(chunk.tier for chunk in llm.explain(name).chunks) if index else () for name in names]
        outputs = llm.chat(
            messages,
            params,
            conversation_ids=names,
            prefix=llm.share_prefix(shared) if shared else None,
        )
        for name, text, sent, history, ids, output, found in zip(
            names, texts, messages, histories, prompts, outputs, tiers, strict=True
        ):
            params_of = CONVERSATIONS[name].params
            turns.append(DemoTurn(name, index + 1, text, history, tuple(ids), params_of, output, found))
            num_tokens = len(history) + len(ids) + len(output.token_ids)
            earlier[name].append(EarlierTurn(sent, output.text, output.token_ids, num_tokens))
        say_progress(f"turn {index + 1} of {num_rounds} of {len(names)} conversations is answered")
    return turns


def replay(model: str, turns: Sequence[DemoTurn]) -> tuple[list[bool], float]:
    """Return whether each turn's tokens equal the dense reference's, and the smallest margin of a choice."""
    parts = load_model(resolve_model(model), dtype="float32", mesh=make_mesh(1))
    # Turns are short, so padding to 256 costs less than compiling every length.
    reference = DenseReference(parts, min_padded_tokens=256)
    equal, smallest = [], np.inf
    for number, turn in enumerate(tqdm(turns, desc="replaying", disable=None, leave=False), 1):
        token_ids = turn.output.token_ids
        found = reference.replay_turn(
            turn.history_ids, turn.prompt_ids, token_ids, turn.params, turn.output.seed
        )
        equal.append(found.token_ids.tolist() == list(token_ids))
        smallest = min(smallest, float(found.margins.min()))
        if number % _TOLD_TURNS == 0 or number == len(turns):
            say_progress(f"{number} of {len(turns)} turns are replayed by the dense model")
    return equal, smallest


def common_beginning(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the common prefix of all prompts: the system prompt in the chat template."""
    columns = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))
    return [ids[0] for ids in columns]


def say_progress(text: str) -> None:
    """Print a line of progress where the output is not a terminal and shows no bar."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
