"""The chat model's training: steps, measurements, and that LLM serves the result."""

import json
import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lab.tests.chat_training.dialogues import VOCAB_SIZE, dialogue, write_dialogues
from model_defs import load_config, load_model, make_mesh
from model_defs.parameters import named_parameters
from pensieve_jax import LLM, CacheConfig, ConfigError, EngineConfig, SamplingParams, SchedulerConfig
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.text import load_tokenizer
from pensieve_lab.chat_training.checkpoints import Checkpoints, has_training, record_settings
from pensieve_lab.chat_training.evaluation import FIRST_TURN, Evaluation
from pensieve_lab.chat_training.examples import ConversationEncoder
from pensieve_lab.chat_training.export import export_model
from pensieve_lab.chat_training.feed import Feed
from pensieve_lab.chat_training.loop import Schedule, TrainingDivergedError, train
from pensieve_lab.chat_training.recall_cases import QuestionKind, recall_case
from pensieve_lab.chat_training.step import TrainState, greedy_tokens, train_step
from pensieve_lab.chat_training.tokenizer import FILES
from pensieve_lab.chat_training.wordings import Wordings


@pytest.fixture
def run_training(feed, network, config, optimizer):
    """Train to `num_steps` in a directory; `stop_after` asks for a stop after an even number of steps."""

    def run_training(directory, num_steps, *, stop_after=None, state=None):
        stopping = SimpleNamespace(requested=False)

        def evaluate(step, parameters):
            stopping.requested = step == stop_after

        with Checkpoints(directory) as checkpoints:
            return train(
                feed,
                network,
                optimizer,
                state or TrainState.first(config, 0, optimizer),
                checkpoints,
                Schedule(num_steps, log_steps=10, checkpoint_steps=100, evaluation_steps=2),
                evaluate=evaluate,
                num_workers=0,
                stopping=stopping,
                progress=False,
            )

    return run_training


@pytest.fixture(scope="module")
def feed(encoder, talks):
    """Make a feed of only eight dialogues."""
    examples = [encoder.encode(talk, [1.0] * len(talk.exchanges)) for talk in talks]
    size = {"recorded_per_step": 0, "num_rows": 2, "row_len": 128, "seed": 0}
    return Feed(examples, lambda rng: rng.choice(examples), **size)


@pytest.mark.long
def test_a_training_that_was_interrupted_ends_as_if_it_had_not_been(run_training, tmp_path):
    straight = run_training(tmp_path / "straight", 4)
    first = run_training(tmp_path / "resumed", 4, stop_after=2)
    assert (straight.num_steps, first.num_steps) == (4, 2)
    resumed = run_training(tmp_path / "resumed", 4)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, straight.state)
    assert not np.array_equal(*(one.state.parameters["embed.table"] for one in (first, straight)))


@pytest.mark.long
def test_the_loss_falls_and_the_step_is_compiled_once(run_training, tmp_path):
    num_compiled = train_step._cache_size()
    log = run_training(tmp_path, 40).log
    assert log[-1][1] < 0.5 * log[0][1]
    assert train_step._cache_size() <= max(num_compiled, 1)


def test_a_training_that_diverges_says_so_and_keeps_no_checkpoint(run_training, config, optimizer, tmp_path):
    state = TrainState.first(config, 0, optimizer)
    broken = {name: value * np.nan for name, value in state.parameters.items()}
    with pytest.raises(TrainingDivergedError, match="--learning_rate"):
        run_training(tmp_path, 4, state=state._replace(parameters=broken))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.last_step == 0


def test_other_settings_than_those_of_the_training_are_refused(tmp_path):
    settings = {"seed": 1, "num_steps": 5}
    assert not has_training(tmp_path, settings)
    record_settings(tmp_path, settings)
    assert has_training(tmp_path, settings)
    with pytest.raises(ConfigError, match="--num_steps is 6, but must be 5"):
        has_training(tmp_path, settings | {"num_steps": 6})


@pytest.mark.parametrize("text", ["{", "[1]", "null"])
def test_a_directory_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "settings.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="--work_dir"):
        has_training(tmp_path, {})


# Evaluation


def test_greedy_tokens_are_the_dense_reference_s(network, parameters, config):
    prompts = [[0, 3, 70, 71, 1, 4], [0, 3, 90, 1, 4]]
    token_ids, lengths = np.zeros((2, 16), np.int32), np.array([6, 5], np.int32)
    for row, prompt in enumerate(prompts):
        token_ids[row, : len(prompt)] = prompt
    new = np.asarray(greedy_tokens(parameters, token_ids, lengths, network=network, num_new=5))
    reference = DenseReference(network.model(parameters))
    for prompt, ids in zip(prompts, new.tolist(), strict=True):
        logits = reference.logits([*prompt, *ids])
        assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == ids


