"""Masks of grammars: what they allow is valid, what they forbid is not, and who may end a reply when."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pensieve_jax.core.errors import (
    GrammarFailedError,
    GrammarTooComplexError,
    InvalidRequestError,
    UnsupportedGrammarError,
)
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.text import Tokenizer, byte_tokenizer, grammar, load_tokenizer
from pensieve_jax.text.grammar import GrammarRow, Grammars, check_grammar
from tests.seeds import new_seed
from tests.text.tokenizer_zoo import ZOO

GOLDEN = Path(__file__).parent / "golden"
EOS = 1
VOCAB_SIZE = 4096
NUM_WORDS = VOCAB_SIZE // 32

SCHEMAS = [
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["a", "bb", 3, None, True]}, "minItems": 1, "maxItems": 4},
    {
        "$defs": {
            "t": {
                "type": "object",
                "properties": {
                    "v": {"type": "number"},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/t",
    },
    {
        "anyOf": [
            {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]+$"},
            {"type": "integer", "multipleOf": 7},
        ]
    },
    {
        "type": "object",
        "properties": {"d": {"type": "string", "format": "date"}, "u": {"type": "string", "maxLength": 5}},
        "required": ["d"],
        "additionalProperties": {"type": "boolean"},
    },
    {"type": "object"},
]


@functools.cache
def chat_tokenizer():
    return load_tokenizer(Path("pensieve_jax/chat_model"))


@functools.cache
def chat_grammars():
    return Grammars(chat_tokenizer(), VOCAB_SIZE, [EOS])


def allowed_ids(row, num_words=NUM_WORDS):
    words = np.full(num_words, -1, np.int32)
    row.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def row_of(form, ending_ids=(EOS,), min_tokens=0):
    return chat_grammars().compile(form).row(ending_ids, min_tokens)


def after_text(form, text, **options):
    """Return a row after the tokens of a text, and the number of its tokens."""
    row, tokens = row_of(form, **options), chat_tokenizer().encode(text, add_bos=False)
    for token_id in tokens:
        assert token_id in allowed_ids(row), f"{token_id} is not allowed in {text!r}"
        row.accept(token_id)
    return row, len(tokens)


def walk(row, tokenizer, rng, most=300, num_words=NUM_WORDS, eos=EOS):
    """Take allowed ids until the reply ends; -> its text, or None if it did not end by then."""
    taken = []
    for number in range(most):
        ids = allowed_ids(row, num_words)
        assert ids, "nothing is allowed"
        closing = [i for i in ids if (tokenizer.bytes_of(i) or b" ")[:1] in b'"}],']
        is_late = number > most // 3
        token_id = eos if eos in ids and (is_late or rng.random() < 0.3) else None
        if token_id is None:
            choices = closing if closing and (is_late or rng.random() < 0.3) else ids
            token_id = rng.choice(choices)
        row.accept(token_id)
        if token_id == eos:
            return tokenizer.decode(taken)
        taken.append(token_id)
    return None


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_walks_through_masks_end_in_valid_json(number):
    rng, num_ended = random.Random(new_seed()), 0
    compiled = chat_grammars().compile(StructuredOutput.json_schema(SCHEMAS[number]))
    for _ in range(6):
        text = walk(compiled.row([EOS], 0), chat_tokenizer(), rng)
        if text is not None:
            num_ended += 1
            jsonschema.validate(json.loads(text), SCHEMAS[number])
    assert num_ended > 1


def test_masks_of_a_finite_language_are_exact():
    """Every bit against the texts themselves, also where only one text is left."""
    texts = ["red apple", "red", "blue\n", 'q"uote', "back\\slash", "é🙂"]
    form, tokenizer = StructuredOutput.choice(texts), chat_tokenizer()
    parts = [tokenizer.bytes_of(i) or b"" for i in range(VOCAB_SIZE)]
    for target in texts:
        row, so_far = row_of(form), b""
        while True:
            found = set(allowed_ids(row))
            wanted = {
                i
                for i, part in enumerate(parts)
                if part and any(text.encode().startswith(so_far + part) for text in texts)
            }
            if so_far.decode(errors="replace") in texts:
                wanted.add(EOS)
            assert found == wanted
            fitting = [i for i in found - {EOS} if target.encode().startswith(so_far + parts[i])]
            assert bool(fitting) == (so_far != target.encode()), "a text cannot be completed"
            if not fitting:
                break
            row.accept(fitting[0])
            so_far += parts[fitting[0]]


def control_text(tokenizer, is_end):
    """Return the text of the end-of-sequence token, or of a control token that is not an end."""
    ids = {i for i in tokenizer.mark_ids if not tokenizer.bytes_of(i)} - {tokenizer.eos_id, None}
    return tokenizer.token_text(tokenizer.eos_id if is_end else max(ids))


@pytest.mark.parametrize("is_end", [True, False], ids=["end", "mark"])
@pytest.mark.parametrize("kind", ["choice", "one choice", "const", "enum", "name", "regex", "behind a mark"])
@pytest.mark.parametrize("name", ["chat", "qwen2_decoder", "gpt2_added", "llama2_pad", "byte_fallback"])
def test_text_of_a_control_token_is_spelled_in_ordinary_tokens(name, kind, is_end):
    """Forced text stands around it: tokens of the encoder would be the control token itself."""
    if name == "chat":
        tokenizer = chat_tokenizer()
    else:
        tokenizer = ZOO[name] if name in ZOO else load_tokenizer(GOLDEN / name)
    eos, num_words = tokenizer.eos_id, -(-tokenizer.vocab_size // 32)
    written = f"abc{control_text(tokenizer, is_end)}d"
    texts = {written}
    if kind == "choice":
        texts.add("xyz")
        form = StructuredOutput.choice(sorted(texts))
    elif kind == "one choice":
        form = StructuredOutput.choice([written])
    elif kind == "const":
        form, texts = StructuredOutput.json_schema({"const": written}), {json.dumps(written)}
    elif kind == "enum":
        form = StructuredOutput.json_schema({"enum": ["xyz", written]})
        texts = {'"xyz"', json.dumps(written)}
    elif kind == "name":
        form = StructuredOutput.json_schema(
            {"properties": {written: {"const": 1}}, "required": [written], "additionalProperties": False}
            | {"type": "object"}
        )
        texts = None
    elif kind == "regex":
        form = StructuredOutput.regex(re.escape(written))
    else:
        form = StructuredOutput("choice", json.dumps([written]), after="c")
        texts = None
    compiled = Grammars(tokenizer, tokenizer.vocab_size, [eos]).compile(form)
    rng = random.Random(new_seed())
    for _ in range(4):
        row = compiled.row([eos], 0)
        if kind == "behind a mark":
            for token_id in tokenizer.encode_after(None, "ac"):
                row.accept(token_id)
        text = walk(row, tokenizer, rng, 150, num_words, eos)
        assert text is not None
        if kind == "name":
            assert json.loads(text) == {written: 1}
        elif kind == "behind a mark":
            assert text.lstrip() == written
        else:
            assert text in texts


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutput.regex(r"[A-Z][a-z]{1,6} [0-9]{4}"), r"[A-Z][a-z]{1,6} [0-9]{4}"),
        (StructuredOutput.regex(r"/a\\/[x/]\/\\\\?"), r"/a\\/[x/]/\\\\?"),
        (StructuredOutput.grammar('start: "a" "b"+ /[0-9]{1,3}/'), r"ab+\d{1,3}"),
        (StructuredOutput.grammar('root ::= "yes" | "no"'), r"yes|no"),
    ],
)
def test_walks_match_expressions_and_grammars(form, pattern):
    rng, ended = random.Random(new_seed()), 0
    for _ in range(10):
        text = walk(row_of(form), chat_tokenizer(), rng, most=40)
        if text is not None:
            ended += 1
            assert re.fullmatch(pattern, text), text
    assert ended


def test_a_complete_reply_allows_ending_ids_only():
    row, _ = after_text(StructuredOutput.choice(["yes", "no"]), "yes", ending_ids=(EOS, 3))
    assert allowed_ids(row) == [EOS, 3]
    row.accept(3)
    assert len(allowed_ids(row)) == VOCAB_SIZE, "the reply has ended; its row is discarded"


def test_the_planted_bug_of_any_id_behind_a_complete_form_is_found(monkeypatch):
    """A mask of ones where the library has stopped."""
    fill = GrammarRow.fill

    def any_id(self, words):
        return False if self._matcher.is_stopped() else fill(self, words)

    monkeypatch.setattr(GrammarRow, "fill", any_id)
    with pytest.raises(AssertionError):
        test_a_complete_reply_allows_ending_ids_only()


def test_ending_ids_are_allowed_exactly_where_the_form_may_end():
    form = StructuredOutput.regex("a+b?")
    letter = chat_tokenizer().encode("a", add_bos=False)
    row = row_of(form, ending_ids=(EOS, 3))
    assert not {EOS, 3} & set(allowed_ids(row))
    row.accept(letter[-1])
    assert {EOS, 3} <= set(allowed_ids(row)) and len(allowed_ids(row)) > 2


def test_min_tokens_forbids_ending_ids_until_nothing_else_is_left():
    row, num_tokens = after_text(StructuredOutput.regex("a+"), "a", min_tokens=3)
    assert EOS not in allowed_ids(row)
    for _ in range(3 - num_tokens):
        row.accept(chat_tokenizer().encode("a", add_bos=False)[-1])
    assert EOS in allowed_ids(row)
    row, _ = after_text(StructuredOutput.choice(["yes"]), "yes", min_tokens=100)
    assert allowed_ids(row) == [EOS]


def test_a_stop_id_that_is_text_is_allowed_where_the_form_has_it():
    brace = chat_tokenizer().encode("}", add_bos=False)[-1]
    form = StructuredOutput.json_schema({"const": {}})
    row, _ = after_text(form, "{", ending_ids=(EOS, brace))
    assert brace in allowed_ids(row) and EOS not in allowed_ids(row)
    row.accept(brace)  # it ends the reply
    assert len(allowed_ids(row)) == VOCAB_SIZE


def test_several_ids_beyond_the_tokenizer_are_never_allowed():
    tokenizer = chat_tokenizer()
    grammars = Grammars(tokenizer, VOCAB_SIZE + 70, [EOS])
    row = grammars.compile(StructuredOutput.regex("(.|\n)*")).row([EOS], 0)
    ids = allowed_ids(row, num_words=-(-(VOCAB_SIZE + 70) // 32))
    assert max(ids) < VOCAB_SIZE and len(ids) > 3000
    few = Grammars(tokenizer, 1000, [EOS]).compile(StructuredOutput.regex("(.|\n)*")).row([EOS], 0)
    assert max(allowed_ids(few, num_words=-(-1000 // 32))) < 1024, "a model with fewer rows than ids"


@pytest.mark.parametrize("mark", ["</think>", "."])
def test_a_form_behind_reasoning_begins_after_the_mark(mark):
    form = StructuredOutput("choice", '["yes","no"]', after=mark)
    row, _ = after_text(form, 'I am not sure {"a": 1}\n\n')
    ids = allowed_ids(row)
    assert EOS not in ids and len(ids) > 3000
    row, _ = after_text(form, f"I think so{mark}")
    assert EOS not in allowed_ids(row) and len(allowed_ids(row)) < 200
    row, _ = after_text(form, f"I think so{mark}\n\nyes")
    assert allowed_ids(row) == [EOS]


@pytest.mark.parametrize("opening", ["<think>", "<|user|>"])
def test_a_reply_may_leave_out_reasoning_that_it_begins_itself(opening):
    """Templates of some models know reasoning, and the models do not reason."""
    form = StructuredOutput("choice", '["yes","no"]', opening=opening, after="</think>")
    row, _ = after_text(form, "yes")
    assert allowed_ids(row) == [EOS]
    row, _ = after_text(form, f"{opening}\nI am not sure {{}}")
    assert EOS not in allowed_ids(row) and len(allowed_ids(row)) > 3000
    row, _ = after_text(form, f"{opening}\nI think so.\n</think>\n\nyes")
    assert allowed_ids(row) == [EOS]
    first, _ = after_text(form, "")
    assert len(allowed_ids(first)) < 20, "no other text"


def test_a_mark_that_is_a_control_token_is_its_id():
    tokenizer = load_tokenizer(GOLDEN / "qwen2_decoder")
    mark_id = tokenizer.id_of("<tool_call>")
    assert tokenizer.encode("<tool_call>", add_bos=False) == [mark_id]
    eos = tokenizer.eos_id
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [eos])
    row = grammars.compile(StructuredOutput("regex", "[ab]{3}", after="<tool_call>")).row([eos], 0)
    num_words = -(-tokenizer.vocab_size // 32)
    for token_id in [
        *tokenizer.encode("hm", add_bos=False),
        mark_id,
        *tokenizer.encode("aba", add_bos=False),
    ]:
        assert token_id in allowed_ids(row, num_words) and eos not in allowed_ids(row, num_words)
        row.accept(token_id)
    assert allowed_ids(row, num_words) == [eos]


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_every_kind_of_tokenizer_is_converted(name):
    """The vocabularies are small; that of `unigram` has letters only."""
    tokenizer = load_tokenizer(GOLDEN / name)
    eos = tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.vocab_size - 1
    num_words = -(-tokenizer.vocab_size // 32)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [eos])
    rng = random.Random(new_seed())
    words = grammars.compile(StructuredOutput.regex("[a-z][ a-z]{0,19}")).row([eos], 0)
    text = walk(words, tokenizer, rng, 60, num_words, eos)
    assert text is None or re.fullmatch("[a-z][ a-z]{0,19}", text), text
    form = StructuredOutput.json_schema(SCHEMAS[1])
    if name == "unigram":
        with pytest.raises(UnsupportedGrammarError, match="that the model's tokens can spell"):
            grammars.compile(form)
        return
    compiled, ended = grammars.compile(form), 0
    for _ in range(4):
        text = walk(compiled.row([eos], 0), tokenizer, rng, 120, num_words, eos)
        if text is not None:
            ended += 1
            jsonschema.validate(json.loads(text), SCHEMAS[1])
    assert ended


def test_a_byte_tokenizer_is_converted():
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer, 512, [tokenizer.eos_id])
    row = grammars.compile(StructuredOutput.choice(["é"])).row([tokenizer.eos_id], 0)
    for byte in "é".encode():
        assert allowed_ids(row, 16) == [byte]
        row.accept(byte)
    assert allowed_ids(row, 16) == [tokenizer.eos_id]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace"])
def test_the_tokenizer_and_the_library_agree_which_added_tokens_are_marks(name):
    draw = random.Random(new_seed())
    backend = Backend.from_str(ZOO[name].as_json())
    contents = {
        "<a>",
        "<|b|>",
        "</c>",
        "<d e>",
        "<",
        ">",
        "<>",
        "<f",
        "g>",
        " <h>",
        "[i]",
        "\n\n",
        "word",
        "<0x00>",
    }
    contents |= {"".join(draw.choices("<>|x[ ", k=draw.randint(1, 4))) for _ in range(40)}
    contents = sorted(text for text in contents if text.strip() and backend.token_to_id(text) is None)
    special = {text for text in contents if draw.random() < 0.3}
    for text in contents:
        token = AddedToken(text, normalized=False, special=text in special)
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    tokenizer = Tokenizer(backend, bos_token="<s>", eos_token="</s>")
    grammars = Grammars(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    for text in contents:
        is_mark = tokenizer.mark_id(text) is not None
        assert is_mark == grammars._tokens.is_special_token(tokenizer.id_of(text)), text
        assert is_mark or text not in special
    assert tokenizer.mark_id("t") is None and tokenizer.mark_id("not there") is None


def test_rows_of_one_grammar_are_independent():
    compiled = chat_grammars().compile(StructuredOutput.choice(["yes", "no"]))
    one, other = compiled.row([EOS], 0), compiled.row([EOS], 0)
    before = allowed_ids(other)
    for token_id in chat_tokenizer().encode("yes", add_bos=False):
        one.accept(token_id)
    assert allowed_ids(one) == [EOS] and allowed_ids(other) == before


def test_an_id_that_was_not_allowed_fails():
    row = row_of(StructuredOutput.choice(["yes", "no"]))
    with pytest.raises(GrammarFailedError, match="the grammar failed after 1 tokens of the reply"):
        row.accept(chat_tokenizer().encode("maybe", add_bos=False)[0])


@pytest.mark.parametrize(
    ("form", "kind", "said"),
    [
        (StructuredOutput.json_schema({"type": "objec"}), InvalidRequestError, "Invalid type: objec"),
        (
            StructuredOutput.json_schema({"not": {}}),
            UnsupportedGrammarError,
            'Unimplemented keys: \\["not"\\]',
        ),
        (StructuredOutput.json_schema({"type": "string", "format": "x"}), UnsupportedGrammarError, "format"),
        (
            StructuredOutput.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
            UnsupportedGrammarError,
            "oneOf",
        ),
        (
            StructuredOutput.json_schema({"properties": {"a": {}}, "minProperties": 1}),
            UnsupportedGrammarError,
            "min/maxProperties",
        ),
        (
            StructuredOutput.json_schema({"patternProperties": {"^a": {"type": "null"}, "b$": {}}}),
            UnsupportedGrammarError,
            "not disjoint",
        ),
        (StructuredOutput.json_schema({"$ref": "#/x"}), InvalidRequestError, "does not exist"),
        (StructuredOutput.json_schema(False), InvalidRequestError, "Unsatisfiable"),
        (StructuredOutput.regex("((("), InvalidRequestError, "unclosed group"),
        (StructuredOutput.regex("(?=a)b"), UnsupportedGrammarError, "look-around"),
        (StructuredOutput.grammar("start: foo"), InvalidRequestError, 'unknown name: "foo"'),
        (StructuredOutput.grammar("hello"), InvalidRequestError, "Expected ::="),
        (StructuredOutput.grammar('root ::= "a"{'), InvalidRequestError, "structured.grammar"),
        (StructuredOutput.grammar("root ::= " + "(" * 5000), GrammarTooComplexError, "nested less"),
        (
            StructuredOutput.grammar("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
            GrammarTooComplexError,
            "nested less",
        ),
    ],
)
def test_wrong_forms_are_refused_without_a_tokenizer(form, kind, said):
    with pytest.raises(InvalidRequestError, match=said) as caught:
        check_grammar(form)
    assert type(caught.value) is kind
    assert caught.value.field == f"structured.{form.kind}" and len(str(caught.value)) < 600
    with pytest.raises(InvalidRequestError):
        chat_grammars().compile(form)


def test_a_form_whose_first_mask_is_too_much_is_refused():
    properties = {f"key{i}": {"type": "string"} for i in range(2000)}
    form = StructuredOutput.json_schema({"type": "object", "properties": properties})
    with pytest.raises(GrammarTooComplexError, match="Current row has"):
        chat_grammars().compile(form)


def test_options_in_a_schema_cannot_loosen_it():
    form = StructuredOutput.json_schema({"not": {}, "x-guidance": {"lenient": True}})
    with pytest.raises(UnsupportedGrammarError, match="Unimplemented"):
        check_grammar(form)


def test_white_space_is_free_but_not_endless():
    form = StructuredOutput.json_schema({"type": "array", "items": {"type": "integer"}})
    after_text(form, "[ 1,\n    2\t]")
    row, _ = after_text(form, "[" + " " * 16)
    ids = {chat_tokenizer().bytes_of(i) for i in allowed_ids(row)}
    assert not any(part.isspace() for part in ids if part) and b"1" in ids


def test_grammars_are_kept(monkeypatch):
    monkeypatch.setattr(grammar, "MAX_KEPT", 3)
    grammars = Grammars(chat_tokenizer(), VOCAB_SIZE, [EOS])
    forms = [StructuredOutput.regex(f"a{{{i}}}") for i in range(1, 6)]
    compiled = [grammars.compile(form) for form in forms[:3]]
    assert grammars.compile(forms[0]) is compiled[0] is grammars.kept(forms[0])
    grammars.compile(forms[3])
    assert grammars.kept(forms[1]) is None, "it was used longest ago"
    assert grammars.kept(forms[0]) is compiled[0] and grammars.kept(forms[2]) is compiled[2]


def test_a_model_without_an_end_is_refused():
    with pytest.raises(UnsupportedGrammarError, match="end-of-sequence"):
        Grammars(chat_tokenizer(), VOCAB_SIZE, []).compile(StructuredOutput.json_object())


def test_without_the_library_a_form_is_refused(monkeypatch):
    monkeypatch.setattr(grammar, "_HAS_LIBRARY", False)
    with pytest.raises(UnsupportedGrammarError, match="llguidance"):
        check_grammar(StructuredOutput.json_object())
    grammars = Grammars(chat_tokenizer(), VOCAB_SIZE, [EOS])
    grammars.prepare()
    with pytest.raises(UnsupportedGrammarError, match=r"pensieve-jax\[structured\]"):
        grammars.compile(StructuredOutput.json_object())


@pytest.mark.parametrize(
    "form",
    [
        {"multipleOf": 9_999_991},
        {"type": "integer", "multipleOf": 1e9},
        {"type": "number", "multipleOf": 99991.5},
        {"allOf": [{"multipleOf": 997}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"multipleOf": 991}}},
        {"properties": {"a": {"items": {"multipleOf": 1e300}}}},
        "start: %json " + json.dumps({"type": "integer", "multipleOf": 9_999_991}),
        'start: %json {"multiple\\u004ff" : 9999991}',
    ],
    ids=str,
)
def test_a_multiple_with_too_many_remainders_is_refused_without_the_library(form, monkeypatch):
    def fail(*_):
        raise AssertionError("the library would take minutes")

    monkeypatch.setattr("llguidance.LLMatcher.validate_grammar_with_warnings", fail)
    is_schema = isinstance(form, dict)
    made = StructuredOutput.json_schema(form) if is_schema else StructuredOutput.grammar(form)
    with pytest.raises(GrammarTooComplexError, match="multipleOf"):
        check_grammar(made)


def test_usual_multiples_are_compiled():
    for value in (1, 0.01, 0.25, 7, 10_000, 1e4, 2.5):
        check_grammar(StructuredOutput.json_schema({"type": "number", "multipleOf": value}))
    both = {
        "properties": {"price": {"multipleOf": 0.01}, "multipleOf": {"const": {"multipleOf": "no number"}}}
    }
    check_grammar(StructuredOutput.json_schema(both))


@pytest.mark.parametrize(
    "text",
    [
        "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
        'root ::= "a\\',
        "root ::= other",
        'root ::= "a"{' + "9" * 5000 + "}",
        "root ::= $",
        "a ::= root",
        "no grammar",
    ],
    ids=lambda text: text[:16],
)
def test_a_wrong_gbnf_grammar_is_a_typed_error(text):
    with pytest.raises(InvalidRequestError) as raised:
        check_grammar(StructuredOutput.grammar(text))
    assert raised.value.field == "structured.grammar"


def test_gbnf_of_too_many_rules_is_refused_before_it_is_converted(monkeypatch):
    def fail(_):
        raise AssertionError("the conversion takes time of the square of the rules")

    monkeypatch.setattr("llguidance.gbnf_to_lark.gbnf_to_lark", fail)
    text = "root ::= a0\n" + "".join(f"a{at} ::= a{at + 1}\n" for at in range(grammar.MAX_GBNF_RULES))
    with pytest.raises(GrammarTooComplexError, match="1001 rules of GBNF"):
        check_grammar(StructuredOutput.grammar(text))


def test_the_notation_is_found_without_the_library_s_pattern(monkeypatch):
    """The pattern of the library takes time of the square of the empty lines, and holds the interpreter."""

    def fail(_):
        raise AssertionError("this takes 15 s for 64 KiB of empty lines")

    monkeypatch.setattr("llguidance.gbnf_to_lark.is_lark_syntax", fail)
    check_grammar(StructuredOutput.grammar('root ::= "a"' + "\n" * 1000))
    check_grammar(StructuredOutput.grammar("\n" * 1000 + ' \tstart: "a"'))
    check_grammar(StructuredOutput.grammar('%llguidance {}\nstart: "a"'))
    for line in grammar._IS_LARK.pattern.split("|"):
        assert r"\s*" not in line


def test_kept_grammars_have_a_limit_of_the_time_that_compiling_took(monkeypatch):
    times = iter(range(100))
    made = Grammars(chat_tokenizer(), VOCAB_SIZE, [EOS])
    made.now_s = lambda: float(next(times))  # each grammar takes 1 s
    monkeypatch.setattr(grammar, "MAX_KEPT_S", 3.0)
    forms = [StructuredOutput.regex(str(number)) for number in range(5)]
    for form in forms:
        made.compile(form)
    assert [made.kept(form) is not None for form in forms] == [False, False, True, True, True]
    monkeypatch.setattr(grammar, "MAX_KEPT_S", 0.5)
    last = StructuredOutput.regex("last")
    made.compile(last)
    assert made.kept(last) is not None
    assert not any(made.kept(form) for form in forms)
