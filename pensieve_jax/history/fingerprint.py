"""The identity of a model and tokenizer, which tells whose token ids a history holds.

Owns: how the two become one short string.
Does not know: what the caller puts into the description of a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def history_fingerprint(model: Mapping[str, object], tokenizer_fingerprint: str | None) -> str:
    """Return a string such as `model:3f2a90c1d6e4b705 tokenizer:none`, the same in every process.

    Args:
      model: what determines the meaning of token ids and replies (architecture, sizes, a digest of the
        weights), as JSON values in any order. Leave out what may change between runs, such as dtype and page
        counts.
      tokenizer_fingerprint: `Tokenizer.fingerprint`, or None for a model that serves ids only.
    """
    described = json.dumps(model, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(described.encode()).hexdigest()[:16]
    return f"model:{digest} tokenizer:{tokenizer_fingerprint or 'none'}"
