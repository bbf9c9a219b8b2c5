"""The chat model's training: its data, its rows, its steps, and that LLM serves what comes out."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from common.chat_training.checkpoints import Checkpoints, has_training, record_settings
from common.chat_training.corpus import Corpus, Weights, vocabulary_texts
from common.chat_training.data import Conversation, Exchange, read_dialogues
from common.chat_training.evaluation import FIRST_TURN, Evaluation
from common.chat_training.examples import ConversationEncoder, Example, all_batches
from common.chat_training.export import export_model
from common.chat_training.facts import held_out_wordings, training_wordings
from common.chat_training.feed import Feed
from common.chat_training.kinds import KINDS
from common.chat_training.loop import Schedule, TrainingDivergedError, train
from common.chat_training.recall import Role, holds, recall_case, recall_conversation
from common.chat_training.step import (
    Network,
    TrainState,
    greedy_tokens,
    hidden_states,
    make_optimizer,
    train_step,
)
from common.chat_training.tokenizer import MARKERS, learn_tokenizer, save_tokenizer
from common.chat_training.values import is_held_out

from model_defs import ModelConfig, load_config, load_model, make_mesh
from model_defs.parameters import named_parameters
from pensieve_jax import LLM, CacheConfig, ConfigError, EngineConfig, SamplingParams, SchedulerConfig
from pensieve_jax.engine.dense_reference import DenseReference
from pensieve_jax.text import ChatFormat, EarlierTurn, load_tokenizer

FOODS = ("pizza", "sushi", "curry", "tacos", "soup", "salad")
VOCAB_SIZE = 400


def dialogue(number: int, num_exchanges: int = 5) -> Conversation:
    foods = [FOODS[(number + i) % len(FOODS)] for i in range(num_exchanges)]
    return Conversation(
        tuple(Exchange(f"Can you find me some {food}, please?", f"I found {food} nearby.") for food in foods)
    )


def write_dialogues(path, dialogues, speaker="S"):
    lines = [
        {"turns": [turn for user, reply in one.exchanges for turn in (["U", user], [speaker, reply])]}
        for one in dialogues
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def talks():
    return [dialogue(number) for number in range(8)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory, talks):
    """A model directory with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(learn_tokenizer(vocabulary_texts(talks, []), VOCAB_SIZE), path, 256)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return ConversationEncoder(tokenizer, user_weight=0.25)


@pytest.fixture(scope="module")
def config(tokenizer):
    return ModelConfig(
        architecture="llama",
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=48,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_id,
        eos_token_ids=(tokenizer.eos_id,),
        tie_word_embeddings=True,
        initializer_range=0.2,
    )


@pytest.fixture(scope="module")
def network(config):
    return Network.of(config, "float32")


@pytest.fixture(scope="module")
def optimizer():
    """One for all tests: a step is compiled for its optimizer."""
    return make_optimizer(learning_rate=1e-2, warmup_steps=2, num_steps=40, weight_decay=0.1)


@pytest.fixture(scope="module")
def parameters(config, optimizer):
    return TrainState.first(config, 0, optimizer).parameters


# Files


def test_messages_of_one_speaker_in_a_row_are_one_and_ends_without_an_answer_are_left_out(tmp_path):
    path = tmp_path / "talk.jsonl"
    turns = [["A", "Welcome"], ["U", "Hi"], ["U", "there "], ["A", "Hello"], ["U", "Bye"]]
    path.write_text(f"{json.dumps({'turns': turns})}\n\n", encoding="utf-8")
    assert read_dialogues("--x", str(path)) == [Conversation((Exchange("Hi\nthere", "Hello"),))]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON|Expecting"),
        ('{"turns": [["U"]]}', "line 1"),
        ('{"turns": [["U", "Hi"]]}', "at least one dialogue"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_with_its_flag(tmp_path, text, says):
    path = tmp_path / "talk.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as caught:
        read_dialogues("--task_dialogues", str(path))
    assert caught.value.field == "--task_dialogues"


# Tokens


@pytest.mark.parametrize("text", ["Ada's train: 4:15 pm!", "  two\n\nlines ", "Zoë 寿司 🚆", "a" * 50])
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


def test_markers_are_special_and_every_digit_is_a_token(tokenizer):
    assert [tokenizer.token_text(i) for i in range(len(MARKERS))] == list(MARKERS)
    assert tokenizer.special_ids == set(range(len(MARKERS)))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("1024", add_bos=False)] == list("1024")
    assert 261 < tokenizer.vocab_size <= VOCAB_SIZE


