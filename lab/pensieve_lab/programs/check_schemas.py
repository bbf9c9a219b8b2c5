"""Checks replies with JSON schemas of JSONSchemaBench: each that ends by itself must be valid.

    git clone --bare https://github.com/guidance-ai/jsonschemabench bench.git
    pip install "jsonschema[format-nongpl]"  # checks more formats
    python -m pensieve_lab.programs.check_schemas --bench=bench.git --parts_dir=parts --json=FILE

The program draws files of `data/` at random, each as likely as any other, until 1,000 of their schemas
compile for the model. Each schema gets three replies at temperature 1: in a new conversation, in its second
turn, and in a fork of another conversation. A bias of the logits makes replies end before the token limit.
The cache is so small that turns are suspended, and chunks are dropped, copied to host memory and back. In
between, the engine is closed and opened again on the same history.

`jsonschema`, an independent validator, checks the replies by the draft that the schema names (2020-12
without one), with the formats that it knows. Replies that the token limit cut are counted, and so are known
differences of definition. The exit status is 1 if a reply is invalid, if a kind of event never happened, or
if no reply of an event's turns ended by itself.

The schemas are divided into `--num_parts` parts, each with engines and a history of its own. With
`--parts_dir`, each part is stored when it is done, and a run that was interrupted continues. The document
holds all parts.
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.provenance import source_state
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_lab.schema_check.bench import Bench, Case, Drawn, compiled_cases
from pensieve_lab.schema_check.rounds import Rounds, opened
from pensieve_lab.schema_check.validation import DEFAULT_DRAFT, checked_formats

FLAGS = flags.FLAGS
_MEASURED = ("wall_s", "processor_s")


def draw(model: str, bench: Bench, programs_dir: str) -> Drawn:
    """Draw the schemas that compile for a model."""
    llm = opened(model, None, programs_dir)
    try:
        assert llm.engine.grammars is not None, "the model has no tokenizer"
        return compiled_cases(llm.engine.grammars, bench, FLAGS.seed, FLAGS.num_schemas)
    finally:
        llm.close()


def check_part(model: str, cases: Sequence[Case], part: int, programs_dir: str) -> dict[str, Any]:
    """Check one part of the schemas; return its counts and times."""
    began_s, began_processor_s = time.perf_counter(), time.process_time()
    rounds = Rounds(
        model,
        size=FLAGS.num_conversations,
        max_tokens=FLAGS.max_tokens,
        seed=FLAGS.seed * 1009 + part,
        biases=[float(one) for one in FLAGS.biases],
    )
    rounds.run(cases, programs_dir)
    return {
        **rounds.counts.as_dict(),
        "wall_s": time.perf_counter() - began_s,
        "processor_s": time.process_time() - began_processor_s,
    }


def stored_part(name: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return a part that ran before with these settings and source files, or None."""
    path = Path(FLAGS.parts_dir or "", name)
    if FLAGS.parts_dir is None or not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    result: dict[str, Any] | None = found["result"] if found["settings"] == settings else None
    return result


