"""Batch generation: conversations in, turns out, both as JSON lines.

    pensieve generate path/to/model --input=prompts.jsonl --output=turns.jsonl

Input: docs/formats.md has the formats. A line is, for example,
    {"messages": [{"role": "user", "content": "Hello"}]}
    {"conversation_id": "ada", "turns": [{"messages": [...]}, {"messages": [...]}]}
    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
    {"prompt": "Once upon a time"}
or, in a file that is not JSON, a user's message. `messages` use the model's chat template; a `prompt`, text
or token ids, is used as it is.
Output: a line for every turn, in the order in which they finish, with `conversation_id`, `turn` (from 0),
`prompt`, `token_ids`, `text`, `finish_reason`, `usage`, `seed`, and, if requested, `logprobs` and
`prompt_logprobs`. A line with `custom_id` is answered in OpenAI's batch format instead.

Conversations begin in their order. A conversation's next turn runs when the previous one has finished, so
that its KV cache is still in memory. At most `--concurrency` conversations are in progress at a time, and no
more than fit into the device's pages.

The whole file is checked before any turn runs: format, ids, lengths and parameters before the model is
loaded, text and messages when its tokenizer is loaded. The chat template is checked with first turns only,
since later turns depend on replies. Bad lines are reported by number, with exit status 2, and the output is
unchanged. Whether a later turn fits depends on the replies: a turn that is refused or fails ends only its own
conversation, and the exit status is 1. Ctrl-C cancels running turns and keeps finished ones, with exit status
130.

Compiled steps are stored for the next start in `--compilation_cache_dir` (empty: not stored).
`--timeline=out.png` plots the pages of both tiers by state over time; it needs matplotlib.

With `--history`, turns that the history holds do not run again: start an interrupted run once more to
continue it. Their output lines are kept, or rewritten with `usage` null. Without it, the output is replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags
from tqdm import tqdm

from pensieve_jax import (
    ContextLengthError,
    InvalidRequestError,
    Output,
    PensieveError,
    SamplingParams,
)
from pensieve_jax.commands.batch import BatchRun
from pensieve_jax.commands.batch_format import error_line, result_line
from pensieve_jax.commands.conversations_file import (
    InputConversation,
    InputFileError,
    InputTurn,
    read_conversations,
)
from pensieve_jax.commands.engine_flags import (
    check_engine_flags,
    define_engine_flags,
    define_history_flag,
    define_sampling_flags,
    engine_config,
    model_limits,
    open_llm,
    sampling_params,
    set_command_defaults,
    shows_progress,
    take_model_word,
)
from pensieve_jax.commands.help import require
from pensieve_jax.commands.interrupts import EXIT_INTERRUPTED, exiting_on_interrupt
from pensieve_jax.commands.launch import EXIT_BAD_INPUT, EXIT_FAILED, Interrupt
from pensieve_jax.commands.timeline import Recorder, check_timeline
from pensieve_jax.commands.turns_file import finished_turns, output_line, partial_path, start_output
from pensieve_jax.commands.usage_tables import summary
from pensieve_jax.commands.words import SMALL_MODEL
from pensieve_jax.decoding.turn_spec import ModelLimits, check_params
from pensieve_jax.engine.validation import check_turns
from pensieve_jax.history.postgres_location import is_postgres
from pensieve_jax.model_source import DEFAULT_MODEL
from pensieve_jax.prompts import PromptEncoder

if TYPE_CHECKING:  # it imports JAX
    from pensieve_jax import LLM

FLAGS = flags.FLAGS
flags.disclaim_key_flags()


def check_paths(source: Path, output: Path, history: str | None) -> None:
    """Raise InvalidRequestError for an output that would overwrite another file, or cannot be written."""
    directory = output.parent
    if not directory.is_dir():
        raise InvalidRequestError("--output", str(output), "in an existing directory")
    if output.exists() and not output.is_file():
        raise InvalidRequestError("--output", str(output), "a file")
    if not os.access(directory, os.W_OK):
        raise InvalidRequestError("--output", str(output), "in a directory that this user may write to")
    others = {"--input": source} | (
        {} if history is None or is_postgres(history) else {"--history": Path(history)}
    )
    for name, other in others.items():
        # Compare paths, too, since the history may not exist yet.
        if output.resolve() == other.resolve() or (
            output.exists() and other.exists() and output.samefile(other)
        ):
            raise InvalidRequestError("--output", str(output), f"another file than {name}")
    if partial_path(output).resolve() == source.resolve():
        raise InvalidRequestError(
            "--input", str(source), "another file", "the output is first written under this name"
        )


def as_served(conversations: Sequence[InputConversation], llm: LLM) -> Sequence[InputConversation]:
    """Return the conversations with lines of plain text as text, if the model has no chat template."""
    if llm.tokenizer is None or llm.tokenizer.chat_template is not None:
        return conversations
    return [
        dataclasses.replace(
            one,
            turns=tuple(
                turn if turn.text is None else dataclasses.replace(turn, prompt=turn.text)
                for turn in one.turns
            ),
        )
        for one in conversations
    ]


def check_prompts(
    conversations: Sequence[InputConversation], path: str, check: Callable[[InputTurn, int], None]
) -> None:
    """Call `check` with every turn and its index; raise one InputFileError for all its PensieveErrors."""
    problems = []
    for conversation in conversations:
        for index, turn in enumerate(conversation.turns):
            try:
                check(turn, index)
            except PensieveError as error:
                problems.append((conversation.line_number, f"{place(conversation, index)}{error}"))
    if problems:
        raise InputFileError(path, problems)


def place(conversation: InputConversation, index: int) -> str:
    """Return the beginning of an error of a turn: its place in its line, if the line lists turns."""
    return "" if conversation.is_single else f"turns[{index}]: "


def check_default_params(params: SamplingParams, limits: ModelLimits) -> None:
    """Raise InvalidRequestError, which names the flag, for sampling flags that are invalid for every turn."""
    try:
        check_params(dataclasses.replace(params, stop=(), structured=None), limits, None, group="--")
    except InvalidRequestError as error:
        if error.field not in FLAGS:
            raise
        raise InvalidRequestError(f"--{error.field}", error.value, error.limit, error.hint) from error


def check_ids(limits: ModelLimits, turn: InputTurn, index: int) -> None:
    """Raise a PensieveError for ids, lengths and parameters, which need no tokenizer."""
    # Stop strings and structured output need a tokenizer and are checked later.
    check_params(dataclasses.replace(turn.params, stop=(), structured=None), limits, None, group="--")
    if isinstance(turn.prompt, list):
        for token_id in turn.prompt:
            if not 0 <= token_id < limits.vocab_size:
                raise InvalidRequestError("prompt", token_id, f"ids from 0 to {limits.vocab_size - 1}")
        if len(turn.prompt) >= limits.max_context_tokens:
            limit = f"fewer ids than the {limits.max_context_tokens} tokens of the context"
            raise ContextLengthError("prompt", f"{len(turn.prompt)} ids", limit)


def check_text(llm: LLM, encoder: PromptEncoder, turn: InputTurn, index: int) -> None:
    """Raise a PensieveError for text and messages, which need the tokenizer; check first turns completely."""
    check_params(turn.params, llm.engine.limits, llm.tokenizer, group="--")
    if not isinstance(turn.prompt, list):
        if llm.tokenizer is None:
            raise InvalidRequestError("prompt", turn.prompt, "token ids", "the model has no tokenizer")
        if turn.is_chat and llm.tokenizer.chat_template is None:
            raise InvalidRequestError("messages", turn.prompt, "a prompt", "the model has no chat template")
    if index == 0:
        spec = encoder.turn(turn.prompt, turn.params)
        check_turns([spec], llm.engine.limits, llm.engine.conversations, llm.tokenizer)
    elif isinstance(turn.prompt, str):
        assert llm.tokenizer is not None
        count = len(llm.tokenizer.encode(turn.prompt, add_bos=False))
        room = llm.engine.limits.max_context_tokens
        if count >= room:
            raise ContextLengthError(
                "prompt", f"{count} tokens", f"fewer than the {room} tokens of the context"
            )


def generate(llm: LLM, conversations: Sequence[InputConversation], output: Path, concurrency: int) -> int:
    """Run all remaining turns; return the exit status."""
    conversations, model = as_served(conversations, llm), model_name()
    encoder = PromptEncoder(llm.tokenizer, lambda: llm.engine.conversations)
    check_prompts(conversations, FLAGS.input, functools.partial(check_text, llm, encoder))
    done = finished_turns(llm, conversations, model)
    start_output(output, done)
    num_done = {key: len(list(group)) for key, group in itertools.groupby(done, key=lambda pair: pair[0])}
    batch = BatchRun(llm, conversations, num_done, concurrency=concurrency)
    before, start_s = llm.stats(), time.perf_counter()
    recorder = Recorder(llm.engine)
    with (
        output.open("ab", buffering=0) as file,  # one write per line, so that no line is partial
        tqdm(total=batch.num_left, desc="turns", unit="turn", disable=not shows_progress()) as bar,
        Interrupt() as interrupt,
    ):

        def ended(conversation: InputConversation, index: int, output: Output) -> None:
            if conversation.url is None:
                line = output_line(conversation.turns[index], index, output)
            else:
                line = result_line(conversation.conversation_id, conversation.url, model, output)
            file.write((json.dumps(line) + "\n").encode())
            bar.update()

        after_step = recorder.after_step if FLAGS.timeline else lambda: None
        batch.run(ended=ended, after_step=after_step, interrupt=interrupt)
        for conversation, _, error in batch.failures:
            if conversation.url is not None:
                line = error_line(conversation.conversation_id, error)
                file.write((json.dumps(line) + "\n").encode())
    seconds = time.perf_counter() - start_s
    print(summary(batch.outputs, len(done), seconds, before, llm.stats()))
    if FLAGS.timeline:
        recorder.draw(FLAGS.timeline)
    for conversation, index, error in batch.failures:
        line_number, where = conversation.line_number, place(conversation, index)
        print(f"{FLAGS.input}:{line_number}: {where}{error}", file=sys.stderr)
    if interrupt.requested:
        print(f"interrupted: {len(batch.outputs)} turns are in {output}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_FAILED if batch.failures else 0


def model_name() -> str:
    """Return the model's name in requests and results of OpenAI's batch format."""
    return FLAGS.served_model_name or FLAGS.model


def main() -> int:
    """Run every turn of the input; return the exit status."""
    if FLAGS.concurrency < 1:
        raise InvalidRequestError("--concurrency", FLAGS.concurrency, "at least 1")
    runner = engine_config().runner
    try:
        with exiting_on_interrupt():
            output = Path(FLAGS.output)
            check_paths(Path(FLAGS.input), output, FLAGS.history)
            history = output if is_postgres(FLAGS.history) else Path(FLAGS.history or output)
            check_timeline(FLAGS.timeline, others=[Path(FLAGS.input), output, history])
            params = dataclasses.replace(sampling_params(), logprobs=FLAGS.logprobs)
            try:
                conversations = read_conversations(FLAGS.input, params, model_name())
            except OSError as error:
                raise InvalidRequestError(
                    "--input",
                    FLAGS.input,
                    "a file of conversations that can be read",
                    error.strerror or str(error),
                ) from error
            if FLAGS.logprobs is not None and any(one.url is not None for one in conversations):
                limit = "left out beside requests of OpenAI's batch format: results have no place for it"
                raise InvalidRequestError("--logprobs", FLAGS.logprobs, limit)
            check_engine_flags()
            model, max_context_tokens = model_limits()
            limits = ModelLimits(
                model.vocab_size,
                max_context_tokens,
                model.eos_token_ids,
                runner.max_logprobs,
                runner.max_banned_ids,
                runner.penalties,
            )
            check_default_params(params, limits)
            check_prompts(conversations, FLAGS.input, functools.partial(check_ids, limits))
            if FLAGS.model == DEFAULT_MODEL:
                print(SMALL_MODEL, file=sys.stderr)
            opened = open_llm(history=FLAGS.history)
        with opened as llm:
            return generate(llm, conversations, output, FLAGS.concurrency)
    except BrokenPipeError:
        raise  # the reader of stdout has gone; not an error of a file
    except (InputFileError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def define_flags() -> None:
    """Define the command-line flags of `pensieve generate`."""
    flags.DEFINE_string("input", None, "JSON lines of conversations, or lines of text (.gz too).")
    flags.DEFINE_string("output", None, "JSON lines of turns.")
    require("input", "output")
    flags.DEFINE_string(
        "served_model_name", None, "Model name in requests of OpenAI's batch format; default: the model."
    )
    flags.DEFINE_integer("concurrency", 64, "Most conversations in progress at once.")
    flags.DEFINE_integer("logprobs", None, "Write logprobs of the chosen tokens and of this many others.")
    flags.DEFINE_string("timeline", None, "Plot of pages by state over time: .png, .svg or .pdf.")
    define_engine_flags()
    set_command_defaults()
    take_model_word()
    define_history_flag()
    define_sampling_flags(max_tokens=64)
