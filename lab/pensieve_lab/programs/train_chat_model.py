"""Trains the small chat model, a Llama with its own tokenizer, on dialogues and on facts to remember.

    python -m pensieve_lab.programs.train_chat_model --work_dir=chat-model \\
        --task_dialogues=sgd_train.jsonl.gz \\
        --assistant_dialogues=oasst_seed.jsonl.gz --dev_dialogues=sgd_dev.jsonl.gz

On one H200 the defaults take a few minutes. The dialogue files are JSON lines of {"turns": [["U", text],
["S", text], ...]}; any letter but U is the assistant. The program learns a byte-level BPE vocabulary from
them and from generated conversations in which facts are told and later asked for. It trains the project's own
Llama, with the forward pass that serves it, on the token ids that `LLM.chat` sends. Recorded dialogues are
used a few times only, since a model of this size would memorize them; every conversation around facts is a
new one.

`--work_dir` gets
  model/         a Hugging Face directory, for `LLM(...)` and every other reader of that format
  checkpoints/   Orbax; the same command resumes from the newest, and names any flag that differs
  settings.json  the flags of the training

During training and at its end, the program measures whether history matters. It measures the loss of
recorded replies from the fourth turn on, and recall of facts whose values and sentences training never saw
(once in constructions that it knows, twice in new ones; see lab/docs/chat_model.md). Each is measured with
the history and without. The last line is one JSON document (see `--json`).

The data, its order and the first weights follow from `--seed`. On a CPU the result does too, to the bit; on a
GPU sums of gradients may come in any order unless XLA_FLAGS=--xla_gpu_deterministic_ops=true.
Exit status 130: interrupted by Ctrl-C, with a checkpoint.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optax
import tokenizers
from absl import flags
from tqdm import tqdm

from model_defs import ModelConfig, num_parameters
from pensieve_jax import ConfigError
from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_jax.commands.help import require
from pensieve_jax.commands.interrupts import EXIT_INTERRUPTED
from pensieve_jax.commands.launch import Interrupt, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.text import Tokenizer, load_tokenizer
from pensieve_lab.chat_training.checkpoints import Checkpoints, has_training, record_settings
from pensieve_lab.chat_training.corpus import Corpus, Weights, vocabulary_texts
from pensieve_lab.chat_training.data import Conversation, read_dialogues
from pensieve_lab.chat_training.evaluation import FIRST_TURN, Evaluation, Figures
from pensieve_lab.chat_training.examples import ConversationEncoder
from pensieve_lab.chat_training.export import export_model
from pensieve_lab.chat_training.feed import Feed
from pensieve_lab.chat_training.loop import Schedule, TrainingResult, train
from pensieve_lab.chat_training.recall_cases import BETWEEN, recall_cases
from pensieve_lab.chat_training.step import Network, Parameters, TrainState, make_optimizer
from pensieve_lab.chat_training.tokenizer import FILES, MIN_VOCAB_SIZE, learn_tokenizer, save_tokenizer
from pensieve_lab.chat_training.wordings import Wordings

FLAGS = flags.FLAGS
HEAD_DIM = 64
_INITIAL_DEVIATION = 0.04  # of weights; the usual 0.02 suits models several times as wide
_MAX_FEED_WORKERS = 6  # two keep up with an H200 on otherwise idle cores
_SETS = {
    "new sentences": Wordings.NEW_SENTENCES,
    "new constructions": Wordings.NEW_CONSTRUCTIONS,
    "test constructions": Wordings.TEST_CONSTRUCTIONS,
}
_UNRECORDED_FLAGS = (
    *("work_dir", "progress", "feed_workers", "json"),
    *("log_steps", "checkpoint_steps", "evaluation_steps"),
)
_UNITS = {
    "history_loss": f"nats per token of recorded replies from turn {FIRST_TURN} on",
    "history_reduction_percent": "reduction of the loss by the history",
    "recall_percent": f"greedy answers with the fact, told {BETWEEN[0]} to {BETWEEN[1]} turns before; for "
    "new sentences, new constructions (built as none of training is), and those of the test",
    "recall_by_kind": "with the history: [percent, number of cases] of each kind of question",
    "tokens_per_s": "training tokens per second without padding; median of the log lines",
    "weights_bytes": "size of model.safetensors",
    "seconds": "from the start of this process to the end of the last evaluation",
}


class Dialogues(NamedTuple):
    """Recorded dialogues of each file."""

    tasks: list[Conversation]
    assistants: list[Conversation]
    dev: list[Conversation]


def read_files() -> Dialogues:
    """Read the dialogue files; raises ConfigError naming the flag of a file that cannot be used."""
    names = ("task_dialogues", "assistant_dialogues", "dev_dialogues")
    return Dialogues(*(read_dialogues(f"--{name}", getattr(FLAGS, name)) for name in names))


def make_tokenizer(directory: Path, dialogues: Dialogues, *, is_there: bool) -> Tokenizer:
    """Load the tokenizer of an interrupted training, or learn a new one, as the engine reads it.

    Raises ConfigError naming --work_dir if an interrupted training has lost it.
    """
    missing = [name for name in FILES if not (directory / name).is_file()]
    if is_there and missing:
        hint = "the training there cannot resume without its tokenizer; use an empty directory"
        raise ConfigError("--work_dir", FLAGS.work_dir, f"one that has model/{missing[0]}", hint)
    if not is_there:
        texts = vocabulary_texts(dialogues.tasks, dialogues.assistants)
        backend: tokenizers.Tokenizer = learn_tokenizer(texts, FLAGS.vocab_size)
        save_tokenizer(backend, directory, FLAGS.context_tokens)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


def model_config(tokenizer: Tokenizer) -> ModelConfig:
    """Return the configuration of the flags' model; raises UnsupportedModelError."""
    assert tokenizer.eos_id is not None
    return ModelConfig(
        architecture="llama",
        num_layers=FLAGS.num_layers,
        hidden_size=FLAGS.hidden_size,
        num_heads=FLAGS.num_heads,
        num_kv_heads=FLAGS.num_kv_heads,
        head_dim=HEAD_DIM,
        intermediate_size=FLAGS.intermediate_size,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=FLAGS.context_tokens,
        bos_token_id=tokenizer.bos_id,
        eos_token_ids=(tokenizer.eos_id,),
        tie_word_embeddings=True,
        dtype="bfloat16",
        initializer_range=_INITIAL_DEVIATION,
    )


