"""Grammars over a model's tokens: from the form of a reply to the ids that may come next.

Owns: the use of the library llguidance (the extra `structured`), the conversion of tokenizers for it, and the
compiled grammars of one model.
Does not know: requests, batches, devices, or which ids a turn's other options forbid.

The library releases the interpreter's lock while it checks, compiles and fills a mask, so these can run in
threads beside the engine's.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pensieve_jax.core.errors import (
    GrammarFailedError,
    GrammarTooComplexError,
    InvalidRequestError,
    UnsupportedGrammarError,
)
from pensieve_jax.core.structured import WHOLE, StructuredOutput
from pensieve_jax.core.token_masks import WORD_BITS, bit_of, num_words
from pensieve_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_KEPT: Final = 256
MAX_KEPT_S: Final = 2.0
"""Seconds that compiling all kept grammars took, which measure their memory: about 0.1 MB for each ms."""
MAX_MULTIPLE: Final = 10_000
"""Limit of `multipleOf`, as an integer without its decimal point; of several, of their common multiple.

The library makes a state for each remainder: 10 million take 10 s and gigabytes, and cannot be stopped.
"""
MAX_GBNF_RULES: Final = 1000
"""Limit of rules in GBNF. Its conversion is Python code and takes time of the square of their number."""
_ESCAPE_OR_SLASH: Final = re.compile(r"\\.|/", re.DOTALL)
# Masks come from the grammar everywhere. Otherwise the library encodes text that a grammar forces and allows
# the first id alone, which can be that of a control token that the text spells.
_EXACT: Final = '%llguidance {"no_forcing": true}\n'
_MAX_MESSAGE: Final = 300
_MAX_TRIAL_MASKS: Final = 8
_HAS_LIBRARY: Final = importlib.util.find_spec("llguidance") is not None
# A weak model can repeat white space without end, where any amount of it is valid.
_WHITE_SPACE: Final = r"[\x20\x0A\x0D\x09]{1,16}"
# The library's own pattern begins with white space of several lines, and takes 15 s for 60,000 empty ones.
_IS_LARK: Final = re.compile(r"^[^\S\n]*(?:%llguidance\b|start[^\S\n]*:)", re.MULTILINE)
_ASCII_ESCAPE: Final = re.compile(r"\\u00([2-7][0-9a-fA-F])")
_MULTIPLE: Final = re.compile(r'multipleOf"\s*:\s*([-+.0-9eE]+)')
# Words of the library's messages, for what it cannot hold and for what exceeds its limits.
_UNSUPPORTED: Final = (
    *("unimplemented", "not supported", "only supported", "unknown format", "unsupported"),
    "are not disjoint",
)
_CANNOT_SPELL: Final = ("satisfy the grammar", "NoExtensionBias")
_TOO_COMPLEX: Final = ("too complex", "too large", "too many", "max is", "exceeded", "limit", "fuel")


def check_grammar(structured: StructuredOutput) -> None:
    """Raise an error for a form that cannot be compiled for any model. This takes 1 ms, at most about 400.

    Raises:
      InvalidRequestError: the schema, expression or grammar is wrong.
      UnsupportedGrammarError: it has a part that the library does not hold, or the library is missing.
      GrammarTooComplexError: it exceeds the library's limits.
    """
    library = _library(structured)
    is_error, messages = library.LLMatcher.validate_grammar_with_warnings(_source(structured), None)
    if is_error:
        raise _refusal(structured, messages[0] if messages else "it cannot be compiled")


def schema_for_library(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """Return a JSON schema with the library's options, as in `%json` of a Lark grammar.

    They replace options in the schema itself, which could loosen it.
    """
    given = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
    return {**given, "x-guidance": {"whitespace_pattern": _WHITE_SPACE}}


class Grammars:
    """The compiled grammars of one model; threads may share it.

    The most recently used ones are kept: at most 256, and what took at most 2 s to compile.

    Attributes:
      now_s: the clock of compiling, in seconds; a test has its own.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Compile for a model.

        Args:
          tokenizer: the model's tokenizer.
          vocab_size: number of the model's ids, which can be more than the tokenizer's.
          eos_token_ids: the model's end-of-sequence ids; at least one must be in the tokenizer's vocabulary.
        """
        self._tokenizer, self._vocab_size = tokenizer, max(vocab_size, tokenizer.vocab_size)
        # The library refuses ids beyond the tokenizer's. Rows allow all ids that end a turn alike.
        self._eos_token_ids = tuple(one for one in eos_token_ids if one < tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._seconds: dict[StructuredOutput, float] = {}
        self.now_s: Callable[[], float] = time.thread_time

    def prepare(self) -> None:
        """Convert the tokenizer, if the library is installed; the first grammar does so otherwise."""
        if _HAS_LIBRARY:
            self._tokens  # noqa: B018

    def kept(self, structured: StructuredOutput) -> Grammar | None:
        """Return a grammar that was compiled before, or None."""
        with self._lock:
            found = self._kept.get(structured)
            if found is not None:
                self._kept.move_to_end(structured)
            return found

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Return a compiled grammar, whose first mask is known to be within the limits.

        Raises the errors of `check_grammar`.
        """
        found = self.kept(structured)
        if found is None:
            began_s = self.now_s()
            try:
                found = self._compile(structured)
            except InvalidRequestError:
                if structured.frame:  # an error of the form itself names the form
                    self._compile(StructuredOutput(structured.kind, structured.text))
                raise
            seconds = self.now_s() - began_s
            with self._lock:
                self._kept[structured], self._seconds[structured] = found, seconds
                self._drop_oldest()
        return found

    def _drop_oldest(self) -> None:
        """Drop the grammars that were not used for longest, down to the limits; the newest stays."""
        total_s = sum(self._seconds.values())
        while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT or total_s > MAX_KEPT_S):
            oldest, _ = self._kept.popitem(last=False)
            total_s -= self._seconds.pop(oldest)

    def _compile(self, structured: StructuredOutput) -> Grammar:
        library = _library(structured)
        if not self._eos_token_ids:
            raise UnsupportedGrammarError(
                "structured", structured.kind, "None for a model without an end-of-sequence id"
            )
        source = _framed(_source(structured), structured)
        if structured.after:
            source = _behind(source, structured, self._tokenizer)
        matcher = library.LLMatcher(self._tokens, source, log_level=0)
        if matcher.is_error():
            raise _refusal(structured, matcher.get_error())
        if structured.prefill:
            self._begin(structured, matcher)
        self._try(structured, matcher.deep_copy())
        return Grammar(matcher, self._num_words, self._eos_token_ids)

    def _begin(self, structured: StructuredOutput, matcher: llguidance.LLMatcher) -> None:
        """Read the text with which the reply begins; raise an error if the form does not begin with it."""
        token_ids = self._tokenizer.encode_after(None, structured.prefill)
        if matcher.try_consume_tokens(token_ids) < len(token_ids):
            raise InvalidRequestError(
                "structured.prefill", structured.prefill, "the beginning of a text that has the reply's form"
            )

    def _try(self, structured: StructuredOutput, matcher: llguidance.LLMatcher) -> None:
        """Fill the first masks, behind text that the grammar forces as well; raise an error if one fails."""
        words = np.zeros((1, self._num_words), np.int32)
        for number in range(_MAX_TRIAL_MASKS):
            if matcher.is_stopped() and not matcher.is_error():
                return
            _fill(matcher, words)
            if matcher.is_error():
                raise _refusal(structured, matcher.get_error())
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            bits[list(self._eos_token_ids)] = 0
            if not bits.any() or (number and not matcher.compute_ff_bytes()):
                return
            matcher.consume_token(int(bits.argmax()))
            if matcher.is_error():
                raise _refusal(structured, matcher.get_error())

    @functools.cached_property
    def _tokens(self) -> llguidance.LLTokenizer:
        import llguidance

        eos = list(self._eos_token_ids)
        try:
            text = _without_prefix_space(self._tokenizer.as_json())
            return llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
        except ValueError:  # a kind of tokenizer that the library does not read: give it each token's bytes
            tokens: Any = llguidance.TokenizerWrapper(_TokenBytes(self._tokenizer, eos[0]))
            return llguidance.LLTokenizer(tokens, n_vocab=self._vocab_size, eos_token=eos)

    @property
    def _num_words(self) -> int:
        return num_words(self._vocab_size)


