"""The comparison of two checkouts: runs alternate, each with its own files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from pensieve_jax import ConfigError
from pensieve_lab.programs.compare_checkouts import SIDES, compared, figure, run_once

PROGRAM = "pensieve_lab.programs.compare_checkouts"
# Writes a document whose figure depends on the checkout, and notes the order of all runs.
FAKE = """
import json, sys
from pathlib import Path
import own
path = Path(sys.argv[-1].removeprefix("--json="))
order = Path(__file__).parents[{depth}].parent / "order.txt"
runs = order.read_text().split() if order.exists() else []
order.write_text(" ".join([*runs, own.NAME]))
results = {{"ms": own.BASE + len(runs), "points": [{{"p50": 2.0}}], "arguments": sys.argv[1:-1], "zero": 0}}
document = {{"results": results, "revision": own.NAME, "command": "fake", "units": {{"ms": "ms"}}}}
path.write_text(json.dumps(document))
"""


@pytest.fixture
def checkouts(tmp_path: Path) -> list[Path]:
    """An earlier checkout whose programs are scripts, and a later one whose programs are modules."""
    found = []
    for side, folder, base in (
        ("earlier", "scripts", 10),
        ("later", "lab/pensieve_lab/programs", 20),
    ):
        root = tmp_path / side
        (root / folder).mkdir(parents=True)
        for package in [root / folder, *(root / folder).parents]:
            if package.name in ("pensieve_lab", "programs"):
                (package / "__init__.py").touch()
        (root / "own.py").write_text(f"NAME, BASE = {side!r}, {base}")
        (root / folder / "fake.py").write_text(FAKE.format(depth=folder.count("/") + 1))
        (root / folder / "broken.py").write_text("raise SystemExit('it is broken')")
        found.append(root)
    return found


def test_runs_alternate_and_each_checkout_runs_its_own_files(launch, checkouts, tmp_path, capfd):
    earlier, later = checkouts
    flags = {
        "earlier": earlier,
        "later": later,
        "program": "fake",
        "figures": "ms,points.0.p50,zero",
        "arguments": "--quick '--name=a b'",
        "num_pairs": 3,
        "json": tmp_path / "found.json",
    }
    assert launch(PROGRAM, shared_llm=False, **flags) == 0
    assert (tmp_path / "order.txt").read_text().split() == [*SIDES] * 3
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert found["revisions"] == {side: side for side in SIDES} and len(found["load"]) == 6
    ms = found["figures"]["ms"]
    assert ms["earlier"] == {"median": 12.0, "lowest": 10.0, "highest": 14.0, "runs": [10.0, 12.0, 14.0]}
    assert ms["later"]["runs"] == [21.0, 23.0, 25.0]
    assert ms["ratio"]["median"] == statistics.median([21 / 10, 23 / 12, 25 / 14])
    assert found["figures"]["points.0.p50"]["ratio"]["runs"] == [1.0] * 3
    assert found["figures"]["zero"]["ratio"] is None
    assert "points.0.p50" in capfd.readouterr().out


def test_arguments_reach_the_program_as_a_shell_would_give_them(checkouts, tmp_path):
    document = run_once(checkouts[1], "fake", ["--quick", "--name=a b"], tmp_path / "one.json")
    assert document["results"]["arguments"] == ["--quick", "--name=a b"]


def test_a_program_that_is_missing_or_fails_is_named(checkouts, tmp_path):
    with pytest.raises(ConfigError, match="program is 'nothing', but must be a program in"):
        run_once(checkouts[0], "nothing", [], tmp_path / "one.json")
    for checkout in checkouts:
        with pytest.raises(ConfigError, match=r"it ended with status 1.*it is broken"):
            run_once(checkout, "broken", [], tmp_path / "one.json")


@pytest.mark.parametrize("name", ["other", "points.1.p50", "points.x", "points", "words", "yes", "ms.more"])
def test_a_figure_must_be_a_number_of_the_results(name):
    results = {"ms": 1.0, "points": [{"p50": 2.0}], "words": "a", "yes": True}
    with pytest.raises(ConfigError, match="the path of a number") as caught:
        figure(results, name)
    assert repr(name) in str(caught.value)


def test_ratios_are_those_of_pairs():
    """Pairs ran at nearly the same time, so what slows both is not in their ratio."""
    found = {
        "earlier": [{"results": {"ms": value}} for value in (1.0, 10.0, 2.0)],
        "later": [{"results": {"ms": value}} for value in (2.0, 20.0, 4.0)],
    }
    assert compared("ms", found)["ratio"]["runs"] == [2.0, 2.0, 2.0]
