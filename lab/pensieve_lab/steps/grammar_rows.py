"""Decoding steps in which a share of the rows must follow a JSON schema, and the tokenizer for them.

Owns: the schemas, a tokenizer learned from this checkout's own text, and timing an engine's steps.
Does not know: how masks are made, or how figures are shown.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from pensieve_jax import SamplingParams
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Turn
from pensieve_jax.text import Tokenizer, load_tokenizer
from pensieve_lab.chat_training.tokenizer import learn_tokenizer, save_tokenizer

_TEXT: Final = {"pensieve_jax": "*.py", "model_defs": "*.py", "tests": "*.py", "docs": "*.md", "lab": "*.py"}
_MIN_ITEMS: Final = 400  # no reply of a measurement gets this far, so all rows decode to the end
_NUM_SETTLING_STEPS: Final = 8
_ITEMS: Final[tuple[dict[str, Any], ...]] = (
    {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    {
        "id": {"type": "string", "format": "uuid"},
        "price": {"type": "number"},
        "in_stock": {"type": "boolean"},
    },
    {
        "city": {"type": "string"},
        "date": {"type": "string", "format": "date"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    {"path": {"type": "string", "pattern": "^(/[a-z0-9_]+)+$"}, "line": {"type": "integer", "minimum": 1}},
    {
        "question": {"type": "string"},
        "answers": {"type": "array", "items": {"type": "string"}},
        "right": {"type": "integer"},
    },
    {"from": {"type": "string"}, "to": {"type": "string"}, "weight": {"type": ["number", "null"]}},
    {
        "tool": {"const": "search"},
        "arguments": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
    {
        "title": {"type": "string"},
        "year": {"type": "integer"},
        "genre": {"enum": ["drama", "comedy", "documentary"]},
    },
)


def schemas() -> list[str]:
    """Return JSON schemas of long lists of objects, each of another kind."""
    return [
        json.dumps(
            {
                "type": "array",
                "minItems": _MIN_ITEMS,
                "items": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                },
            }
        )
        for properties in _ITEMS
    ]


def checkout_text(root: Path) -> Iterator[str]:
    """Yield the text of the checkout's sources and pages, file by file in the order of their paths."""
    for folder, pattern in _TEXT.items():
        for path in sorted((root / folder).rglob(pattern)):
            yield path.read_text(encoding="utf-8")


def learned_tokenizer(vocab_size: int, root: Path) -> Tokenizer:
    """Return a tokenizer of at most `vocab_size` ids, learned from the checkout at `root`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(learn_tokenizer(checkout_text(root), vocab_size), folder, 1 << 20)
        tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def decode(
    engine: Engine, num_rows: int, num_grammars: int, *, prompt_tokens: int, num_steps: int, seed: int
) -> list[float]:
    """Return the seconds of each of `num_steps` steps in which all rows decode.

    Args:
      engine: idle.
      num_rows: rows of a step.
      num_grammars: how many of them are held to a schema, spread evenly.
      prompt_tokens: random ids of each prompt.
      num_steps: steps that are timed.
      seed: of prompts and of the rows' sampling.
    """
    random, texts = np.random.default_rng(seed), schemas()
    vocab_size = engine.limits.vocab_size
    specs = []
    for row in range(num_rows):
        has_grammar = (row + 1) * num_grammars // num_rows > row * num_grammars // num_rows
        params = SamplingParams(
            max_tokens=num_steps + 4 * _NUM_SETTLING_STEPS + num_rows,
            temperature=1.0,
            seed=seed * num_rows + row,
            ignore_eos=not has_grammar,
            structured=StructuredOutput("json_schema", texts[row % len(texts)]) if has_grammar else None,
        )
        specs.append(TurnSpec(random.integers(3, vocab_size, prompt_tokens).tolist(), params))
    turns: list[Turn] = engine.submit(specs)
    while not all(turn.token_ids for turn in turns):
        engine.step()
    for _ in range(_NUM_SETTLING_STEPS):
        engine.step()
    step_s = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        engine.step()
        step_s.append(time.perf_counter() - start_s)
    for turn in turns:
        assert not turn.done, f"a reply ended early: {turn.output if turn.error is None else turn.error}"
        engine.cancel(turn)
    while engine.has_unfinished:
        engine.step()
    return step_s