class Grammar:
    """A compiled grammar, from which each turn gets a copy."""

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._eos_token_ids = eos_token_ids

    def row(self, ending_ids: Sequence[int], min_tokens: int) -> GrammarRow:
        """Return the masks of a new turn that ends with one of `ending_ids`, not before `min_tokens`."""
        return GrammarRow(
            self._matcher.deep_copy(), self._num_words, self._eos_token_ids[0], ending_ids, min_tokens
        )


class GrammarRow:
    """The masks of one turn with a grammar; see `engine.late_rows.LateRow`.

    All ids that end the turn are allowed exactly where the grammar accepts the text so far, and nothing else
    where it can only end. An id of `stop_token_ids` that is text is also allowed where the grammar allows
    this text. Before `min_tokens`, ids that end the turn are allowed only if nothing else is.
    """

    waits: Final = True

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        num_words: int,
        eos_token_id: int,
        ending_ids: Sequence[int],
        min_tokens: int,
    ) -> None:
        self._matcher = matcher
        self._words = np.zeros((1, num_words), np.int32)
        self._eos = divmod(eos_token_id, WORD_BITS)
        self._ending_ids = frozenset(ending_ids)
        self._ending_words = np.zeros(num_words, np.uint32)
        for token_id in self._ending_ids:
            self._ending_words[token_id // WORD_BITS] |= bit_of(token_id)
        self._min_tokens = min_tokens
        self._num_accepted = 0
        self._has_ended = False

    def accept(self, token_id: int) -> None:
        """Continue with the next id of the reply; raises GrammarFailedError."""
        self._num_accepted += 1
        if token_id in self._ending_ids:
            self._has_ended = True
        elif not self._has_ended and not self._matcher.consume_token(token_id):
            raise self._failure()

    def fill(self, words: np.ndarray) -> bool:
        """Clear the bits of ids that may not come next; see `LateRow`. Raises GrammarFailedError."""
        if self._has_ended:
            return False  # the reply is complete; this row's id is discarded
        matcher, found = self._matcher, self._words
        if matcher.is_stopped():
            if matcher.is_error():
                raise self._failure()
            found[0] = 0
            accepts = True
        else:
            _fill(matcher, found)
            if matcher.is_error():
                raise self._failure()
            word, bit = self._eos
            accepts = bool(int(found[0, word]) >> bit & 1)
        allowed, ending = found[0].view(np.uint32), self._ending_words
        if self._num_accepted < self._min_tokens:
            allowed &= ~ending
            if accepts and not allowed.any():
                allowed |= ending
        elif accepts:
            allowed |= ending
        words &= found[0, : len(words)]
        return True

    def _failure(self) -> GrammarFailedError:
        return GrammarFailedError(
            f"the grammar failed after {self._num_accepted} tokens of the reply: "
            f"{_shortened(self._matcher.get_error())}"
        )


class _TokenBytes:
    """The tokens of a tokenizer as bytes, for a kind that the library does not read."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_id
        parts = [tokenizer.bytes_of(token_id) for token_id in range(tokenizer.vocab_size)]
        for token_id in tokenizer.mark_ids:
            parts[token_id] = None
        # An id without text, or of an unknown part of a character, is one that no grammar can allow.
        self.special_token_ids = [token_id for token_id, part in enumerate(parts) if not part]
        self.tokens = [part or f"<[{token_id}]>".encode() for token_id, part in enumerate(parts)]
        self._ids = {part: token_id for token_id, part in enumerate(parts) if part}
        self._max_bytes = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Return ids that spell a text, each the longest possible; the text is one that a grammar forces."""
        token_ids, start = [], 0
        while start < len(text):
            for end in range(min(start + self._max_bytes, len(text)), start, -1):
                token_id = self._ids.get(text[start:end])
                if token_id is not None:
                    token_ids.append(token_id)
                    start = end
                    break
            else:
                return token_ids  # no token spells this byte
        return token_ids


def _without_prefix_space(text: str) -> str:
    """Return a tokenizer.json whose byte-level encoding adds no space before a text.

    The library encodes text in the middle of a reply, where such a space would be wrong.
    """
    found = json.loads(text)
    parts = [found["pre_tokenizer"] or {}]
    while parts:
        part = parts.pop()
        parts += part.get("pretokenizers", ())
        if part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False
    return json.dumps(found, ensure_ascii=False)


def _library(structured: StructuredOutput) -> Any:
    if not _HAS_LIBRARY:
        raise UnsupportedGrammarError(
            "structured", structured.kind, "None without llguidance", 'pip install "pensieve-jax[structured]"'
        )
    import llguidance

    return llguidance


def _fill(matcher: llguidance.LLMatcher, words: np.ndarray) -> None:
    """Write the ids that may come next to `words`, i32[1, W]."""
    from llguidance.numpy import fill_next_token_bitmask

    fill_next_token_bitmask(matcher, words, 0)


def _source(structured: StructuredOutput) -> str:
    """Return a form as the library's own JSON."""
    from llguidance import regex_to_lark

    text = structured.text
    match structured.kind:
        case "json_schema":
            schema = json.loads(text)
            _check_multiples(structured, _multiples(schema))
            return _grammars({"json_schema": schema_for_library(schema)})
        case "json_object":
            return _grammars({"json_schema": schema_for_library({"type": "object"})})
        case "regex":
            # "\d" is [0-9], as in other servers. A slash ends an expression of Lark, and the library's own
            # escape of one loses a backslash before it.
            pattern = regex_to_lark(_ESCAPE_OR_SLASH.sub(_without_slash, text), "d")
            return _grammars({"lark_grammar": f"start: /{pattern}/"})
        case "choice":
            choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in structured.choices)
            return _grammars({"lark_grammar": f"start: {choices}"})
        case "grammar":
            rules = text if _IS_LARK.search(text) else _lark_of_gbnf(structured)
            _check_multiples(structured, _multiples_of_rules(rules))
            return _grammars({"lark_grammar": rules})


