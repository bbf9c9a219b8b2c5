"""Reader of a JSON object that describes a quantized format: no option of it may be left unread.

Owns the readers of single options, and the refusal of options that are unknown. Knows no format.
"""

from typing import Any

from model_defs.errors import UnsupportedModelError

HINT = "use the model's unquantized safetensors, or a version in FP8, compressed-tensors, AWQ or GPTQ"
"""What helps against most refusals."""
OF_TOOLS = (
    *("quant_method", "backend", "modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
    *("exllama_config", "lm_head", "desc_act", "sym", "meta", "tokenizer", "dataset", "damp_percent"),
    *("act_group_aware", "true_sequential", "model_seqlen", "block_name_to_quantize", "batch_size"),
    *("module_name_preceding_first_block", "pad_token_id", "max_input_length", "cache_block_outputs"),
    *("modules_in_block_to_quantize", "use_exllama", "use_cuda_fp16"),
)
"""Options of tools that made the file or run it; they say nothing of how codes become weights."""


class Options:
    """JSON object of a quantized format. A format reads its options, then calls `close`.

    A missing option and null have the same meaning, the default.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        """Read from `values`, which errors call `where`."""
        self.where = where
        self._values = values
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether an option is there and not null."""
        return self._values.get(name) is not None

    def names_of_all(self) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(self._values)

    def value(self, name: str, default: Any = None) -> Any:
        """Return an option of any type."""
        self._read.add(name)
        found = self._values.get(name)
        return default if found is None else found

    def integer(self, name: str, default: int | None = None) -> int:
        """Read an option that is an integer."""
        found = self.value(name, default)
        if type(found) is not int:
            raise UnsupportedModelError(f"{self.where}: {name}={found!r} must be an integer")
        return found

    def boolean(self, name: str, default: bool) -> bool:
        """Read true or false."""
        found = self.value(name, default)
        if not isinstance(found, bool):
            raise UnsupportedModelError(f"{self.where}: {name}={found!r} must be true or false")
        return found

    def text(self, name: str, default: str) -> str:
        """Read a string; the result is in lower case."""
        found = self.value(name, default)
        if not isinstance(found, str):
            raise UnsupportedModelError(f"{self.where}: {name}={found!r} must be a string")
        return found.lower()

    def names(self, name: str) -> tuple[str, ...]:
        """Read a list of strings; missing gives none."""
        found = self.value(name, [])
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise UnsupportedModelError(f"{self.where}: {name}={found!r:.80} must be a list of names")
        return tuple(found)

    def sizes(self, name: str, count: int) -> tuple[int, ...] | None:
        """Read a list of `count` positive integers; missing gives None."""
        found = self.value(name)
        if found is None:
            return None
        are_sizes = isinstance(found, list) and all(type(one) is int and one > 0 for one in found)
        if not are_sizes or len(found) != count:
            raise UnsupportedModelError(
                f"{self.where}: {name}={found!r:.80} must be a list of {count} positive integers"
            )
        return tuple(found)

    def section(self, name: str) -> "Options | None":
        """Read a JSON object; missing gives None."""
        found = self.value(name)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise UnsupportedModelError(f"{self.where}: {name}={found!r:.80} must be an object")
        return Options(found, f"{self.where}: {name}")

    def one_name(self, *names: str) -> str:
        """Return which of the names of one option is there; raise UnsupportedModelError if values differ."""
        there = [name for name in names if self.has(name)] or [names[0]]
        for name in there[1:]:
            if self._values[name] != self._values[there[0]]:
                raise UnsupportedModelError(
                    f"{self.where}: {there[0]}={self._values[there[0]]!r:.60} differs from "
                    f"{name}={self._values[name]!r:.60}, another name of the same option; remove one"
                )
        return there[0]

    def group_size(self, name: str) -> int | None:
        """Read the number of input channels that share a scale; -1, for all of them, gives None."""
        found = self.integer(name, 128)
        if found != -1 and found < 1:
            raise UnsupportedModelError(
                f"{self.where}: {name}={found} must be a positive integer, or -1 for one group"
            )
        return None if found == -1 else found

    def choice(self, name: str, default: str, allowed: tuple[str, ...], what: str) -> str:
        """Read a string that must be one of `allowed`; `what` says in the error what it determines."""
        found = self.text(name, default)
        if found not in allowed:
            raise self.refusal(f"{name}={found!r}", f"{what} must be {' or '.join(allowed)}")
        return found

    def refusal(self, what: str, limit: str) -> UnsupportedModelError:
        """Return the error that refuses `what`."""
        return UnsupportedModelError(f"{self.where}: {what}: {limit}; {HINT}")

    def refuse_set(self, *names: str, what: str) -> None:
        """Refuse each option that is set, to anything but null, false or something empty."""
        for name in names:
            found = self.value(name)
            if found not in (None, False, {}, [], ""):
                raise self.refusal(f"{name}={found!r:.80}", f"{what} is not supported")

    def without_effect(self, *names: str) -> None:
        """Mark options that say nothing of how codes become weights."""
        self._read.update(names)

    def close(self) -> None:
        """Raise UnsupportedModelError if an option was not read: it may change the weights."""
        unread = [name for name in self._values if name not in self._read]
        if unread:
            raise self.refusal(
                ", ".join(f"{name}={self._values[name]!r:.60}" for name in unread),
                "unknown option, which may change the weights",
            )
