"""Draws where the chunks of one conversation are, turn by turn, while others need memory.

    python -m pensieve_lab.programs.draw_tiers --plot=tiers.png --json=tiers.json
    python -m pensieve_lab.programs.draw_tiers --plot=tiers.png --document=tiers.json  # without a run

A tiny model serves one conversation. Between its turns it serves more and more turns of others, each of them
the first of its conversation. Both tiers together are too small for all. After every turn the program asks
where each chunk of the one conversation is (`llm.explain`): that is a column of the picture. In the
column of the conversation's own turn, its chunks are coloured by where that turn found them. A table says the
same in tokens. The last line is one JSON document (see `--json`), from which the picture can be drawn again.
The exit status is 1 if some kind of place did not occur.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from absl import flags

from model_defs import preset
from pensieve_jax import (
    LLM,
    CacheConfig,
    ConfigError,
    EngineConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
    Usage,
)
from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_lab.pages.result_documents import read_documents

FLAGS = flags.FLAGS
KIND = "tier_places"
MODEL: Final = "random:opt-tiny"
CHUNK_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 32, 16
GPU_PAGES, CPU_PAGES = 30, 30
NUM_OTHERS = (1, 3, 6, 9, 12, 16, 20)
"""Turns of other conversations after each turn of the drawn one."""
_NAME = "drawn"
_DEVICE, _BOTH, _HOST, _DROPPED = "gbcd"
_COPIED_IN, _RECOMPUTED, _NONE = "ir "
_COLORS = {
    _NONE: ("", "#FFFFFF"),
    _DEVICE: ("in device memory", "#0072B2"),
    _BOTH: ("in device memory, with a copy in host memory", "#56B4E9"),
    _HOST: ("in host memory", "#E69F00"),
    _DROPPED: ("dropped", "#D9D9D9"),
    _COPIED_IN: ("copied back to device memory by this turn", "#009E73"),
    _RECOMPUTED: ("recomputed by this turn", "#D55E00"),
}
"""Legend and colour of each letter; Okabe and Ito's colours, told apart with any kind of colour vision."""
_UNITS = {
    "columns": f"a letter per chunk after each turn: {_DEVICE} on the device, {_BOTH} in both tiers, "
    f"{_HOST} in host memory, {_DROPPED} dropped",
    "turns": "turns of the drawn conversation: the column of each, and its usage in tokens",
    "num_others": "turns of other conversations after each of these but the last",
}


def config() -> EngineConfig:
    """Return an engine whose tiers together hold fewer chunks than all conversations have."""
    return EngineConfig(
        cache=CacheConfig(gpu_pages=GPU_PAGES, cpu_pages=CPU_PAGES, chunk_tokens=CHUNK_TOKENS),
        scheduler=SchedulerConfig(max_num_running=2, max_num_batched_tokens=128, token_buckets=(8, 128)),
        runner=RunnerConfig(max_logprobs=1, max_num_staged_pages=8),
    )


def places(llm: LLM) -> str:
    """Return a letter per chunk of the drawn conversation: where it is now."""
    letters = {"cpu": _HOST, None: _DROPPED}
    return "".join(
        letters.get(chunk.tier) or (_BOTH if "with a copy" in str(chunk.place) else _DEVICE)
        for chunk in llm.explain(_NAME).chunks
    )


def serve() -> dict[str, Any]:
    """Serve all turns, and return the places after each one and the usage of each drawn turn."""
    random = np.random.default_rng(0)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    columns: list[str] = []
    turns: list[dict[str, Any]] = []
    names = (f"other-{number}" for number in itertools.count())

    def take_turn(llm: LLM, name: str) -> Usage:
        prompt = random.integers(3, preset(MODEL.removeprefix("random:")).vocab_size, PROMPT_TOKENS)
        (output,) = llm.generate([prompt.tolist()], params, conversation_ids=[name])
        columns.append(places(llm))
        return output.usage

    with LLM(MODEL, config=config(), dtype="float32", progress=False) as llm:
        for num_others in (*NUM_OTHERS, 0):
            turns.append({"column": len(columns), **dataclasses.asdict(take_turn(llm, _NAME))})
            for name in itertools.islice(names, num_others):
                take_turn(llm, name)
    return {"chunk_tokens": CHUNK_TOKENS, "columns": columns, "turns": turns}


