"""Session set-up: launches as in serving, four virtual CPU devices, long files first, `gpu` marks, notes."""

import gc
import signal
from collections.abc import Iterator

import pytest

# Little that is made until tests begin becomes garbage, and looking for it takes time: it is rare, but
# not off, since it stays so in the process that only hands out files.
gc.set_threshold(200_000, 50, 50)

# A shell lets jobs in its background ignore Ctrl-C, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_PLUGINS = ("tests.launching", "tests.postgres_server")

# Files that take a worker ten seconds or more, about the longest first: by their long tests down to
# `test_rebatching_benchmark`, the others by those of `make test`. They begin first, so that two workers end
# together; at the end one of them would wait for the other. A name that is missing is only later.
_LONGEST = (
    "test_many_replicas",
    "test_interrupts",
    "test_reproduce_orderings",
    "test_seeded_scenarios",
    "test_mutations",
    "test_scenarios",
    "test_kills",
    "test_kill",
    "test_random_scenarios",
    "test_chat_model_recall",
    "test_survival",
    "test_page",
    "test_tree_scenarios",
    "test_demo",
    "test_real_models",
    "test_training",
    "test_running",
    "test_two_devices",
    "test_mosaic_bytes",
    "test_exit",
    "test_schedules",
    "test_page_packing",
    "test_rebatching_benchmark",
    "test_model_runner",
    "test_kernel_baselines",
    "test_attention",
    "test_figure11",
    "test_step",
    "test_clients",
    "test_completions_state",
    "test_serving_benchmark",
    "test_reproduce",
    "test_benchmarks",
    "test_validate_simulator",
    "test_engine_server",
    "test_full_disk",
    "test_presets",
    "test_golden_logits",
    "test_sampler",
    "test_sampling_cutoffs",
    "test_swaps",
    "test_residual_norms",
    "test_profile",
    "test_warm_start",
    "test_mosaic",
    "test_simulate",
    "test_residual_stream",
    "test_chat",
    "test_jax_triton",
    "test_generate",
    "test_tensor_parallel",
    "test_check_models",
    "test_prometheus",
    "test_serve",
    "test_mosaic_lowering",
)


def pytest_configure(config: pytest.Config) -> None:
    """What tests need, where they run: a process that only hands out files starts the others at once."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import hypothesis
    import jax

    import pensieve_jax  # noqa: F401  # asks for asynchronous launches, before JAX has a client

    jax.config.update("jax_num_cpu_devices", 4)
    # A machine that others use as well stops a process for longer than hypothesis lets an example take.
    hypothesis.settings.register_profile("suite", deadline=None)
    hypothesis.settings.load_profile("suite")
    for name in _PLUGINS:
        config.pluginmanager.import_plugin(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, and skip what is marked `gpu` where there is no GPU."""
    import jax

    items.sort(key=_place_of_file)
    # Not `item.keywords`: these have the names of folders, too.
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _place_of_file(item: pytest.Item) -> int:
    """Sorting is stable: other files stay in their order, behind the long ones."""
    name = item.path.stem
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)


def pytest_collection_finish() -> None:
    """Modules and the tests themselves stay: the collector need not look through them at every collection.

    Tracing a program makes a hundred thousand objects, nearly all of which live as long as it is compiled.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _what_is_frozen_stays_so() -> Iterator[None]:
    """Benchmarks freeze what there is while they measure; the end of that would thaw what others froze, too.

    Every collection that is asked for would then look through all that was compiled, for a second or two.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _collections_are_of_this_file(_what_is_frozen_stays_so: None) -> None:
    """What earlier files compiled and JAX still keeps, a million objects, stays out of collections.

    What they left behind is collected first, so that warnings of it come here at the latest.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests noted with `record_property("note", ...)`, passed ones too, from any worker."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    calls = [report for report in reports if isinstance(report, pytest.TestReport) and report.when == "call"]
    notes = [(r.nodeid, text) for r in calls for name, text in r.user_properties if name == "note"]
    if notes:
        terminalreporter.section("notes")
        for nodeid, text in sorted(notes):
            terminalreporter.line(f"{nodeid}: {text}")
