"""A toy project's mutants are run against its tests, in real workers."""

from __future__ import annotations

import pytest

from lab.tests.mutation import toy
from pensieve_jax import ConfigError
from pensieve_lab.mutation import coverage_map
from pensieve_lab.mutation.pool import Pool, WorkerError
from pensieve_lab.mutation.trial import Limits, judge

pytestmark = pytest.mark.long  # each starts workers

TEST = "tests/toy/test_limits.py"
LONG = Limits(test_s=600.0)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return toy.make(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def pool(project):
    with Pool(project, project / "build", 1, ["jax"]) as pool:
        yield pool


@pytest.fixture(scope="module")
def coverage(project, pool):
    folder = project / "build" / "map"
    files = coverage_map.find_test_files(project, ["tests"])
    assert coverage_map.outdated(project, folder, files) == files
    assert {file for file, _ in coverage_map.record(pool, folder, files, ["toy"])} == set(files)
    assert coverage_map.outdated(project, folder, files) == []
    return coverage_map.load_map(folder, files)


@pytest.fixture
def verdict(pool, coverage):
    def verdict(before, after, limits=LONG, killer="", file=toy.SOURCE):
        work = lambda worker, mutant: judge(worker, mutant, coverage, "tree", limits, killer)  # noqa: E731
        (found,) = pool.map(work, [toy.mutant(before, after, file=file)])
        return found

    return verdict


def names(coverage, line, file=toy.SOURCE):
    text = toy.FILES[file]
    place = coverage_map.find_place(file, text, text.splitlines().index(line) + 1)
    return {test.test.partition("::")[2] for test in coverage.covering(place)}


def test_lines_are_known_by_the_tests_that_execute_them(coverage):
    assert names(coverage, "    return min(value, most)") == {"test_clip"}
    assert names(coverage, "        count -= 1") == {"test_count_down"}
    assert names(coverage, "    return 4") == set()


def test_a_shared_fixture_counts_for_each_of_its_tests(coverage):
    assert names(coverage, "    return 3") == {"test_fixture", "test_fixture_again"}


def test_lines_of_started_processes_count(coverage):
    assert names(coverage, "    return 2 * value") == {"test_double"}


@pytest.mark.parametrize("line", ["    return 6", "    return 7"], ids=["stored", "jitted"])
def test_each_test_traces_its_programs_anew(project, pool, coverage, line):
    """A program compiled by another test or an earlier recording would be loaded without a trace."""
    file = "tests/toy/test_programs.py"
    tests = {"test_programs", "test_programs_again"}
    assert names(coverage, line, toy.PROGRAMS) == tests
    folder = project / "build" / "second_map"
    assert [name for name, _ in coverage_map.record(pool, folder, [file], ["toy"])] == [file]
    assert names(coverage_map.load_map(folder, [file]), line, toy.PROGRAMS) == tests


def test_a_statement_of_the_module_has_all_tests_that_use_the_file(coverage):
    assert names(coverage, "def clip(value, most):") == {
        *("test_clip", "test_is_full", "test_count_down", "test_fixture", "test_fixture_again"),
        "test_double",
    }


def test_tests_that_fail_or_are_skipped_without_a_mutant_are_left_out(coverage):
    assert coverage.failures == {
        f"{TEST}::test_that_fails": "failed in call",
        f"{TEST}::test_that_is_skipped": "skipped in call",
    }


def test_a_mutant_that_a_test_notices_is_killed(verdict):
    found = verdict("    return min(value, most)", "    return max(value, most)")
    assert (found.outcome, found.test, found.num_run) == ("killed", f"{TEST}::test_clip", 1)
    assert found.reason.startswith("assert 5 == 3")


def test_a_mutant_in_a_started_process_is_killed(verdict):
    found = verdict("    return 2 * value", "    return 3 * value")
    assert (found.outcome, found.test) == ("killed", "tests/other/test_process.py::test_double")


def test_a_mutant_that_ends_the_process_is_killed(verdict):
    found = verdict("    return min(value, most)", "    import os; os._exit(0)")
    assert (found.outcome, found.num_run) == ("killed", 1)
    found = verdict("    return min(value, most)", "    import os; os.abort()")
    assert (found.outcome, found.reason) == ("killed", "the process ended early with status -6")


def test_a_mutant_that_cannot_be_imported_is_killed(verdict):
    found = verdict("import sys", "import nothing_of_this_name")
    assert (found.outcome, found.test) == ("killed", TEST)


def test_a_mutant_that_keeps_pytest_from_starting_is_killed(tmp_path):
    """Such a mutant survived because no test had failed: a plugin of the tests could not be imported."""
    project = toy.make(tmp_path)
    (project / "conftest.py").write_text("import toy.limits\n")
    text = toy.mutant("import sys", "import nothing_of_this_name").text

    def work(worker, tests):
        with worker.tree.changed(toy.SOURCE, text):
            return worker.run(files=[TEST], tests=tests, limits=[600.0])

    with Pool(project, project / "build", 1) as pool:
        (reply,) = pool.map(work, [[f"{TEST}::test_clip"]])
    assert (reply["outcome"], reply["num_run"]) == ("failed", 0)
    assert reply["reason"] == "pytest could not run: it ended with status 4"


def test_a_mutant_that_no_test_notices_survives(verdict):
    found = verdict("    return count >= most", "    return count > most")
    assert (found.outcome, found.num_run, found.num_left) == ("survived", 1, 0)


def test_a_mutant_that_no_test_executes_survives(verdict):
    found = verdict("    return 4", "    return 5")
    assert (found.outcome, found.num_run) == ("survived", 0)


def test_a_mutant_of_a_module_without_executed_functions_meets_the_closest_tests(coverage, verdict):
    """Such a mutant survived untested: a module's statements run in no test, but when pytest imports the
    file."""
    assert names(coverage, "MOST = 3", toy.CONSTANTS) == set()
    found = verdict("MOST = 3", "MOST = 4", file=toy.CONSTANTS)
    assert (found.outcome, found.test) == ("killed", "tests/toy/test_constants.py::test_most")


def test_a_mutant_that_hangs_is_undecided(verdict):
    found = verdict("        count -= 1", "        count += 1", Limits(test_s=5.0, test_factor=1.0))
    assert (found.outcome, found.test) == ("timed out", f"{TEST}::test_count_down")


def test_the_copy_is_as_before_after_each_mutant(verdict, pool):
    found = verdict("    return min(value, most)", "    return max(value, most)")
    assert found.outcome == "killed"
    found = verdict("    return 3", "    return  3")
    assert (found.outcome, found.num_run) == ("survived", 2)
    texts = list(pool.map(lambda worker, file: (worker.tree.path / file).read_text(), [toy.SOURCE]))
    assert texts == [toy.LIMITS]


def test_the_budget_leaves_tests_out_and_says_how_many(verdict):
    found = verdict("def clip(value, most):", "def clip(value, most, *_):", Limits(1e-9, 600.0))
    assert (found.outcome, found.num_run, found.num_left) == ("survived", 1, 5)


def test_the_test_that_caught_a_mutant_before_comes_first(verdict):
    killer = "tests/other/test_process.py::test_double"
    found = verdict("def clip(value, most):", "def clip(value, most, *_):", Limits(1e-9, 600.0), killer)
    assert (found.outcome, found.num_run, found.num_left) == ("survived", 1, 5)
    found = verdict("import sys", "import nothing_of_this_name", LONG, killer)
    assert (found.outcome, found.test) == ("killed", killer)


def test_two_runs_cannot_share_the_copies(project, pool):
    with pytest.raises(ConfigError, match="free of another run"):
        Pool(project, project / "build", 1)


def test_a_worker_that_ends_is_an_error(project, pool):
    with Pool(project, project / "build2", 1) as other, pytest.raises(WorkerError, match="ended"):
        list(other.map(lambda worker, _: worker.run(files=["tests"], packages="not a list", scratch=1), [0]))