def chat_ids(tokenizer, conversation):
    """What a conversation is in the engine: for each turn what `chat` sends, then the reply and its end."""
    chat_format, ids, earlier = ChatFormat(tokenizer), [], []
    for index, (user, reply) in enumerate(conversation.exchanges):
        messages = [{"role": "user", "content": user}]
        if index == 0 and conversation.system is not None:
            messages.insert(0, {"role": "system", "content": conversation.system})
        ids += chat_format.turn_token_ids(earlier, messages)
        output = [*tokenizer.encode_after(ids[-1], reply), tokenizer.eos_id]
        earlier.append(EarlierTurn(messages, reply, output, "stop"))
        ids += output
    return ids


@pytest.mark.parametrize("system", [None, "You are brief."])
def test_an_example_is_what_chat_sends_turn_by_turn(tokenizer, encoder, talks, system):
    conversation = recall_conversation(random.Random(0), talks).conversation._replace(system=system)
    example = encoder.encode(conversation, [1.0] * len(conversation.exchanges))
    assert example.token_ids.tolist() == chat_ids(tokenizer, conversation)


def test_replies_and_their_ends_count_and_prompts_count_less(tokenizer, encoder):
    example = encoder.encode(Conversation((Exchange("Hi", "Hello"), Exchange("So", "Yes"))), [1.0, 0.5])
    for weight, reply in ((1.0, "Hello"), (0.5, "Yes")):
        counted = example.token_ids[example.weights == weight]
        assert tokenizer.decode_raw(counted.tolist()) == f"{reply}<|end|>"
    assert set(example.weights) == {1.0, 0.5, 0.25, 0.125}


# Rows


def numbered_examples(*lengths):
    return [Example(np.full(n, i + 1, np.int32), np.ones(n, np.float32)) for i, n in enumerate(lengths)]


def test_rows_hold_every_conversation_once_and_nothing_is_predicted_across_them():
    lengths = (5, 3, 8, 2, 7, 12)
    rows = list(all_batches(numbered_examples(*lengths), num_rows=2, row_len=8))
    ids = np.concatenate([batch.token_ids.ravel() for batch in rows])
    assert np.bincount(ids, minlength=7)[1:].tolist() == [5, 3, 8, 2, 7, 8]  # the last is cut to a row
    for batch in rows:
        inside = (batch.weights > 0).nonzero()
        assert (batch.targets[inside] == batch.token_ids[inside]).all()
        assert (batch.segments[inside] > 0).all()
        starts = np.diff(batch.segments, prepend=0) != 0
        assert (batch.positions[starts] == 0).all()
        assert (batch.weights > 0).sum() == sum(
            n - 1 for n in np.unique_counts(batch.token_ids[batch.segments > 0]).counts
        )


def numbered_feed(seed=3, **sizes):
    """Seven recorded dialogues of 2 to 8 tokens, numbered from 1; fresh conversations are 3 tokens of 99."""
    fresh = Example(np.full(3, 99, np.int32), np.ones(3, np.float32))
    sizes = {"recorded_per_step": 2, "num_rows": 4, "row_len": 8, "seed": seed} | sizes
    return Feed(numbered_examples(*range(2, 9)), lambda rng: fresh, **sizes)


