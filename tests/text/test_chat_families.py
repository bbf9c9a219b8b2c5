"""Templates with the structure of Qwen2's, Qwen3's and Mistral's: how chats continue, and what is refused.

They have the published structure, which decides whether a conversation only grows, and none of the text.
"""

import pytest

from pensieve_jax.core.errors import ChatTemplateError
from pensieve_jax.text import Tokenizer
from tests.text.test_chat import ChatFormat, reply, turn_text, user
from tests.text.tokenizer_zoo import byte_level_backend, metaspace_backend

AS_SAID = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
# A default system message is added if the first message is not one.
OWN_SYSTEM = "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' if messages[0].role != 'system' }}"
QWEN2 = OWN_SYSTEM + AS_SAID
# Replies to the last question keep their reasoning, perhaps empty; earlier ones have none.
QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages if message.role == 'user' %}
{%- set ns.last = messages.index(message) %}
{%- endfor %}
{%- for message in messages %}
{%- set parts = message.content.split('</think>') %}
{%- if message.role == 'assistant' and loop.index0 > ns.last %}
{{- '<|im_start|>assistant\n<think>\n' + (parts[0] if parts[1:] else '') + '\n</think>\n\n' + parts[-1] }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + parts[-1] }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + prefill }}{% endif %}
"""
# The system message goes to the last question, so it moves when another follows.
MISTRAL = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- bos_token }}
{%- for message in messages if message.role != 'system' %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (system + '\n\n' if system and loop.last else '') + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}
"""


def qwen(template: str) -> Tokenizer:
    """Return a tokenizer without a beginning-of-sequence token."""
    backend = byte_level_backend(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return Tokenizer(backend, eos_token="<|im_end|>", wants_bos=False, chat_template=template)


def mistral() -> Tokenizer:
    return Tokenizer(metaspace_backend(), bos_token="<s>", eos_token="</s>", chat_template=MISTRAL)


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def test_qwen2_puts_its_system_message_into_the_first_turn_only():
    tokenizer = qwen(QWEN2)
    first = turn_text(tokenizer, [], [user("hi")])
    assert first == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    earlier = [((user("hi"),), *reply(tokenizer, "the cat", "<|im_end|>"))]
    later = turn_text(tokenizer, earlier, [user("and?")])
    assert later == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


def test_qwen2_takes_a_given_system_message_instead():
    tokenizer = qwen(QWEN2)
    opening = (system("Rhyme."), user("hi"))
    first = turn_text(tokenizer, [], opening)
    assert first.startswith("<|im_start|>system\nRhyme.<|im_end|>\n") and "Be kind." not in first
    later = turn_text(tokenizer, [(opening, *reply(tokenizer, "the mat", "<|im_end|>"))], [user("more")])
    assert later == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prefill", "reason"),
    [
        ("''", "a reply does not follow its generation prompt directly"),
        ("'<think>\n\n</think>\n\n'", "earlier messages are rendered differently when new ones follow"),
    ],
)
@pytest.mark.parametrize("text", ["the cat", "<think>\nthe mat\n</think>\n\nthe cat"])
def test_qwen3_cannot_go_on_under_a_template_that_forgets_reasoning(prefill, reason, text):
    """With or without reasoning, or with it switched off: only the first turn works."""
    tokenizer = qwen(f"{{%- set prefill = {prefill} %}}" + QWEN3)
    assert turn_text(tokenizer, [], [user("hi")]).startswith("<|im_start|>user\nhi<|im_end|>\n")
    earlier = [((user("hi"),), *reply(tokenizer, text, "<|im_end|>"))]
    with pytest.raises(ChatTemplateError, match=f"{reason}; use a template that only appends"):
        ChatFormat(tokenizer).turn_token_ids(earlier, [user("and?")])


def test_qwen3_continues_with_a_template_that_keeps_reasoning():
    """The reply's reasoning stays in the history."""
    tokenizer = qwen(AS_SAID)
    earlier = [((user("hi"),), *reply(tokenizer, "<think>\nthe mat\n</think>\n\nthe cat", "<|im_end|>"))]
    later = turn_text(tokenizer, earlier, [user("and?")])
    assert later == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("ending", "closing"), [("</s>", ""), ("", "</s>")])
def test_mistral_closes_a_reply_by_its_end_token_and_never_repeats_the_beginning(ending, closing):
    tokenizer = mistral()
    ids = ChatFormat(tokenizer).turn_token_ids([], [user("hi")])
    assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    finish_reason = "stop" if ending else "length"
    earlier = [((user("hi"),), *reply(tokenizer, "the cat", ending, finish_reason))]
    ids = ChatFormat(tokenizer).turn_token_ids(earlier, [user("and?")])
    assert tokenizer.bos_id not in ids
    assert ids[:1] == [tokenizer.eos_id] if closing else tokenizer.eos_id not in ids
    assert "and?" not in tokenizer.decode_raw(ids[:1])


def test_mistral_cannot_go_on_behind_a_system_message_that_moves():
    tokenizer = mistral()
    opening = (system("Rhyme."), user("hi"))
    assert ChatFormat(tokenizer).turn_token_ids([], opening)
    earlier = [(opening, *reply(tokenizer, "the cat", "</s>"))]
    with pytest.raises(ChatTemplateError, match="cannot continue a conversation, since a reply does not"):
        ChatFormat(tokenizer).turn_token_ids(earlier, [user("and?")])


def test_mistral_wants_alternating_roles():
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatFormat(mistral()).turn_token_ids([], [user("hi"), user("hi")])