@pytest.mark.long
def test_the_measurements_see_what_they_should(network, parameters, tokenizer, talks):
    cases = {
        "known": [recall_case(random.Random(3), talks, (3, 3), Wordings.NEW_SENTENCES)],
        "new": [
            recall_case(random.Random(3), talks, (1, 1), Wordings.NEW_CONSTRUCTIONS, kind)
            for kind in (QuestionKind.TWO, QuestionKind.TWO, QuestionKind.CORRECTED_LATER)
        ],
    }
    figures = Evaluation(network, tokenizer, talks, cases, num_rows=4, row_len=448)(parameters)
    assert figures.recall_percent == {"known": (0.0, 0.0), "new": (0.0, 0.0)}  # of random weights
    assert figures.by_kind["new"] == {"corrected later": (0.0, 1), "two at once": (0.0, 2)}
    assert abs(figures.history_loss.with_history - np.log(tokenizer.vocab_size)) < 3
    assert figures.history_loss.with_history != figures.history_loss.without_history
    with pytest.raises(ConfigError, match="--context_tokens"):
        Evaluation(network, tokenizer, talks, cases, num_rows=4, row_len=64)
    with pytest.raises(ConfigError, match="--dev_dialogues"):
        short = [dialogue(0, FIRST_TURN - 1)]
        Evaluation(network, tokenizer, short, cases, num_rows=4, row_len=448)


# The result


def test_what_is_exported_is_the_trained_model(config, network, parameters, tmp_path):
    assert export_model(tmp_path, config, parameters) == (tmp_path / "model.safetensors").stat().st_size
    assert load_config(tmp_path).to_json() == config.to_json()
    loaded = load_model(tmp_path, dtype="float32", mesh=make_mesh(1))
    for name, parameter in named_parameters(loaded):
        rounded = parameters[name].astype("bfloat16").astype("float32")
        np.testing.assert_array_equal(parameter.get_value(), rounded, err_msg=name)
    ids = [0, 3, 70, 71, 72, 1, 4]
    trained = DenseReference(network.model(parameters)).logits(ids)
    np.testing.assert_allclose(DenseReference(loaded).logits(ids), trained, atol=0.02 * np.abs(trained).max())


@pytest.fixture
def train_tiny(launch, tmp_path, talks):
    """Run the program for a tiny model in `tmp_path / "work"`, with additional flags by name."""
    dialogues = write_dialogues(tmp_path / "talk.jsonl", talks)
    model = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
    sizes = {"vocab_size": VOCAB_SIZE, "context_tokens": 640, "num_rows": 2, "recorded_per_step": 2}
    steps = {"num_steps": 2, "warmup_steps": 1, "feed_workers": 0, "num_recall_cases": 2, "dtype": "float32"}
    files = dict.fromkeys(("task_dialogues", "assistant_dialogues", "dev_dialogues"), dialogues)
    flags = {**model, **sizes, **steps, **files, "work_dir": tmp_path / "work"}
    return lambda **more: launch("train_chat_model", shared_llm=False, **flags | more)


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [("warmup_steps", 2, "below --num_steps, which is 2"), ("recorded_per_step", 1000, "at most")],
)
def test_a_flag_that_is_refused_may_be_corrected(train_tiny, tmp_path, flag, value, limit):
    with pytest.raises(ConfigError, match=f"--{flag} is {value}, but must be {limit}"):
        train_tiny(**{flag: value})
    assert not (tmp_path / "work" / "settings.json").exists()  # which would bind the next command


@pytest.mark.long
def test_the_script_makes_a_model_that_llm_serves_as_it_was_trained(train_tiny, tmp_path, capsys):
    assert train_tiny() == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert train_tiny() == 0  # goes on from the end
    again = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert again["history_loss"] == first["history_loss"]
    assert (again["training_loss"], first["num_steps"]) == (None, 2)
    sets = {"new sentences", "new constructions", "test constructions"}
    assert first["recall_percent"].keys() == first["recall_by_kind"].keys() == sets
    with pytest.raises(ConfigError, match="--learning_rate"):
        train_tiny(learning_rate=0.5)
    check_served(tmp_path / "work" / "model")


@pytest.mark.long
def test_a_training_that_lost_its_tokenizer_does_not_go_on_with_another(train_tiny, tmp_path):
    assert train_tiny(num_steps=3) == 0
    assert {path.name for path in (tmp_path / "work" / "model").iterdir()} > {*FILES, "model.safetensors"}
    for name in FILES:
        lost = (tmp_path / "work" / "model" / name).rename(tmp_path / name)
        with pytest.raises(ConfigError, match=f"--work_dir is .*model/{name}"):
            train_tiny(num_steps=3)
        lost.rename(tmp_path / "work" / "model" / name)


def check_served(model):
    """Check that chat sends the ids that training made of the same messages."""
    encoder = ConversationEncoder(load_tokenizer(model), user_weight=0.0)
    scheduler = SchedulerConfig(max_num_running=2, max_num_batched_tokens=64, token_buckets=(64,))
    engine = EngineConfig(cache=CacheConfig(gpu_pages=16), scheduler=scheduler)
    with LLM(model, dtype="float32", config=engine, progress=False) as llm:
        messages = ["I am Ada. My room number is 1024.", "Any pizza?", "What's my name?"]
        for message in messages:
            params = SamplingParams(max_tokens=6, ignore_eos=False)
            llm.chat([{"role": "user", "content": message}], params, conversation_id="ada")
        turns, end_id = llm.history("ada").turns, llm.tokenizer.eos_id
    for index, (message, turn) in enumerate(zip(messages, turns, strict=True)):
        cut = index > 0 and turns[index - 1].output_token_ids[-1] != end_id
        closing = (end_id,) if cut else ()  # of a reply that the limit cut, where training has none
        assert tuple(turn.prompt_token_ids) == (
            *closing,
            *encoder.turn_ids(message, is_first=index == 0),
        )