def test_a_batch_depends_on_the_seed_and_the_step_alone(encoder, talks):
    def feed(seed):
        corpus = Corpus(encoder, talks, talks[:2], Weights(2.0, 0.1))
        size = {"recorded_per_step": 3, "num_rows": 4, "row_len": 400, "seed": seed}
        return Feed(list(corpus.recorded(seed)), corpus.fresh, **size)

    straight = list(itertools.islice(feed(3).batches(0), 7))
    with contextlib.closing(feed(3).batches(4, num_workers=1)) as from_another_process:
        resumed = list(itertools.islice(from_another_process, 3))
    for one, other in zip(straight[4:], resumed, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert not np.array_equal(straight[0].token_ids, next(feed(4).batches(0)).token_ids)


def test_an_epoch_holds_every_recorded_dialogue_once_and_fresh_ones_fill_the_rest():
    seen = []
    for batch in itertools.islice(numbered_feed().batches(0), 7):  # two epochs
        ids = batch.token_ids[batch.segments > 0]
        seen += [i for i in np.unique(ids) if i != 99]
        assert ((batch.segments == 0).sum(axis=1) < 3).all()  # no room for another
    assert sorted(seen) == sorted([*range(1, 8)] * 2)


def test_recorded_dialogues_leave_room_for_facts():
    with pytest.raises(ConfigError, match="--recorded_per_step is 4, but must be at most 3"):
        numbered_feed(recorded_per_step=4)


def test_packed_conversations_compute_what_they_do_alone(network, parameters, encoder, talks):
    examples = [
        encoder.encode(Conversation(one.exchanges[:n]), [1.0] * n) for n, one in enumerate(talks[:3], 1)
    ]
    [batch] = all_batches(examples, num_rows=2, row_len=200)
    assert batch.segments.max() > 1

    @jax.jit
    def packed_logits(parameters, batch):
        model = network.model(parameters)
        hidden = hidden_states(model, batch.token_ids, batch.positions, batch.segments)
        return model.compute_logits(hidden).reshape(*batch.token_ids.shape, -1)

    packed = np.asarray(packed_logits(parameters, batch))
    reference = DenseReference(network.model(parameters), min_padded_tokens=256)
    num_compared = 0
    for row, segment in itertools.product(range(2), range(1, 4)):
        where = batch.segments[row] == segment
        if where.any():
            alone = reference.logits(batch.token_ids[row, where])
            np.testing.assert_allclose(packed[row, where], alone, atol=2e-5)
            num_compared += 1
    assert num_compared == len(examples)


# Recall


def test_training_never_tells_held_out_values_in_held_out_words(talks):
    rng = random.Random(1)
    hidden = [
        text for kind in KINDS for every in (kind.asks, kind.tells) for text in held_out_wordings(every)
    ]
    pieces = [max(text.split("{}"), key=len).strip(" .").lower() for text in hidden]
    talked = {exchange for talk in talks for exchange in talk.exchanges}
    replies = {exchange.reply for exchange in talked}
    num_told = 0
    for _ in range(400):
        conversation, roles = recall_conversation(rng, talks)
        told = ""
        for exchange, role in zip(conversation.exchanges, roles, strict=True):
            assert (exchange in talked) == (role is Role.TALK)
            assert (exchange.reply in replies) == (role is not Role.FACT)
            if role is not Role.TALK:
                assert not [piece for piece in pieces if len(piece) > 9 and piece in exchange.user.lower()]
                value = answered_value(exchange.reply)
                if value is not None:
                    assert holds(told, value) and not is_held_out(value)
                    num_told += 1
            told += f" {exchange.user}"
    assert num_told > 400


def answered_value(reply):
    """The value that a reply gives, or None if it gives none."""
    for template in {answer for kind in KINDS for answer in kind.answers}:
        before, _, after = template.partition("{}")
        if reply.startswith(before) and reply.endswith(after):
            return reply[len(before) : len(reply) - len(after)]
    return None


def test_a_test_case_asks_for_a_held_out_fact_told_first(talks):
    rng = random.Random(2)
    kinds = {kind.name: kind for kind in KINDS}
    seen = set()
    for _ in range(300):
        case = recall_case(rng, talks, (3, 6))
        seen.add(case.kind)
        assert is_held_out(case.value)
        assert holds(case.history.exchanges[0].user, case.value)
        assert not holds(case.question, case.value)
        assert 4 <= len(case.history.exchanges) <= 7
        asks = [text.lower() for text in held_out_wordings(kinds[case.kind].asks)]
        assert case.question.lower().endswith(tuple(asks))
    assert seen == kinds.keys()


def test_wordings_are_many_and_none_is_there_twice():
    for kind in KINDS:
        assert all(text.count("{}") == 1 for text in (*kind.tells, *kind.answers))
        for every in (kind.tells, kind.asks):
            assert len(set(every)) == len(every) >= 9
            assert not set(held_out_wordings(every)) & set(training_wordings(every))


def test_replies_count_by_what_they_are_for(encoder, talks):
    corpus = Corpus(encoder, talks, talks[:2], Weights(fact=4.0, talk=0.5))
    assert len(list(corpus.recorded(0))) == 8 + 2
    fresh = [corpus.fresh(random.Random(0)) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *fresh)
    weights = {weight for seed in range(20) for weight in corpus.fresh(random.Random(seed)).weights}
    assert weights == {4.0, 1.0, 0.5, 0.25, 0.125}  # prompts of requests, and of talk; 4 * 0.25 is a reply's


# Training


@pytest.fixture
def run_training(feed, network, config, optimizer):
    """Train to `num_steps` in a directory; `stop_after` asks for an end after so many, an even number."""

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
    """Of eight dialogues alone."""
    examples = [encoder.encode(talk, [1.0] * len(talk.exchanges)) for talk in talks]
    size = {"recorded_per_step": 0, "num_rows": 2, "row_len": 128, "seed": 0}
    return Feed(examples, lambda rng: rng.choice(examples), **size)


def test_a_training_that_was_interrupted_ends_as_if_it_had_not_been(run_training, tmp_path):
    straight = run_training(tmp_path / "straight", 4)
    first = run_training(tmp_path / "resumed", 4, stop_after=2)
    assert (straight.num_steps, first.num_steps) == (4, 2)
    resumed = run_training(tmp_path / "resumed", 4)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, straight.state)
    assert not np.array_equal(*(one.state.parameters["embed.table"] for one in (first, straight)))


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


