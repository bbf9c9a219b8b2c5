"""Checks replies with JSON schemas of JSONSchemaBench: each that ends by itself must be valid.

    git clone --bare https://github.com/guidance-ai/jsonschemabench bench.git
    python -m pensieve_lab.programs.check_schemas --bench=bench.git --num_schemas=1000

The program draws schemas by `--seed` and asks a model for a reply with each that compiles, at temperature 1.
The cache is so small that turns are suspended, and chunks are evicted and copied to host memory and back. A
round has several conversations and a fork of each with another schema. The conversations of the round before
get a second turn. In between, the engine is closed and opened again on the same history. `jsonschema`, an
independent validator, checks the replies. The exit status is 1 if a reply is invalid. Replies that the token
limit cut are counted.

`--num_shares` divides the schemas into shares, and `--share` names the one to run, so that a long check can
run in parts. Each part writes its own document; together they are the whole check.
"""

from __future__ import annotations

import collections
import json
import random
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
from absl import flags
from tqdm import tqdm

from pensieve_jax import (
    LLM,
    CacheConfig,
    EngineConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
    StructuredOutput,
)
from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.core.errors import ConfigError, InvalidRequestError, PensieveError
from pensieve_jax.core.outputs import Output

FLAGS = flags.FLAGS
_DATA = "maskbench/data"
_COUNTERS = ("num_suspensions", "swapped_in_tokens", "resume_recomputed_tokens", "recomputed_tokens")
_CONTEXT_TOKENS = 1024
_ROUNDS_PER_ENGINE = 4


class Case(NamedTuple):
    """A schema of the benchmark: its file's name, the schema, and the form of replies."""

    name: str
    schema: Any
    form: StructuredOutput


def drawn_schemas(bench: str, seed: int) -> Iterator[tuple[str, Any]]:
    """Yield names and schemas of a bare repository in an order that the seed decides."""
    git = ("git", "-C", bench)
    listed = subprocess.check_output([*git, "ls-tree", "-r", "--name-only", "HEAD", _DATA], text=True)
    names = listed.split()
    random.Random(seed).shuffle(names)
    for name in names:
        text = subprocess.check_output([*git, "show", f"HEAD:{name}"])
        yield Path(name).name, json.loads(text)["schema"]


def compiled_cases(llm: LLM, bench: str, seed: int, count: int) -> tuple[list[Case], dict[str, int]]:
    """Return `count` schemas that compile for the model, and how many were refused, by class of error."""
    found: list[Case] = []
    refused: collections.Counter[str] = collections.Counter()
    grammars = llm.engine.grammars
    assert grammars is not None, "the model has no tokenizer"
    with tqdm(total=count, desc="compiling", disable=None) as bar:
        for name, schema in drawn_schemas(bench, seed):
            if len(found) == count:
                break
            try:
                form = StructuredOutput.json_schema(schema)
                grammars.compile(form)
            except InvalidRequestError as error:
                refused[type(error).__name__] += 1
                continue
            found.append(Case(name, schema, form))
            bar.update()
    return found, dict(refused)


def problem_of(case: Case, text: str) -> str | None:
    """Return what is wrong with a reply, or None."""
    validator = jsonschema.validators.validator_for(case.schema, jsonschema.Draft202012Validator)
    try:
        validator(case.schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


class Check:
    """The replies so far.

    Attributes:
      counts: numbers of replies by outcome, and the sums of `_COUNTERS` over their turns.
      problems: invalid replies.
    """

    def __init__(self, seed: int, max_tokens: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[dict[str, str]] = []
        self._seed, self._max_tokens = seed, max_tokens
        self._num_turns = 0

    def run(self, llm: LLM, cases: Sequence[Case], conversation_ids: Sequence[str]) -> None:
        """Run one turn of each conversation, all together, and check the replies."""
        params = []
        for case in cases:
            self._num_turns += 1
            seed = self._seed * 1_000_003 + self._num_turns
            params.append(
                SamplingParams(structured=case.form, temperature=1.0, seed=seed, max_tokens=self._max_tokens)
            )
        prompts = [f"Write an example of {case.name}, number {i}." for i, case in enumerate(cases)]
        try:
            outputs: Sequence[Output | None] = llm.generate(
                prompts, params, conversation_ids=conversation_ids
            )
        except PensieveError as error:
            outputs = error.outputs or [None] * len(cases)
            self.counts[f"failed: {type(error).__name__}"] += sum(output is None for output in outputs)
        for case, output in zip(cases, outputs, strict=True):
            if output is not None:
                self._take(case, output)

    def _take(self, case: Case, output: Output) -> None:
        for name in _COUNTERS:
            self.counts[name] += getattr(output.usage, name)
        if output.finish_reason != "stop":
            self.counts["cut"] += 1
            return
        problem = problem_of(case, output.text)
        self.counts["valid" if problem is None else "invalid"] += 1
        if problem is not None:
            self.problems.append({"schema": case.name, "problem": problem, "reply": output.text[:500]})


def opened(model: str, private: str) -> LLM:
    """Open the model with a cache that is too small for a round, and files in the directory `private`."""
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=64, cpu_pages=40, chunk_tokens=16),
        scheduler=SchedulerConfig(
            max_num_running=FLAGS.num_conversations,
            max_num_batched_tokens=128,
            max_context_tokens=_CONTEXT_TOKENS,
            token_buckets=(16, 128),
        ),
        runner=RunnerConfig(compilation_cache_dir=f"{private}/programs"),
    )
    history = f"{private}/turns.sqlite"
    return LLM(model, dtype="float32", history=history, config=config, progress=False)


