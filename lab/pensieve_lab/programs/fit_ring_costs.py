"""Fits the costs of a ring, for the simulator of padded batches, to measured launches.

    python -m pensieve_lab.programs.benchmark_rebatching --part=steps ... > steps.json
    python -m pensieve_lab.programs.fit_ring_costs --documents=steps.json --output=h200_llama2-7b.json

`--documents` are of one model on one device, preferably with rings of several shapes, since a single shape
cannot separate columns from weights. Costs that were not measured or cannot be separated stay as in `--base`.
`--host_s` and `--fetch_s` concern the serving thread, which launches do not show. A table compares each
measured launch with the new profile. Give the file to `pensieve_lab.rebatching.costs.RingCosts.load`, or put
it into `lab/pensieve_lab/rebatching/profiles`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import check_can_write, run
from pensieve_jax.commands.report import table
from pensieve_lab.rebatching.costs import RingCosts
from pensieve_lab.rebatching.fit_costs import Fitted, fit, predicted_s, rows_of, with_numbers

FLAGS = flags.FLAGS
_DIGITS = 4


def document_of(name: str) -> dict[str, Any]:
    """Read the JSON document in a file's last line; raises ConfigError."""
    try:
        lines = Path(name).read_text(encoding="utf-8").strip().splitlines()
        text = "\n".join(lines)
        found = json.loads(text if text.startswith("{") else lines[-1])
    except OSError as error:
        limit = "files that can be read"
        raise ConfigError("--documents", name, limit, error.strerror or str(error)) from error
    except (ValueError, IndexError) as error:
        raise ConfigError("--documents", name, "files whose last line is a JSON document") from error
    if not isinstance(found, dict):
        raise ConfigError("--documents", name, "files whose last line is a JSON document")
    return found


def fitted() -> Fitted:
    """Fit the profile of the flags."""
    documents = {name: document_of(name) for name in FLAGS.documents}
    base = RingCosts.load(FLAGS.base)
    for document in documents.values():
        model = str(document.get("results", {}).get("model")).removeprefix("random:")
        if model != base.model:
            raise ConfigError("--documents", model, f"documents of {base.model}, the model of --base")
    given: dict[str, Any] = {name: FLAGS[name].value for name in ("host_s", "fetch_s")}
    changes = {name: value for name, value in given.items() if value is not None}
    texts = {name: f"--{name} of fit_ring_costs.py" for name in changes}
    names = ", ".join(Path(name).name for name in documents)
    found = fit(
        dataclasses.replace(with_numbers(base, changes), provenance={**base.provenance, **texts}),
        [row for document in documents.values() for row in rows_of(document)],
        {"launches": f"least squares of relative errors over {names}"},
    )
    devices = {str(one.get("hardware", {}).get("device")) for one in documents.values()}
    costs = dataclasses.replace(found.costs, device=" and ".join(sorted(devices)))
    return found._replace(costs=_rounded(costs))


def _rounded(costs: RingCosts) -> RingCosts:
    """Round to the few digits that the measurements justify."""
    numbers = {name: value for name, value in vars(costs).items() if isinstance(value, float)}
    return with_numbers(costs, {name: float(f"{value:.{_DIGITS}g}") for name, value in numbers.items()})


def main() -> int:
    path = Path(FLAGS.output)
    check_can_write("--output", path)
    found = fitted()
    lines = []
    for row in found.rows:
        took_s = predicted_s(found.costs, row)
        size = f"{row.batch} x {row.length}"
        share = f"{100 * (took_s / row.took_s - 1):+.1f}"
        lines.append([row.launch, size, f"{1e3 * row.took_s:.3f}", f"{1e3 * took_s:.3f}", share])
    print(table(["launch", "batch x length", "measured, ms", "profile, ms", "%"], lines))
    print(f"As in {FLAGS.base}: {', '.join(found.kept) or 'nothing'}")
    path.write_text(json.dumps(found.costs.as_document(), indent=1) + "\n", encoding="utf-8")
    return 0


def define_flags() -> None:
    flags.DEFINE_list("documents", None, "Documents of benchmark_rebatching.py --part=steps.")
    require("documents")
    flags.DEFINE_string("base", "h200_llama2-7b", "Profile with the costs that were not measured.")
    flags.DEFINE_string("output", None, "File for the new profile.")
    require("output")
    flags.DEFINE_float("host_s", None, "Seconds of the serving thread per step.", lower_bound=0.0)
    flags.DEFINE_float(
        "fetch_s", None, "Seconds from the end of a step until its ids are on the host.", lower_bound=0.0
    )


if __name__ == "__main__":
    define_flags()
    run(main)
