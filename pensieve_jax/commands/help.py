"""Text of `--help`: the launcher's docstring, and its own flags with their defaults, by group.

Owns: the groups of flags, required flags, the layout, and the help flags. These replace absl's help flags,
which exit with status 1 and sort flags by letter, not by group.
Does not know: the meaning of a flag.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from absl import flags

import pensieve_jax

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
_OWN = "flags"
_ENDING = "--helpfull lists the flags of every library, too; --flagfile=FILE reads flags from a file."
_REPEATED = ";\n    repeat this option to specify a list of values"  # absl's text
_PLAIN = ("an integer", "a number")  # absl's syntax hints that add nothing
_required: weakref.WeakSet[flags.Flag] = weakref.WeakSet()
_groups: weakref.WeakKeyDictionary[flags.Flag, str] = weakref.WeakKeyDictionary()


def flag_group[**P](title: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a function so that the flags it defines form group `title`; inner groups keep their flags."""

    def decorate(define: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(define)
        def define_group(*args: P.args, **kwargs: P.kwargs) -> None:
            before = set(FLAGS)
            define(*args, **kwargs)
            for name in FLAGS:
                if name not in before:
                    _groups.setdefault(FLAGS[name], title)

        return define_group

    return decorate


def require(*names: str) -> None:
    """Make flags, which must be defined already, required."""
    _required.update(FLAGS[name] for name in names)


def missing_flags() -> list[str]:
    """Return one line for each required flag that is missing, with its help; call it after parsing."""
    flags_in_order = [FLAGS[name] for name in FLAGS if FLAGS[name] in _required]
    return [f"--{flag.name} is missing: {flag.help}" for flag in flags_in_order if flag.value is None]


def help_text(docstring: str) -> str:
    """Return the help of the running program: the docstring, then its flags in the order of definition."""
    by_group: dict[str, list[str]] = {_OWN: []}
    for flag in FLAGS.get_key_flags_for_module(sys.argv[0]):
        by_group.setdefault(_groups.get(flag, _OWN), []).append(_entry(flag))
    parts = [docstring.strip()] if docstring.strip() else []
    parts += ["\n".join([f"{title}:", *entries]) for title, entries in by_group.items() if entries]
    return "\n\n".join([*parts, _ENDING])


def full_help_text(docstring: str) -> str:
    """Return the docstring and absl's help for all flags, including those of libraries."""
    return f"{docstring.strip()}\n{FLAGS.get_help()}".strip()


def define_help_flags(docstring: str, show: Callable[[str], int]) -> None:
    """Define the help flags, which call `show` with a text and exit with the status that it returns."""
    texts = {"help": help_text, "helpshort": help_text, "h": help_text, "helpfull": full_help_text}
    for name, text in texts.items():
        short_name = "?" if name == "help" else None
        FLAGS[name] = _HelpFlag(name, short_name, functools.partial(text, docstring), show)


def define_version_flag(show: Callable[[str], int]) -> None:
    """Define `--version`, which calls `show` with the library's version and exits."""
    FLAGS["version"] = _HelpFlag(
        "version", None, lambda: pensieve_jax.__version__, show, "Print the version."
    )


class _HelpFlag(flags.BooleanFlag):
    """Flag that prints a text and exits when it is parsed. It replaces a flag of the same name."""

    def __init__(
        self,
        name: str,
        short_name: str | None,
        text: Callable[[], str],
        show: Callable[[str], int],
        what: str = "Print this text.",
    ) -> None:
        super().__init__(name, False, what, short_name=short_name, allow_override=True)
        self._text, self._show = text, show

    def parse(self, argument: Any) -> None:
        """Print the text and exit, if the value is true."""
        if self.parser.parse(argument):
            sys.exit(self._show(self._text()))


def _entry(flag: flags.Flag) -> str:
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    shown = flag.default_as_str or ""
    default = "" if shown == "'[]'" else shown[1:-1]  # without absl's quotes
    syntax = "" if flag.parser.syntactic_help in _PLAIN else flag.parser.syntactic_help
    notes = [f"default: {default}" if default else "", syntax, "required" if flag in _required else ""]
    notes.append("may be given several times" if isinstance(flag, flags.MultiFlag) else "")
    details = "; ".join(each for each in notes if each)
    text = f"{name}: {(flag.help or '').removesuffix(_REPEATED)}" + (f" ({details})" if details else "")
    return str(flags.text_wrap(text, indent="      ", firstline_indent="  "))