def colored(results: Mapping[str, Any]) -> list[str]:
    """Return the columns, those of drawn turns with the letters of where each turn found its chunks.

    Raises:
      KeyError, TypeError: the results are not those of `serve`.
    """
    columns: list[str] = list(results["columns"])
    for turn in results["turns"]:
        number = turn["column"]
        before = columns[number - 1] if number else ""
        # The last chunk before the turn may have been partly filled; the turn computes the rest of it.
        found = before.translate({ord(_HOST): _COPIED_IN, ord(_DROPPED): _RECOMPUTED, ord(_BOTH): _DEVICE})
        columns[number] = found + _DEVICE * (len(columns[number]) - len(found))
    return columns


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw a column per turn and a row per chunk; raises OSError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns, size = colored(results), results["chunk_tokens"]
    num_chunks = max(map(len, columns))
    pixels = np.array(
        [[to_rgb(_COLORS[letter][1]) for letter in one.ljust(num_chunks, _NONE)] for one in columns]
    )
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    corners = (0, len(columns), 0, num_chunks * size)
    axes.imshow(pixels.swapaxes(0, 1), aspect="auto", origin="lower", extent=corners, interpolation="nearest")
    axes.set_xlabel("turns of all conversations, in their order")
    axes.set_ylabel("position in the conversation, tokens")
    axes.set_yticks(range(0, num_chunks * size + 1, 4 * size))
    axes.yaxis.grid(color="white", linewidth=0.5)
    for index, turn in enumerate(results["turns"], 1):
        axes.axvline(turn["column"], color="black", linewidth=0.8)
        axes.axvline(turn["column"] + 1, color="black", linewidth=0.8)
        label = (turn["column"] + 0.5, 1.02)
        axes.annotate(str(index), label, xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    axes.set_title("turns of the conversation", fontsize=9, pad=18)
    patches = [Patch(color=color, label=label) for label, color in _COLORS.values() if label]
    figure.legend(handles=patches, frameon=False, fontsize=8, ncols=2, loc="outside lower center")
    figure.savefig(path, dpi=150)


def usage_table(turns: Sequence[Mapping[str, Any]]) -> str:
    """Format where each drawn turn found its tokens."""
    names = ("reused_gpu_tokens", "swapped_in_tokens", "recomputed_tokens", "prefilled_tokens")
    return table(("turn", *names), [(i, *(turn[name] for name in names)) for i, turn in enumerate(turns, 1)])


def read(path: str) -> dict[str, Any]:
    """Return the results of a document; raises ConfigError for another file."""
    try:
        (document,) = read_documents(Path(path))
        if document["benchmark"] != KIND:
            raise ValueError(f"a document of {document['benchmark']}")
        results: dict[str, Any] = document["results"]
        colored(results)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("--document", path, "a file that --json wrote", str(error)) from error
    return results


def main() -> int:
    """Draw, and return the exit status."""
    if FLAGS.plot is None:
        raise ConfigError("--plot", None, "the picture's file, such as tiers.png")
    check_can_plot("--plot", Path(FLAGS.plot))
    results = serve() if FLAGS.document is None else read(FLAGS.document)
    draw(results, Path(FLAGS.plot))
    print(usage_table(results["turns"]))
    missing = _COLORS.keys() - {_NONE} - set("".join(colored(results)))
    for letter in sorted(missing):
        print(f"no chunk was {_COLORS[letter][0]}")
    if FLAGS.document is None:
        settings = {"model": MODEL, "gpu_pages": GPU_PAGES, "cpu_pages": CPU_PAGES, "num_others": NUM_OTHERS}
        print_document(json_line(KIND, settings | results, units=_UNITS, device=device_name()))
    return EXIT_FAILED if missing else 0


def define_flags() -> None:
    """Define the command-line flags."""
    flags.DEFINE_string("plot", None, "File of the picture, such as tiers.png.")
    flags.DEFINE_string("document", None, "Draw the picture of this document, without a run.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