def store_part(name: str, settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Store a part, if there is a directory for them."""
    if FLAGS.parts_dir is not None:
        Path(FLAGS.parts_dir).mkdir(parents=True, exist_ok=True)
        text = json.dumps({"settings": settings, "result": result})
        Path(FLAGS.parts_dir, name).write_text(text, encoding="utf-8")


def check_model(model: str, bench: Bench) -> dict[str, Any]:
    """Check one model, part by part; return the numbers of schemas and replies, and the invalid replies."""
    settings = {
        **own_settings(),
        "model": model,
        "bench": bench.revision,
        "source": source_state().source_digest,
    }
    with tempfile.TemporaryDirectory() as programs_dir:
        drawn = draw(model, bench, programs_dir)
        parts = []
        for part in tqdm(range(FLAGS.num_parts), desc=model, disable=None):
            name = f"{model.replace(':', '_').replace('/', '_')}_{part}_of_{FLAGS.num_parts}.json"
            result = stored_part(name, settings)
            if result is None:
                result = check_part(model, drawn.cases[part :: FLAGS.num_parts], part, programs_dir)
                store_part(name, settings, result)
            parts.append(result)
    return {"refused_schemas": drawn.refused, "sets": drawn.sets, **combined(parts)}


def combined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the parts of a model as one: sums of their counts, and all of their replies."""
    found: dict[str, Any] = {"num_schemas": sum(part["num_schemas"] for part in parts)}
    for name in ("replies", "ended", "events"):
        sums: collections.Counter[str] = collections.Counter()
        for part in parts:
            for key, number in part[name].items():
                sums[key] += number  # `update` would do, but `+` leaves out what never happened
        found[name] = dict(sorted(sums.items()))
    found |= {name: round(sum(part[name] for part in parts), 1) for name in _MEASURED}
    found["outcomes"] = {name: one for part in parts for name, one in part["outcomes"].items()}
    replies = found["outcomes"].values()
    found["num_schemas_with_end"] = sum(any(not _is_open(one) for one in each) for each in replies)
    for name in ("problems", "failures"):
        found[name] = [one for part in parts for one in part[name]]
    return found


def _is_open(outcome: str) -> bool:
    return outcome.startswith(("cut ", "failed"))


def faults(model: str, result: dict[str, Any]) -> list[str]:
    """Return why the check of a model failed."""
    found = [f"{model}: {one['schema']}: {one['problem']}" for one in result["problems"]]
    for name in ("events", "ended"):
        found += [f"{model}: {name}: 0 {key}" for key, number in result[name].items() if not number]
    if result["num_schemas"] < FLAGS.num_schemas:
        found.append(f"{model}: {result['num_schemas']} schemas ran, not {FLAGS.num_schemas}")
    return found


def own_settings() -> dict[str, Any]:
    """Return the flags that decide what runs."""
    names = ("seed", "num_schemas", "num_parts", "num_conversations", "max_tokens", "biases")
    return {name: FLAGS[name].value for name in names}


def main() -> int:
    bench = Bench.of(FLAGS.bench)
    results = {model: check_model(model, bench) for model in FLAGS.models}
    found = []
    for model, result in results.items():
        refused = sum(result["refused_schemas"].values())
        print(f"{model}: {result['num_schemas']} schemas, {refused} that do not compile")
        rows = [(kind, *one) for kind in ("replies", "ended", "events") for one in result[kind].items()]
        print(table(("kind", "of", "number"), [*rows, ("time", "processor, s", result["processor_s"])]))
        found += faults(model, result)
    for fault in found:
        print("fault:", fault)
    document = {
        "models": results,
        "faults": found,
        "settings": own_settings(),
        "bench": {"revision": bench.revision, "num_files": len(bench.names)},
        "validator": {
            "default_draft": DEFAULT_DRAFT,
            "checked_formats": checked_formats(),
            "versions": {name: importlib.metadata.version(name) for name in ("jsonschema", "llguidance")},
        },
    }
    units = {"replies": "number", "ended": "number", "events": "number", "wall_s": "s", "processor_s": "s"}
    print_document(json_line("schemas", document, units=units, device=device_name()))
    return EXIT_FAILED if found else 0


def define_flags() -> None:
    flags.DEFINE_string("bench", None, "Bare repository of guidance-ai/jsonschemabench.")
    flags.DEFINE_list("models", ["chat", "random:llama-tiny"], "Models to check.")
    flags.DEFINE_integer("num_schemas", 1000, "Schemas that compile, for each model.", lower_bound=1)
    flags.DEFINE_integer("num_conversations", 32, "New conversations of a round.", lower_bound=1)
    flags.DEFINE_integer("max_tokens", 300, "Limit of a reply.", lower_bound=1)
    flags.DEFINE_list(
        "biases", ["6", "15", "30"], "Biases towards the ends of texts, lists and objects, by turns."
    )
    flags.DEFINE_integer("num_parts", 5, "Parts into which the schemas are divided.", lower_bound=1)
    flags.DEFINE_string("parts_dir", None, "Directory of finished parts, from which a run continues.")
    flags.DEFINE_integer("seed", 0, "Seed of the schemas and of the replies.")
    define_document_flag()
    require("bench")


if __name__ == "__main__":
    define_flags()
    run(main)
