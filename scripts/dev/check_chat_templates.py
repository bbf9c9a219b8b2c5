"""Compare chats under published chat templates with `apply_chat_template` of transformers.

    python -m venv /tmp/chats && /tmp/chats/bin/pip install "transformers>=5" . absl-py
    /tmp/chats/bin/python scripts/dev/check_chat_templates.py --templates=DIRECTORY --json=FILE

The script needs transformers, which the project does not; torch is not needed. The directory holds templates
(`*.jinja`); the family comes from the text of a template and its file name. Each template gets a byte-level
tokenizer in which every marker of its text is one id, so equal texts are equal ids.

A case has the messages of a first turn, a reply, and the messages of a second turn. The first context must be
what transformers returns for the messages, and so must the second for the whole history, reply included. The
exit status is 1 if a context differs or is refused although transformers writes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers
from absl import flags
from tokenizers import decoders, models, pre_tokenizers
from tqdm import tqdm

from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.core.errors import ChatTemplateError
from pensieve_jax.text import ChatFormat, EarlierTurn, Tokenizer

FLAGS = flags.FLAGS
NOW: Final = datetime(2031, 1, 2, 3, 4)
_MARKER: Final = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|</?[a-zA-Z_]{1,30}>|\[/?[A-Z_]{2,30}\]|<[a-z]+_of_turn>"
)
_END: Final = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>")
_THOUGHT: Final = "<think>\nThe user wants it.\n</think>\n\nYes, it is."
# The first expression found in a template's name, or else in its text, gives its family.
FAMILIES: Final = (
    ("gpt-oss", r"gpt.?oss|<\|channel\|>"),
    ("Qwen3.5 and later", r"qwen3[._-]?[5-9]"),
    ("Qwen3", r"qwen.?3|qwq"),
    ("Qwen2 and before", r"qwen"),
    ("DeepSeek", r"deep.?seek|<\uff5cUser\uff5c>"),
    ("Llama 4", r"llama.?4|<\|header_start\|>"),
    ("Llama 3", r"llama.?3|functionary|fire|start_header_id"),
    ("Llama 2", r"llama.?2|<<SYS>>"),
    ("Mistral", r"mistral|mixtral|ministral|pixtral|devstral|magistral|\[INST\]"),
    ("Gemma", r"gemma|<start_of_turn>"),
    ("Phi", r"phi"),
    ("Command, Aya", r"command|aya|c4ai|START_OF_TURN_TOKEN"),
    ("GLM", r"glm|\[gMASK\]"),
    ("Granite", r"granite"),
    ("Kimi", r"kimi|moonshot"),
    ("Nemotron", r"nemotron|nvidia"),
    ("LFM", r"lfm"),
    ("EXAONE", r"exaone"),
    ("SmolLM", r"smollm"),
    ("Hermes, ChatML", r"chatml|hermes|<\|im_start\|>"),
    ("Vicuna, Alpaca", r"vicuna|alpaca|### ?Instruction"),
)


class Case(NamedTuple):
    """A chat of two turns; `ended` tells whether the reply has its end marker."""

    opening: Sequence[dict[str, str]]
    reply: str
    message: Sequence[dict[str, str]]
    ended: bool = True


class Found(NamedTuple):
    """What came of one turn: "equal", "differs", "refused", "refused by both" or "refused there only"."""

    verdict: str
    kept: float | None = None  # share of the earlier tokens that stayed


def define_flags() -> None:
    """Define the command-line flags."""
    flags.DEFINE_string("templates", None, "Directory of templates.")
    flags.DEFINE_string("json", None, "File for the results of every template and case.")
    require("templates")


def main() -> int:
    """Compare all templates, print a table by family, and return the exit status."""
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]
    from transformers.utils import chat_template_utils  # type: ignore[import-not-found]

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls.fromtimestamp(NOW.timestamp())

    chat_template_utils.datetime = Clock

    def reference_of(tokenizer: Tokenizer) -> Reference:
        there = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer._backend,
            chat_template=tokenizer.chat_template,
            **tokenizer.special_tokens,
        )

        def reference(messages: Sequence[dict[str, str]]) -> list[int]:
            options = {"add_generation_prompt": True, "return_dict": False}
            ids: list[int] = there.apply_chat_template([dict(one) for one in messages], **options)
            return ids

        return reference

    texts = {
        path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(FLAGS.templates).glob("*.jinja"))
    }
    distinct = {text.strip(): name for name, text in reversed(texts.items()) if "messages" in text}
    names = sorted(distinct.values())
    results = {name: compare(texts[name], reference_of) for name in tqdm(names, unit="template")}
    families = {name: family_of(name, texts[name]) for name in names}
    if FLAGS.json:
        rows = {name: {"family": families[name], "cases": found} for name, found in results.items()}
        Path(FLAGS.json).write_text(json.dumps(rows, indent=1) + "\n")
    print(table(results, families))
    return (
        EXIT_FAILED if counts_of(results.values())["differs"] or counts_of(results.values())["refused"] else 0
    )


type Reference = Callable[[Sequence[dict[str, str]]], list[int]]
"""Returns the ids of a whole conversation, or raises any error."""

type Results = dict[str, tuple[Found, Found | None]]
"""By case, the first turn and the second; None if the first was refused."""


def compare(template: str, reference_of: Callable[[Tokenizer], Reference]) -> Results:
    """Return what comes of every case under a template; {} if it does not compile."""
    tokenizer = tokenizer_of(template)
    try:
        chat = ChatFormat(tokenizer, now=lambda: NOW)
    except ChatTemplateError:
        return {}
    reference = reference_of(tokenizer)
    return {name: _compared(chat, tokenizer, reference, case) for name, case in cases(template).items()}


def _compared(
    chat: ChatFormat, tokenizer: Tokenizer, reference: Reference, case: Case
) -> tuple[Found, Found | None]:
    first, context = _turn(chat, reference, [], [], [], case.opening)
    if context is None:
        return first, None
    reply = tokenizer.encode(case.reply, add_bos=False)
    if case.ended:
        reply.append(_end_id(tokenizer, reference))
    context = [*context, *reply]
    earlier = [EarlierTurn(tuple(case.opening), case.reply, tuple(reply), len(context))]
    past = [*case.opening, {"role": "assistant", "content": case.reply}]
    return first, _turn(chat, reference, earlier, context, past, case.message)[0]


def _turn(
    chat: ChatFormat,
    reference: Reference,
    earlier: Sequence[EarlierTurn],
    token_ids: Sequence[int],
    past: Sequence[dict[str, str]],
    messages: Sequence[dict[str, str]],
) -> tuple[Found, list[int] | None]:
    """Return what comes of a turn, and its context."""
    try:
        wanted = reference([*past, *messages])
    except Exception:  # a template may raise anything
        wanted = None
    try:
        keep, prompt = chat.turn_prompt(earlier, token_ids, messages)
    except ChatTemplateError:
        return Found("refused by both" if wanted is None else "refused"), None
    context = [*token_ids[:keep], *prompt]
    if wanted is None:
        return Found("refused there only"), context
    kept = keep / len(token_ids) if token_ids else None
    return Found("equal" if context == wanted else "differs", kept), context


def _end_id(tokenizer: Tokenizer, reference: Reference) -> int:
    """Return the id that the template writes after a reply, or else the end of sequence."""
    assert tokenizer.eos_id is not None
    word = "zqzq"
    messages = [{"role": role, "content": word} for role in ("user", "assistant", "user")]
    try:
        text = tokenizer.decode_raw(reference(messages))
    except Exception:  # a template may raise anything
        return tokenizer.eos_id
    behind = text.split(word)[2].lstrip() if text.count(word) == 3 else ""
    ids = tokenizer.encode(behind, add_bos=False)[:1]
    is_end = bool(ids) and ids[0] in tokenizer.special_ids and ids[0] != tokenizer.bos_id
    return ids[0] if is_end else tokenizer.eos_id


def cases(template: str) -> dict[str, Case]:
    """Return the chats to compare; one has the template's own markers in its contents."""
    hello, more = user("Is it blue?"), [user("Are you sure?")]
    system = {"role": "system", "content": "Be brief."}
    marks = " ".join(_MARKER.findall(template)[:3])
    return {
        "plain": Case([hello], "Yes, it is.", more),
        "system": Case([system, hello], "Yes, it is.", more),
        "reasoning": Case([hello], _THOUGHT, more),
        "system, reasoning": Case([system, hello], _THOUGHT, more),
        "two messages of a user": Case([hello, user("Or green?")], "Yes.", [user("Why?"), *more]),
        "empty": Case([user("")], "", [user("")]),
        "blanks": Case([user("  Is it? \n")], " \nYes. \n", [user("\tWhy?  ")]),
        "markers": Case([user(f"What is {marks}?")], f"It is {marks}.", [user(f"{marks} again")]),
        "cut": Case([system, hello], "Yes, it i", more, ended=False),
    }


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def tokenizer_of(template: str) -> Tokenizer:
    """Return a byte-level tokenizer whose special tokens are the markers in a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    markers = sorted({*_MARKER.findall(template), "<s>", "</s>", "<pad>", "<unk>"} - {"<think>", "</think>"})
    backend.add_special_tokens(markers)
    eos = next(end for end in _END if end in markers)
    return Tokenizer(
        backend,
        bos_token="<s>",
        eos_token=eos,
        chat_template=template,
        other_tokens={"pad_token": "<pad>", "unk_token": "<unk>"},
    )


def family_of(name: str, template: str) -> str:
    """Return a template's family by its name, or else by its text."""
    for where in (name, template):
        for family, pattern in FAMILIES:
            if re.search(pattern, where, re.IGNORECASE):
                return family
    return "others"


