"""Session set-up: four virtual CPU devices for tensor parallelism, the `gpu` marker, notes at the end."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no GPU."""
    if not any("gpu" in item.keywords for item in items) or jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests noted with `record_property("note", ...)`, passed ones too, from any worker."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    calls = [report for report in reports if isinstance(report, pytest.TestReport) and report.when == "call"]
    notes = [(r.nodeid, text) for r in calls for name, text in r.user_properties if name == "note"]
    if notes:
        terminalreporter.section("notes")
        for nodeid, text in sorted(notes):
            terminalreporter.line(f"{nodeid}: {text}")
