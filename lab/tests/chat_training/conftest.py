"""A tokenizer, a model and talk, all tiny, for the tests of the chat model's training."""

import pytest

from lab.tests.chat_training.dialogues import VOCAB_SIZE, dialogue
from model_defs import ModelConfig
from pensieve_jax.text import load_tokenizer
from pensieve_lab.chat_training.corpus import vocabulary_texts
from pensieve_lab.chat_training.examples import ConversationEncoder
from pensieve_lab.chat_training.step import Network, TrainState, make_optimizer
from pensieve_lab.chat_training.tokenizer import learn_tokenizer, save_tokenizer


@pytest.fixture(scope="module")
def talks():
    return [dialogue(number) for number in range(8)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory, talks):
    """Write a model directory with a tokenizer."""
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
    """Share one optimizer among all tests, since a step is compiled for its optimizer."""
    return make_optimizer(learning_rate=1e-2, warmup_steps=2, num_steps=40, weight_decay=0.1)


@pytest.fixture(scope="module")
def parameters(config, optimizer):
    return TrainState.first(config, 0, optimizer).parameters