def counts_of(results: Iterable[Results]) -> Counter[str]:
    """Return the number of turns by verdict."""
    return Counter(
        turn.verdict for cases in results for turns in cases.values() for turn in turns if turn is not None
    )


def table(results: dict[str, Results], families: dict[str, str]) -> str:
    """Return a table by family in Markdown, with the mean share of tokens that stay in equal second turns."""
    members: defaultdict[str, list[Results]] = defaultdict(list)
    for name, found in results.items():
        if found:
            members[families[name]].append(found)
    order = [family for family, _ in FAMILIES if family in members]
    groups = [(family, members[family]) for family in [*order, *(["others"] if "others" in members else [])]]
    groups.append(("**all**", [one for _, group in groups for one in group]))
    lines = [
        "| family | templates | turns equal | differ, refused | refused by both (there only) | kept: plain | "
        "kept: reasoning |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, group in groups:
        counts = counts_of(group)
        lines.append(
            f"| {family} | {len(group)} | {counts['equal']} | {counts['differs']}, {counts['refused']} | "
            f"{counts['refused by both']} ({counts['refused there only']}) | {_kept(group, 'plain')} | "
            f"{_kept(group, 'reasoning')} |"
        )
    unread = sum(not found for found in results.values())
    return "\n".join([*lines, f"{unread} template(s) did not compile"])


def _kept(group: Sequence[Results], case: str) -> str:
    seconds = [found[case][1] for found in group]
    shares = [second.kept for second in seconds if second is not None and second.kept is not None]
    return f"{sum(shares) / len(shares):.0%}" if shares else "-"


if __name__ == "__main__":
    define_flags()
    run(main)