def check_model(model: str) -> dict[str, Any]:
    """Check one model; return the numbers of schemas and replies, and invalid replies.

    `refused_schemas` counts the draws of all shares.
    """
    check = Check(FLAGS.seed, FLAGS.max_tokens)
    size = FLAGS.num_conversations
    with tempfile.TemporaryDirectory() as private:
        llm = opened(model, private)
        try:
            cases, refused = compiled_cases(llm, FLAGS.bench, FLAGS.seed, FLAGS.num_schemas)
            cases = cases[FLAGS.share :: FLAGS.num_shares]
            rounds = [cases[start : start + size] for start in range(0, len(cases), size)]
            for number, first in enumerate(tqdm(rounds, desc=model, disable=None)):
                if number and number % _ROUNDS_PER_ENGINE == 0:
                    llm.close()
                    llm = opened(model, private)
                ids = [f"{number}-{i}" for i in range(len(first))]
                check.run(llm, first, ids)
                forks = [f"{name}-fork" for name in ids]
                for name, fork in zip(ids, forks, strict=True):
                    llm.fork(name, fork)
                check.run(llm, first[::-1], forks)
                if number:  # conversations of the round before return, whose chunks were evicted
                    check.run(llm, first, [f"{number - 1}-{i}" for i in range(len(first))])
        finally:
            llm.close()
    return {
        "model": model,
        "num_schemas": len(cases),
        "refused_schemas": refused,
        "replies": dict(sorted(check.counts.items())),
        "problems": check.problems,
    }


def main() -> int:
    if FLAGS.share >= FLAGS.num_shares:
        raise ConfigError("share", FLAGS.share, f"less than num_shares, {FLAGS.num_shares}")
    results = [check_model(model) for model in FLAGS.models]
    for one in results:
        print(f"{one['model']}: {one['num_schemas']} schemas compiled, refused {one['refused_schemas']}")
        print(table(("replies", "number"), list(one["replies"].items())))
        for problem in one["problems"]:
            print("invalid:", problem)
    document = {
        "models": results,
        "seed": FLAGS.seed,
        "max_tokens": FLAGS.max_tokens,
        "share": FLAGS.share,
        "num_shares": FLAGS.num_shares,
    }
    print_document(json_line("schemas", document, units={"replies": "number"}, device=device_name()))
    size = len(range(FLAGS.share, FLAGS.num_schemas, FLAGS.num_shares))
    is_complete = all(one["num_schemas"] == size for one in results)
    return EXIT_FAILED if not is_complete or any(one["problems"] for one in results) else 0


def define_flags() -> None:
    flags.DEFINE_string("bench", None, "Bare repository of guidance-ai/jsonschemabench.")
    flags.DEFINE_list("models", ["chat", "random:llama-tiny"], "Models to check.")
    flags.DEFINE_integer("num_schemas", 1000, "Schemas that compile, for each model.", lower_bound=1)
    flags.DEFINE_integer("num_conversations", 12, "Conversations of a round.", lower_bound=1)
    flags.DEFINE_integer("max_tokens", 160, "Limit of a reply.", lower_bound=1)
    flags.DEFINE_integer("num_shares", 1, "Shares into which the schemas are divided.", lower_bound=1)
    flags.DEFINE_integer("share", 0, "The share to check, from 0.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "Seed of the schemas and of the replies.")
    define_document_flag()
    require("bench")


if __name__ == "__main__":
    define_flags()
    run(main)
