"""Session set-up: launches as in serving, four virtual CPU devices, long files first, `gpu` marks, notes."""

from pathlib import Path

import jax
import pytest

import pensieve_jax  # noqa: F401  # asks for asynchronous launches, before JAX has a client

pytest_plugins = ["tests.launching"]
jax.config.update("jax_num_cpu_devices", 4)

# Files that take a worker half a minute or more, the longest first. They begin first, so that two workers end
# together; at the end of a run one of them would wait for the other. A name that is missing is only later.
_LONG = (
    "engine/test_real_models",
    "engine/test_seeded_scenarios",
    "engine/test_random_scenarios",
    "scripts/test_reproduce_orderings",
    "kernels/test_jax_triton",
    "kernels/test_mosaic_lowering",
    "engine/test_model_runner",
    "scripts/test_chat_model_recall",
    "kernels/test_attention",
    "kernels/test_mosaic",
    "engine/test_mutations",
    "commands/test_launch",
    "scripts/test_serving_benchmark",
)
_TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, and skip what is marked `gpu` where there is no GPU."""
    items.sort(key=_place_of_file)
    if not any("gpu" in item.keywords for item in items) or jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _place_of_file(item: pytest.Item) -> int:
    """Sorting is stable: other files stay in their order, behind the long ones."""
    path = item.path.relative_to(_TESTS) if item.path.is_relative_to(_TESTS) else item.path
    name = path.with_suffix("").as_posix()
    return _LONG.index(name) if name in _LONG else len(_LONG)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests noted with `record_property("note", ...)`, passed ones too, from any worker."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    calls = [report for report in reports if isinstance(report, pytest.TestReport) and report.when == "call"]
    notes = [(r.nodeid, text) for r in calls for name, text in r.user_properties if name == "note"]
    if notes:
        terminalreporter.section("notes")
        for nodeid, text in sorted(notes):
            terminalreporter.line(f"{nodeid}: {text}")