def _lark_of_gbnf(structured: StructuredOutput) -> str:
    """Return a grammar of llama.cpp's notation in Lark's; raises an error for a wrong one."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    num_rules = structured.text.count("::=")
    if num_rules > MAX_GBNF_RULES:
        raise GrammarTooComplexError(
            "structured.grammar", f"{num_rules} rules of GBNF", f"at most {MAX_GBNF_RULES} rules"
        )
    try:
        converted: str = gbnf_to_lark(structured.text)
    except RecursionError as error:
        raise GrammarTooComplexError("structured.grammar", structured.text, "nested less deeply") from error
    except (
        Exception
    ) as error:  # the converter raises Exception itself, and IndexError where a text ends early
        limit = f"a grammar in Lark's or GBNF's notation ({_shortened(str(error))})"
        raise InvalidRequestError("structured.grammar", structured.text, limit) from error
    return converted


def _multiples(schema: Any) -> Iterator[float | str]:
    """Yield the values of `multipleOf` in a schema."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            value = part.get("multipleOf")
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _multiples_of_rules(rules: str) -> list[str]:
    """Return the values of `multipleOf` in the schemas of a grammar in Lark's notation."""
    found: list[str] = _MULTIPLE.findall(_ASCII_ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), rules))
    return found


def _check_multiples(structured: StructuredOutput, values: Iterable[float | str]) -> None:
    """Raise GrammarTooComplexError for values of `multipleOf` that take too many states together."""
    common = 1
    for value in set(values):
        try:
            number = Decimal(str(value)).normalize()
        except ArithmeticError:
            continue  # no number, which the library refuses
        _, digits, exponent = number.as_tuple()
        if not isinstance(exponent, int) or not number:
            continue
        too_large = len(digits) + max(exponent, 0) > len(str(MAX_MULTIPLE))
        if not too_large:
            common = math.lcm(common, int("".join(map(str, digits))) * 10 ** max(exponent, 0))
        if too_large or common > MAX_MULTIPLE:
            limit = f"with a common multiple of all values of multipleOf of at most {MAX_MULTIPLE}"
            raise GrammarTooComplexError(_subject(structured)[0], f"multipleOf {value}", limit)