def make_feed(tokenizer: Tokenizer, dialogues: Dialogues) -> Feed:
    """Make the training data; raises ConfigError."""
    encoder = ConversationEncoder(tokenizer, user_weight=FLAGS.user_weight)
    weights = Weights(fact=FLAGS.fact_weight, talk=FLAGS.talk_weight)
    corpus = Corpus(encoder, dialogues.tasks, dialogues.assistants, weights)
    num_all = len(dialogues.tasks) + len(dialogues.assistants)
    hidden = not shows_progress()
    recorded = list(tqdm(corpus.recorded(FLAGS.seed), "encoding", num_all, unit="dialogue", disable=hidden))
    num_tokens = sum(len(example.token_ids) for example in recorded)
    num_epochs = FLAGS.num_steps * FLAGS.recorded_per_step / len(recorded)
    print(f"{len(recorded):,} dialogues of {num_tokens:,} tokens, {num_epochs:.1f} times each")
    return Feed(
        recorded,
        corpus.fresh,
        recorded_per_step=FLAGS.recorded_per_step,
        num_rows=FLAGS.num_rows,
        row_len=FLAGS.context_tokens,
        seed=FLAGS.seed,
    )


def make_evaluation(network: Network, tokenizer: Tokenizer, dialogues: Sequence[Conversation]) -> Evaluation:
    """Make the evaluation on dialogues, and facts told among them, that are not trained on."""
    cases = {
        name: recall_cases(FLAGS.num_recall_cases, dialogues, FLAGS.seed, wordings)
        for name, wordings in _SETS.items()
    }
    size = {"num_rows": FLAGS.num_rows, "row_len": FLAGS.context_tokens}
    return Evaluation(network, tokenizer, dialogues, cases, **size)


