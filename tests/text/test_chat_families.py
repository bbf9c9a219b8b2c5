"""Templates with the structure of published ones: what stays of a conversation, and what is written anew.

They have the published structure, which decides what stays of a conversation, and none of the text.
"""

import pytest
from tokenizers import AddedToken

from pensieve_jax.core.errors import ChatTemplateError
from pensieve_jax.text import ChatFormat, Tokenizer
from tests.text.test_chat import Conversation, user
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


# ChatML of early Qwen1.5 and vLLM: the end marker of the last message comes only before another message.
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- if (loop.last and add_generation_prompt) or not loop.last %}{{ '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'assistant' %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
# Phi-3 and InternLM2: an end of sequence follows a rendering without generation prompt.
PHI3 = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}
"""
# DeepSeek-R1's first template, LFM2.5, EXAONE 4: reasoning goes by the text of a reply.
THINK_CUT = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content.split('</think>')[-1] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


def qwen(template: str) -> Tokenizer:
    """Return a tokenizer without a beginning-of-sequence token."""
    backend = byte_level_backend(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return Tokenizer(backend, eos_token="<|im_end|>", wants_bos=False, chat_template=template)


def mistral() -> Tokenizer:
    return Tokenizer(metaspace_backend(), bos_token="<s>", eos_token="</s>", chat_template=MISTRAL)


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def check_second_turn(chat: Conversation, opening, message, reply: str, ending: str) -> int:
    """Run a turn and begin another; return how many tokens of the first stay.

    The context must be the rendering of the whole.
    """
    chat.begin(*opening)
    ids = chat.tokenizer.encode(reply, add_bos=False) + chat.tokenizer.encode(ending, add_bos=False)
    chat.end(ids, reply)
    keep, _ = chat.begin(message)
    assert chat.ids == chat.format.token_ids([*opening, {"role": "assistant", "content": reply}, message])
    return keep


def test_qwen2_puts_its_system_message_into_the_first_turn_only():
    chat = Conversation(qwen(QWEN2))
    keep = check_second_turn(chat, [user("hi")], user("and?"), "the cat", "<|im_end|>")
    assert chat.text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "the cat<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert keep == chat.turns[0].num_tokens
    chat = Conversation(qwen(QWEN2))
    check_second_turn(chat, [system("Rhyme."), user("hi")], user("more"), "the mat", "<|im_end|>")
    assert chat.text.startswith("<|im_start|>system\nRhyme.<|im_end|>\n") and "Be kind." not in chat.text


@pytest.mark.parametrize("template", [CHATML, PHI3, AS_SAID])
@pytest.mark.parametrize("reply", ["the cat", "<think>\nthe mat\n</think>\n\nthe cat", ""])
def test_templates_that_end_a_conversation_differently_only_grow(template, reply):
    """The end marker stands once between a reply and the next message."""
    chat = Conversation(qwen(template))
    keep = check_second_turn(chat, [user("hi")], user("and?"), reply, "<|im_end|>")
    assert keep == chat.turns[0].num_tokens
    assert chat.text.count(f"{reply}<|im_end|>\n<|im_start|>user\nand?<|im_end|>") == 1


@pytest.mark.parametrize("prefill", ["''", "'<think>\n\n</think>\n\n'"])
@pytest.mark.parametrize("thought", ["", "<think>\nthe mat\n</think>\n\n"])
def test_qwen3_keeps_the_prompt_and_forgets_reasoning(prefill, thought):
    """With or without reasoning, or with it switched off."""
    chat = Conversation(qwen(f"{{%- set prefill = {prefill} %}}" + QWEN3))
    keep = check_second_turn(chat, [user("hi")], user("and?"), f"{thought}the cat", "<|im_end|>")
    whole = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    cleaned = "\n\n" if thought else ""
    assert chat.text.startswith(f"{whole}{cleaned}the cat<|im_end|>\n<|im_start|>user\nand?")
    num_whole = len(chat.tokenizer.encode(whole, add_bos=False))
    if thought or prefill != "''":
        assert keep in (num_whole - 1, num_whole)
    else:
        assert keep == chat.turns[0].num_tokens


def test_reasoning_that_a_template_finds_in_the_text_is_dropped():
    chat = Conversation(qwen(THINK_CUT))
    keep = check_second_turn(chat, [user("hi")], user("and?"), "<think>the mat</think>the cat", "<|im_end|>")
    assert "the mat" not in chat.text and "assistant\nthe cat<|im_end|>" in chat.text
    assert keep == len(
        chat.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_bos=False)
    )
    chat.end(chat.tokenizer.encode("the dog<|im_end|>", add_bos=False), "the dog")
    assert chat.begin(user("so"))[0] == chat.turns[-1].num_tokens, "a reply without reasoning stays"


@pytest.mark.parametrize("ending", ["</s>", ""])
def test_mistral_closes_a_reply_by_its_end_token_and_never_repeats_the_beginning(ending):
    tokenizer = mistral()
    chat = Conversation(tokenizer)
    keep = check_second_turn(chat, [user("hi")], user("and?"), "the cat", ending)
    assert chat.ids.count(tokenizer.bos_id) == 1 and chat.ids[0] == tokenizer.bos_id
    assert chat.ids.count(tokenizer.eos_id) == 1
    assert keep == chat.turns[0].num_tokens


def test_mistral_moves_its_system_message():
    chat = Conversation(mistral())
    opening = (system("Rhyme."), user("hi"))
    keep = check_second_turn(chat, opening, user("and?"), "the cat", "</s>")
    assert 0 < keep < 10
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        chat.begin(user("hi"), user("hi"))


SEAMS = {"qwen2": QWEN2, "qwen3": "{%- set prefill = '' %}" + QWEN3, "chatml": CHATML, "cut": THINK_CUT}
REPLIES = (
    "the cat",
    " the\n",
    "",
    "the <think>\nmat</think>\n\ncat",
    "中文",
    "\n\nthe",
    "the <|im_end|> mat",
)


@pytest.mark.parametrize("kind", ["byte level", "metaspace", "stripping"])
@pytest.mark.parametrize("name", SEAMS)
def test_encoding_behind_a_control_token_changes_nothing(monkeypatch, kind, name):
    """Long conversations are not encoded again from their start; the contexts must be the same."""
    markers = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    backend = metaspace_backend() if kind == "metaspace" else byte_level_backend(markers)
    backend.add_special_tokens(list(markers))
    if kind == "stripping":
        backend.add_special_tokens([AddedToken("<|im_end|>", rstrip=True, special=True)])
    tokenizer = Tokenizer(backend, bos_token="<s>", eos_token="</s>", chat_template=SEAMS[name])
    beginning, num_found = ChatFormat._beginning, []

    def counted(self, text, token_ids, ends):
        num_found.append(beginning(self, text, token_ids, ends)[0])
        return num_found[-1], beginning(self, text, token_ids, ends)[1]

    for ending in ("<|im_end|>", "</s>", ""):
        monkeypatch.setattr(ChatFormat, "_beginning", counted)
        chat = Conversation(tokenizer)
        whole = Conversation(tokenizer)
        for number, reply in enumerate(REPLIES):
            monkeypatch.setattr(ChatFormat, "_beginning", counted)
            keep = chat.begin(user(f"the {number}"))[0]
            monkeypatch.setattr(ChatFormat, "_beginning", lambda *_: (0, 0))
            assert whole.begin(user(f"the {number}"))[0] == keep and whole.ids == chat.ids
            ids = tokenizer.encode_after(None, reply) + tokenizer.encode_after(None, ending)
            chat.end(ids, reply)
            whole.end(ids, reply)
    # Other tokenizers do not spell a rendering exactly, and encode all of it.
    assert kind != "byte level" or sum(found > 0 for found in num_found) > 10


# Templates of LLaVA, Idefics3 and SmolVLM read a list of parts, and would write nothing of a string.
PARTS = """\
{%- for message in messages %}
{{- message.role | capitalize }}{{ ':' if message.content[0].type == 'image' else ': ' }}
{%- for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}{{ '<image>' }}{% endif %}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""


def test_a_template_that_reads_parts_gets_parts():
    conversation = Conversation(Tokenizer(byte_level_backend(), chat_template=PARTS))
    assert conversation.begin(user("Hi 1")) == (0, "User: Hi 1<|im_end|>\nAssistant:")
    conversation.end(conversation.tokenizer.encode(" Yes.<|im_end|>", add_bos=False), "Yes.")
    keep, prompt = conversation.begin(user(""))
    assert keep > 0 and prompt.endswith("User: <|im_end|>\nAssistant:")
    assert conversation.text.startswith("User: Hi 1<|im_end|>\nAssistant: Yes.<|im_end|>")