def _without_slash(found: re.Match[str]) -> str:
    return r"\x2F" if found[0] in ("/", r"\/") else found[0]


def _grammars(*parts: dict[str, Any]) -> str:
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def _framed(source: str, structured: StructuredOutput) -> str:
    """Return the grammar of a form's frame, with the form in it; without a frame, the form is the whole."""
    (form,) = json.loads(source)["grammars"]
    _check_multiples(structured, _multiples_of_rules(structured.frame))
    return _grammars({"lark_grammar": _EXACT + (structured.frame or WHOLE)}, {**form, "name": "form"})


def mark_in_lark(tokenizer: Tokenizer, mark: str) -> str:
    """Return a mark in Lark's notation: a token of its own by its id, or text."""
    mark_id = tokenizer.mark_id(mark)
    return json.dumps(mark, ensure_ascii=False) if mark_id is None else f"<[{mark_id}]>"


def text_without(*marks: str) -> str:
    """Return a lexeme in Lark's notation: any text that spells none of these marks.

    A mark that is a token ends a text by its id, but replies are read as text, where both look alike.
    """
    spelled = " | ".join(json.dumps(mark, ensure_ascii=False) for mark in marks)
    return f"(/(.|\\n)*/ & ~(/(.|\\n)*/ ({spelled}) /(.|\\n)*/))"


