"""Compares rules that choose one of many replicas for a turn, on simulated fleets.

    python -m pensieve_lab.programs.study_balance --out=lab/results \\
        --traces=mooncake:mooncake_conversation.jsonl.gz,\
agent-sessions:agent_sessions.jsonl.gz,burstgpt:burstgpt_sessions.jsonl

Each part of `--parts` writes one document, `balance_<part>.json`:
  tuning   parameters of the rules, on loads and seeds that are used for nothing else;
  loads    all rules but the last on five loads at two levels, eight replicas;
  named    the last rule on the same loads;
  fronts   outdated loads, and several front ends;
  changes  a replica dies, is drained, or joins;
  sizes    up to 256 replicas;
  outline  the simplified replica that the other parts use, compared with the engine's own scheduler;
  engine   the same on the load with the largest gain, for longer.
`programs.refresh_pages` makes the tables of lab/docs/balance.md from them, and `--plot=DIRECTORY` its
pictures.
"""

from __future__ import annotations

import time
from pathlib import Path

from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import json_line
from pensieve_lab.balance_study.loads import PROFILE
from pensieve_lab.balance_study.parts import PARTS, Settings, formats
from pensieve_lab.balance_study.pictures import draw_all
from pensieve_lab.balance_study.runs import UNITS, profile
from pensieve_lab.common.list_flags import seeds

FLAGS = flags.FLAGS


def files() -> dict[str, Path]:
    """Return the trace files of all parts by format; raises ConfigError before hours of other loads."""
    found = {}
    for word in FLAGS.traces:
        kind, colon, path = word.partition(":")
        if not colon or not Path(path).is_file():
            raise ConfigError("--traces", word, "FORMAT:FILE of a file that exists")
        found[kind] = Path(path)
    if missing := formats(FLAGS.parts) - found.keys():
        raise ConfigError("--traces", ",".join(FLAGS.traces), f"with a file of {', '.join(sorted(missing))}")
    return found


def main() -> int:
    unknown = [name for name in FLAGS.parts if name not in PARTS]
    if unknown:
        raise ConfigError("--parts", ",".join(FLAGS.parts), f"among {', '.join(PARTS)}")
    out = Path(FLAGS.out)
    if not out.is_dir():
        raise ConfigError("--out", FLAGS.out, "a directory that exists")
    settings = Settings(
        seeds=seeds("--seeds", FLAGS.seeds),
        files=files(),
        say=(lambda text: print(text, flush=True)) if FLAGS.talk else (lambda text: None),
    )
    for name in FLAGS.parts:
        begun_s = time.perf_counter()
        rows = PARTS[name](settings)
        seconds = time.perf_counter() - begun_s
        device = f"simulated: {profile().device}, {profile().model}, profile {PROFILE}"
        results = {"part": name, "seconds": round(seconds, 1), "runs": rows}
        line = json_line("balance", results, units=UNITS, device=device)
        (out / f"balance_{name}.json").write_text(f"{line}\n", encoding="utf-8")
        print(f"{name}: {len(rows)} runs in {seconds:.0f} s")
    if FLAGS.plot is not None:
        draw_all(out, Path(FLAGS.plot))
    return 0


def define_flags() -> None:
    flags.DEFINE_list("parts", list(PARTS), f"Parts, among {', '.join(PARTS)}; empty: only the pictures.")
    flags.DEFINE_list("traces", [], "FORMAT:FILE of mooncake, agent-sessions and burstgpt.")
    flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Seeds of all random draws.")
    flags.DEFINE_string("out", "lab/results", "Directory for the documents.")
    flags.DEFINE_string("plot", None, "Directory for the pictures, e.g. lab/docs/balance; needs matplotlib.")
    flags.DEFINE_bool("talk", True, "Print the result of every run.")


if __name__ == "__main__":
    define_flags()
    run(main)
