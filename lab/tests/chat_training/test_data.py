"""The chat model's training: its files, its vocabulary, and conversations as tokens."""

import json
import random

import pytest

from lab.tests.chat_training.dialogues import VOCAB_SIZE
from pensieve_jax import ConfigError
from pensieve_jax.text import ChatFormat, EarlierTurn
from pensieve_lab.chat_training.data import Conversation, Exchange, read_dialogues
from pensieve_lab.chat_training.grammar import Scraps
from pensieve_lab.chat_training.recall import recall_conversation
from pensieve_lab.chat_training.tokenizer import MARKERS

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
    """Return a conversation's ids in the engine: for each turn what `chat` sends, then the reply and its
    end."""
    chat_format, ids, earlier = ChatFormat(tokenizer), [], []
    for index, (user, reply) in enumerate(conversation.exchanges):
        messages = [{"role": "user", "content": user}]
        if index == 0 and conversation.system is not None:
            messages.insert(0, {"role": "system", "content": conversation.system})
        keep, prompt = chat_format.turn_prompt(earlier, ids, messages)
        assert keep == len(ids)
        ids += prompt
        output = [*tokenizer.encode_after(ids[-1], reply), tokenizer.eos_id]
        ids += output
        earlier.append(EarlierTurn(messages, reply, output, len(ids)))
    return ids


@pytest.mark.parametrize("system", [None, "You are brief."])
def test_an_example_is_what_chat_sends_turn_by_turn(tokenizer, encoder, talks, system):
    conversation = recall_conversation(random.Random(0), talks, Scraps(())).conversation._replace(
        system=system
    )
    example = encoder.encode(conversation, [1.0] * len(conversation.exchanges))
    assert example.token_ids.tolist() == chat_ids(tokenizer, conversation)


def test_replies_and_their_ends_count_and_prompts_count_less(tokenizer, encoder):
    example = encoder.encode(Conversation((Exchange("Hi", "Hello"), Exchange("So", "Yes"))), [1.0, 0.5])
    for weight, reply in ((1.0, "Hello"), (0.5, "Yes")):
        counted = example.token_ids[example.weights == weight]
        assert tokenizer.decode_raw(counted.tolist()) == f"{reply}<|end|>"
    assert set(example.weights) == {1.0, 0.5, 0.25, 0.125}
