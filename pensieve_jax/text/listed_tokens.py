"""Tokens that a model directory lists outside the tokenizer's vocabulary, and their addition to it.

Owns: which files list tokens, which file takes precedence, and that a listed token has its listed id.
Does not know: how a vocabulary is read, or what tokens mean to a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.text.json_files import read_json

_CONFIG, _ADDED, _MAP = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
_NAMED_FIRST: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The order in which transformers adds named tokens; others follow."""
_EXTRA: Final = ("additional_special_tokens", "extra_special_tokens")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


class ListedTokens:
    """What the files of a directory say of tokens, read as transformers reads them.

    Some tokens have a name, such as "eos_token". tokenizer_config.json names them, and
    special_tokens_map.json, which takes precedence unless the former has `added_tokens_decoder`. With that,
    the map only completes it, as `defaults` do.
    """

    def __init__(self, folder: Path, config: dict[str, Any], defaults: Mapping[str, str]) -> None:
        """Read the files.

        Args:
          folder: directory of the model.
          config: content of tokenizer_config.json.
          defaults: tokens by name, for names that no file has.

        Raises ConfigError naming a file.
        """
        self._folder = folder
        special = read_json(folder / _MAP)
        self._has_decoder = config.get("added_tokens_decoder") is not None
        own = config
        if not self._has_decoder:
            others = {name: value for name, value in config.items() if name not in _NAMED_FIRST}
            texts = {name: value for name, value in others.items() if isinstance(value, str)}
            own = config | special | texts
        values = {**defaults, **special, **own}
        self._completed = values.keys() - own.keys()
        ordered = dict.fromkeys((*_NAMED_FIRST, *(name for name in values if name.endswith("_token"))))
        found = {name: self._token(values.get(name), special=True) for name in ordered}
        for name in _NAMED_FIRST:
            if found[name] is None and values.get(name) not in (None, ""):
                file = _CONFIG if name in config else _MAP
                raise ConfigError(f"{folder / file}: {name}", values[name], "a token's text, or null")
        self._named: dict[str, AddedToken] = {
            name: token for name, token in found.items() if token is not None
        }
        own_extra = list(self._extra_tokens(config))
        self._extra = own_extra or list(self._extra_tokens(special))
        if self._has_decoder:
            self._declared = dict(self._decoder_tokens(config["added_tokens_decoder"]))
        else:
            named = [self._named[name] for name in _NAMED_FIRST if name in self._named and name in own]
            contents = {token.content for token in (*named, *own_extra)}
            self._declared = dict(self._added_tokens(read_json(folder / _ADDED), contents))

    def add_to(self, backend: tokenizers.Tokenizer, *, resets_flags: bool) -> dict[str, str]:
        """Add all tokens to `backend`, with their flags, and return the texts of tokens by name.

        Tokens that name an id come first, in the order of ids; then those without one take the next ids.
        With `resets_flags`, named and extra tokens end up special and without other flags. Raises ConfigError
        for a token that would get another id than the listed one.
        """
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        ordered = [self._declared[token_id] for token_id in sorted(self._declared)]
        # added_tokens.json has no flags, so those of tokenizer.json stay.
        backend.add_tokens([token for token in ordered if self._has_decoder or token.content not in known])
        for token_id, token in self._declared.items():
            found = backend.token_to_id(token.content)
            if found != token_id:
                raise ConfigError(
                    str(self._folder / (_CONFIG if self._has_decoder else _ADDED)),
                    f"{token.content!r} with id {token_id}",
                    f"a token with the id that the vocabulary gives it, {found}",
                    "fetch the tokenizer's files again, all from one revision",
                )
        # transformers would add a default that the vocabulary lacks, with an id that no model has.
        named = {
            name: token
            for name, token in self._named.items()
            if name not in self._completed or backend.token_to_id(token.content) is not None
        }
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        mark_special(backend, named.values())
        backend.add_tokens([token for token in self._extra if token.content not in known])
        if resets_flags:
            contents = [token.content for token in (*named.values(), *self._extra)]
            backend.add_tokens([AddedToken(content, special=True) for content in contents])
        return {name: token.content for name, token in named.items()}

    def _token(self, value: Any, *, special: bool, normalized: bool | None = None) -> AddedToken | None:
        """Return the token of a value in a file: its text, or an object with flags; None for other values."""
        flags: dict[str, Any] = {} if normalized is None else {"normalized": normalized}
        if isinstance(value, dict):
            flags |= {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
            value = value.get("content")
        if not isinstance(value, str) or not value:
            return None
        return AddedToken(value, **({**flags, "special": True} if special else flags))

    def _extra_tokens(self, values: Mapping[str, Any]) -> Iterable[AddedToken]:
        for name in _EXTRA:
            listed = values.get(name) or []
            if not isinstance(listed, list | dict):
                raise ConfigError(f"{self._folder / _CONFIG}: {name}", listed, "a list of tokens")
            for value in listed.values() if isinstance(listed, dict) else listed:
                token = self._token(value, special=True)
                if token is not None:
                    yield token

    def _decoder_tokens(self, decoder: Any) -> Iterable[tuple[int, AddedToken]]:
        """Return the tokens of `added_tokens_decoder` by id."""
        field = f"{self._folder / _CONFIG}: added_tokens_decoder"
        if not isinstance(decoder, dict):
            raise ConfigError(field, decoder, "an object of tokens by id")
        names = {token.content for token in self._named.values()}
        for key, value in decoder.items():
            content = value.get("content") if isinstance(value, dict) else None
            token = self._token(value, special=content in names)
            if token is None or not key.isdecimal():
                raise ConfigError(f"{field}[{key!r}]", value, "a token with `content`, by its id")
            yield int(key), token

    def _added_tokens(self, ids: Mapping[str, Any], names: set[str]) -> Iterable[tuple[int, AddedToken]]:
        """Return the tokens of added_tokens.json by id. It has no flags; `names` are the special tokens."""
        for content, token_id in ids.items():
            token = self._token(content, special=content in names, normalized=content not in names)
            if token is None or type(token_id) is not int:
                raise ConfigError(f"{self._folder / _ADDED}: {content!r}", token_id, "the id of a token")
            yield token_id, token


def mark_special(backend: tokenizers.Tokenizer, tokens: Iterable[AddedToken]) -> None:
    """Add special tokens to `backend`. One that it has keeps its other flags, such as `rstrip`."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    added: list[AddedToken] = []
    for token in {repr(token): token for token in tokens}.values():
        found = known.get(token.content)
        if found is None:
            added.append(token)
        elif not found.special:
            flags = {name: getattr(found, name) for name in _FLAGS if name != "special"}
            added.append(AddedToken(found.content, special=True, **flags))
    backend.add_tokens(added)