def test_the_measurements_see_what_they_should(network, parameters, tokenizer, talks):
    cases = [recall_case(random.Random(3), talks, (3, 3)) for _ in range(2)]
    figures = Evaluation(network, tokenizer, talks, cases, num_rows=4, row_len=256)(parameters)
    assert figures.recall_percent == (0.0, 0.0)  # of random weights
    assert abs(figures.history_loss.with_history - np.log(tokenizer.vocab_size)) < 3
    assert figures.history_loss.with_history != figures.history_loss.without_history
    with pytest.raises(ConfigError, match="--context_tokens"):
        Evaluation(network, tokenizer, talks, cases, num_rows=4, row_len=64)
    with pytest.raises(ConfigError, match="--dev_dialogues"):
        short = [dialogue(0, FIRST_TURN - 1)]
        Evaluation(network, tokenizer, short, cases, num_rows=4, row_len=256)


def test_an_answer_holds_a_value_as_words_of_its_own():
    assert holds("Your train leaves at 4:15 pm.", "4:15 pm") and holds("You are Ada.", "Ada")
    assert not holds("You are Adam.", "Ada") and not holds("It is 1402.", "140")


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
    """Run the script for a tiny model in `tmp_path / "work"`; more flags by name."""
    dialogues = write_dialogues(tmp_path / "talk.jsonl", talks)
    model = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
    sizes = {"vocab_size": VOCAB_SIZE, "context_tokens": 512, "num_rows": 2, "recorded_per_step": 2}
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


def test_the_script_makes_a_model_that_llm_serves_as_it_was_trained(train_tiny, tmp_path, capsys):
    assert train_tiny() == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert train_tiny() == 0  # goes on from the end
    again = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert again["history_loss"] == first["history_loss"]
    assert (again["training_loss"], first["num_steps"]) == (None, 2)
    with pytest.raises(ConfigError, match="--learning_rate"):
        train_tiny(learning_rate=0.5)
    check_served(tmp_path / "work" / "model")


def check_served(model):
    """Chat sends the ids that training made of the same messages."""
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