def train_by_flags(
    directory: Path,
    network: Network,
    optimizer: optax.GradientTransformation,
    config: ModelConfig,
    feed: Feed,
    evaluation: Evaluation,
) -> TrainingResult:
    """Train until the last step or Ctrl-C."""

    def evaluate(num_steps: int, parameters: Parameters) -> None:
        show(num_steps, evaluation(parameters))

    with Checkpoints(directory) as checkpoints, Interrupt() as interrupt:
        return train(
            feed,
            network,
            optimizer,
            TrainState.first(config, FLAGS.seed, optimizer),
            checkpoints,
            Schedule(
                num_steps=FLAGS.num_steps,
                log_steps=FLAGS.log_steps,
                checkpoint_steps=FLAGS.checkpoint_steps,
                evaluation_steps=FLAGS.evaluation_steps,
            ),
            num_workers=FLAGS.feed_workers,
            evaluate=evaluate,
            stopping=interrupt,
            progress=shows_progress(),
        )


def show(num_steps: int, figures: Figures) -> None:
    """Print a table of the measured figures."""
    compared = [figures.history_loss, *figures.recall_percent.values()]
    rows = [
        ["with history", *(one.with_history for one in compared)],
        ["without", *(one.without_history for one in compared)],
    ]
    columns = ["", "loss per token", *(f"recall of {name} %" for name in figures.recall_percent)]
    print(f"after step {num_steps}:\n{table(columns, rows)}")
    kinds = sorted({kind for some in figures.by_kind.values() for kind in some})
    rows = [[kind, *(some.get(kind, ("",))[0] for some in figures.by_kind.values())] for kind in kinds]
    print(table(["asked for", *figures.by_kind], rows), flush=True)


def report(
    trained: TrainingResult, figures: Figures, config: ModelConfig, weights_bytes: int, began: float
) -> str:
    """Return the JSON line."""
    rates = sorted(rate for _, _, rate in trained.log)
    loss = figures.history_loss
    results = {
        "history_loss": loss._asdict(),
        "history_reduction_percent": 100 * (1 - loss.with_history / loss.without_history),
        "recall_percent": {name: one._asdict() for name, one in figures.recall_percent.items()},
        "recall_by_kind": figures.by_kind,
        "seed": FLAGS.seed,
        "num_steps": trained.num_steps,
        "num_parameters": num_parameters(config),
        "weights_bytes": weights_bytes,
        "training_loss": trained.log[-1][1] if trained.log else None,
        "tokens_per_s": rates[len(rates) // 2] if rates else None,
        "seconds": time.perf_counter() - began,
    }
    return json_line("train_chat_model", results, units=_UNITS, device=device_name())


def recorded_flags() -> dict[str, Any]:
    """Return the flags that identify a training."""
    return {
        flag.name: flag.value
        for flag in FLAGS.get_key_flags_for_module(sys.modules[__name__])
        if flag.name not in _UNRECORDED_FLAGS
    }


def main() -> int:
    began = time.perf_counter()
    directory = Path(FLAGS.work_dir)
    optimizer = make_optimizer(
        learning_rate=FLAGS.learning_rate,
        warmup_steps=FLAGS.warmup_steps,
        num_steps=FLAGS.num_steps,
        weight_decay=FLAGS.weight_decay,
    )
    dialogues = read_files()
    model_directory = directory / "model"
    try:
        model_directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "--work_dir", str(directory), "a directory that can be written", str(error)
        ) from error
    tokenizer = make_tokenizer(model_directory, dialogues, is_there=has_training(directory, recorded_flags()))
    config = model_config(tokenizer)
    network = Network.of(config, FLAGS.dtype)
    evaluation = make_evaluation(network, tokenizer, dialogues.dev)
    feed = make_feed(tokenizer, dialogues)
    print(f"{num_parameters(config):,} parameters; ready to train after {time.perf_counter() - began:.0f} s")
    sys.stdout.flush()
    record_settings(directory, recorded_flags())  # only now, so that refused flags can be corrected
    trained = train_by_flags(directory, network, optimizer, config, feed, evaluation)
    if trained.num_steps < FLAGS.num_steps:
        print(f"interrupted after step {trained.num_steps}; the same command resumes it", file=sys.stderr)
        return EXIT_INTERRUPTED
    weights_bytes = export_model(model_directory, config, trained.state.parameters)
    figures = evaluation(trained.state.parameters)
    show(trained.num_steps, figures)
    print_document(report(trained, figures, config, weights_bytes, began))
    return 0


