"""Templates get the variables, filters and blocks that transformers' `apply_chat_template` gives them."""

from datetime import datetime
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from pensieve_jax.core.errors import ChatTemplateError
from pensieve_jax.text import ChatFormat, Tokenizer, load_tokenizer

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
CHARACTERS = ["<s>", "</s>", "<pad>", *map(chr, range(10, 127))]


def backend() -> tokenizers.Tokenizer:
    """Return a tokenizer with one id per character and three special tokens."""
    made = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(CHARACTERS)}, merges=[]))
    made.add_special_tokens(CHARACTERS[:3])
    return made


def rendered(template: str, messages: list[dict[str, Any]] = MESSAGES, **tokens: Any) -> str:
    """Return the text of a first turn."""
    tokens = tokens or {"bos_token": "<s>", "other_tokens": {"pad_token": "<pad>"}}
    tokenizer = Tokenizer(backend(), eos_token="</s>", chat_template=template, **tokens)
    chat = ChatFormat(tokenizer, now=lambda: datetime(2031, 1, 2))
    return "".join(CHARACTERS[i] for i in chat.token_ids(messages))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if tools is not none %}tools{% endif %}{{ messages[0].content }}", "Hi"),
        ("{% if tools is none %}plain {% endif %}{{ messages[0].content }}", "plain Hi"),
        ("{% if tools is defined %}defined{% endif %}", "defined"),
        ("{% if documents != none %}documents{% else %}none{% endif %}", "none"),
        ("{{ messages[0].content }}{{ pad_token }}{{ bos_token }}", "Hi<pad><s>"),
        ("{% if unk_token is defined %}unk{% else %}no unk{% endif %}", "no unk"),
        ("{{ ([messages[0]] + messages) | length }}", "2"),
        ("{% if messages is mapping or messages is string %}no{% else %}list{% endif %}", "list"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2031"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "013"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aHib"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}", "1"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi"}'),
        ("{{ {'b': '<', 'a': 1} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1,\n "b": "<"\n}'),
    ],
)  # fmt: skip
def test_a_template_sees_what_transformers_passes(template: str, text: str) -> None:
    assert rendered(template) == text


def test_a_special_token_that_the_tokenizer_lacks_is_undefined() -> None:
    template = "{% if bos_token is defined %}bos{% else %}none{% endif %}{{ eos_token }}"
    assert rendered(template, bos_token=None) == "none</s>"


def test_keys_without_a_value_are_absent_and_reasoning_has_each_of_its_names() -> None:
    message = {"role": "user", "content": "Hi", "tool_calls": None, "reasoning": "hm"}
    template = (
        "{{ 'tool_calls' in messages[0] }} {{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    )
    assert rendered(template, [message]) == "False hm hm"


def test_named_special_tokens_are_read_from_the_files(tmp_path: Any) -> None:
    backend().save(str(tmp_path / "tokenizer.json"))
    config = '{"bos_token": "<s>", "unk_token": {"content": "<unk>"}, "chat_template": "{{ unk_token }}"}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<pad>", "eos_token": "</s>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    assert tokenizer.special_tokens == named


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no tools here') }}", "{% for tool in tools %}{% endfor %}"]
)
def test_a_template_that_raises_is_an_error_with_its_words(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render these messages"):
        rendered(template)