def _behind(source: str, structured: StructuredOutput, tokenizer: Tokenizer) -> str:
    """Return a grammar that begins behind any text and the mark `after`, and the white space behind that.

    With an `opening`, the text begins with it, or all of this is left out.
    """
    body, *others = json.loads(source)["grammars"]
    mark = mark_in_lark(tokenizer, structured.after)
    opening = structured.opening and mark_in_lark(tokenizer, structured.opening)
    # An opening of text is one lexeme with the thought. Alone, it would give way to a longer lexeme of a body
    # whose text may begin with it, and the mark could not end that.
    token, text = ("", opening) if opening.startswith('"') else (opening, "")
    if tokenizer.mark_id(structured.after) is None:
        reasoning = f"reasoning[suffix={mark}]: THOUGHT"
    else:
        reasoning = f"reasoning: THOUGHT {mark}"
    before = f"({token} reasoning space)?" if opening else "reasoning space"
    thought, space = f"THOUGHT: {text} {text_without(structured.after)}", "space: /[ \\t\\r\\n]{0,16}/"
    rules = [f"start: {before} @body", reasoning, thought, space]
    return _grammars({"lark_grammar": _EXACT + "\n".join(rules)}, {**body, "name": "body"}, *others)


def _subject(structured: StructuredOutput) -> tuple[str, str]:
    """Return the field that an error is about, and its value: a frame, if there is one, or the form."""
    if structured.frame:
        return "structured.frame", structured.frame
    return f"structured.{structured.kind}", structured.text


def _refusal(structured: StructuredOutput, message: str) -> InvalidRequestError:
    """Return the error for a message of the library."""
    short, lowered = _shortened(message), message.lower()
    field, value = _subject(structured)
    if any(words in message for words in _CANNOT_SPELL):
        return UnsupportedGrammarError(field, value, "text that the model's tokens can spell")
    if any(words in lowered for words in _UNSUPPORTED):
        return UnsupportedGrammarError(field, value, f"within what the grammar library holds ({short})")
    if any(words in lowered for words in _TOO_COMPLEX):
        return GrammarTooComplexError(field, value, f"simpler ({short})")
    return InvalidRequestError(field, value, f"valid ({short})")


def _shortened(message: str) -> str:
    """Return the message without the library's dump of its state."""
    first = message.split("<state>", 1)[0]
    return " ".join(first.split())[:_MAX_MESSAGE]