def define_flags() -> None:
    flags.DEFINE_string("work_dir", None, "Directory of the training; made if missing.")
    flags.DEFINE_string("task_dialogues", None, "Dialogues to train on (JSON lines, .gz).")
    flags.DEFINE_string("assistant_dialogues", None, "More dialogues to train on, of another kind.")
    flags.DEFINE_string("dev_dialogues", None, "Dialogues to evaluate on.")
    require("work_dir", "task_dialogues", "assistant_dialogues", "dev_dialogues")
    _define_model_flags()
    _define_training_flags()
    flags.DEFINE_integer("num_recall_cases", 512, "Questions of each recall test.", lower_bound=1)
    flags.DEFINE_integer("log_steps", 50, "Steps between lines, or updates of the bar.", lower_bound=1)
    flags.DEFINE_integer("checkpoint_steps", 500, "Steps between checkpoints.", lower_bound=1)
    flags.DEFINE_integer(
        "evaluation_steps", 1000, "Steps between evaluations; one follows at the end.", lower_bound=1
    )
    flags.DEFINE_integer(
        "feed_workers",
        min(_MAX_FEED_WORKERS, (os.cpu_count() or 1) // 2),
        "Processes that make batches; 0 makes them in this one.",
        lower_bound=0,
    )
    flags.DEFINE_bool("progress", None, "Show progress bars; default: on a terminal.")
    define_document_flag()


def _define_model_flags() -> None:
    flags.DEFINE_integer("num_layers", 6, "Layers.", lower_bound=1)
    flags.DEFINE_integer("hidden_size", 256, "Width.", lower_bound=1)
    flags.DEFINE_integer("num_heads", 4, f"Query heads of {HEAD_DIM} dimensions.", lower_bound=1)
    flags.DEFINE_integer("num_kv_heads", 2, "Key and value heads.", lower_bound=1)
    flags.DEFINE_integer("intermediate_size", 704, "Width of the MLP.", lower_bound=1)
    flags.DEFINE_integer(
        "vocab_size", 4096, "Maximum vocabulary size of the tokenizer.", lower_bound=MIN_VOCAB_SIZE
    )
    flags.DEFINE_integer("context_tokens", 1024, "Positions, and the length of a row.", lower_bound=2)


def _define_training_flags() -> None:
    flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Data type of the model's computation.")
    flags.DEFINE_integer("seed", 0, "Seed of data, order and first weights.", lower_bound=0)
    flags.DEFINE_integer("num_steps", 4000, "Training steps.", lower_bound=1)
    flags.DEFINE_integer("num_rows", 64, "Rows of a batch.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 2e-3, "The highest.", lower_bound=0.0)
    flags.DEFINE_integer("warmup_steps", 100, "Steps until then.", lower_bound=0)
    flags.DEFINE_float(
        "weight_decay", 0.3, "Weight decay of AdamW; prevents memorizing dialogues.", lower_bound=0.0
    )
    flags.DEFINE_integer(
        "recorded_per_step",
        18,
        "Recorded dialogues per step; facts and talk around them fill the rest.",
        lower_bound=0,
    )
    flags.DEFINE_float("fact_weight", 2.0, "Loss weight of replies about facts.", lower_bound=0.0)
    flags.DEFINE_float("talk_weight", 0.05, "Loss weight of talk around facts.", lower_bound=0.0)
    flags.DEFINE_float("user_weight", 0.1, "Loss weight of prompt tokens.", lower_bound=0.0)


if __name__ == "__main__":
    define_flags()
    run(main)
