"""Compares simulated load points with measured ones, figure by figure, and checks whether they are close
enough.

    python -m pensieve_lab.programs.validate_simulator --documents=pensieve.json \\
        --profile=h200_llama2-13b-gqa10

`--documents` are files of benchmark_serving's `--output_json`: open loops of this project's own systems. Each
load point is simulated with the trace, users, window, memory, buckets and policy of its measurement. The
trace is made (or read) again: the benchmark's flags of the trace must be given here as well, and its digest
must equal the document's. Kernels are launched by the same thread as in the measurement. Criteria:
  mean step time of buckets with 1% of the steps' time     within 10%
  over the knee (under 95% of what was sent is served, or
  a first token takes over a second on the average)        requests/s within 10%
  elsewhere                                                mean normalized latency within 10%
  hit rates of both tiers                                  within 3 points
The other figures help to explain differences. Void points are left out; points that the profile was fitted
with are marked. The last line is one JSON document (see `--json`); the exit status is 1 if a criterion is
missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from model_defs import ModelConfig, source_config
from pensieve_jax import CacheConfig, ConfigError, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.assembly import estimated_cost_model
from pensieve_jax.cache import CostModel
from pensieve_jax.cache.order.cost import CostPoint, CostProfile, MeasuredCostModel
from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_jax.model_source import resolve_model
from pensieve_jax.runtime.asynchronous_launches import VARIABLE
from pensieve_lab.common.live_figures import LiveFigures
from pensieve_lab.common.session_flags import define_session_flags, load_trace, sessions
from pensieve_lab.common.stored_profiles import stored_profile
from pensieve_lab.experiments.machines import find_profile, profile_help
from pensieve_lab.serving.report import read_documents
from pensieve_lab.serving.run import Window
from pensieve_lab.serving.validation_criteria import Criterion, criteria, is_over_the_knee, missed
from pensieve_lab.simulator import DeviceProfile, Outcome, Scenario, figures, simulate
from pensieve_lab.workload import UNITS, Answer, Session, Trace, answer_figures, throughput

FLAGS = flags.FLAGS
_OPEN_LOOP = "open loop"
_USERS = ("think", "time_scale", "mid_life_s", "recorded_arrivals", "seed")
_RANDOM = "random:"
_UNPACKED = {"pack_host": False}  # documents without this field are older than packing
_SUMMARY = (
    *("ms/token mean", "ms/token p50", "ms/token p90", "ms/token p99", "ttft ms mean"),
    *("requests/s", "gpu hits", "cpu hits"),
)


class Measured(NamedTuple):
    """Load point, its place in a file, and its document's record of the measurement.

    Attributes:
      launches: the thread that launched the kernels, as in profiles: "jaxlib" or "engine".
    """

    where: str
    results: Mapping[str, Any]
    point: Mapping[str, Any]
    launches: str

    @property
    def name(self) -> str:
        """Name of the setting in tables: its system and rate."""
        rate = "recorded" if self.point["rate"] is None else f"{self.point['rate']:g}/s"
        return f"{self.results['system']}, {rate}"

    @property
    def file(self) -> str:
        """File name of the document."""
        return Path(self.where.rpartition(", line ")[0]).name


def measured_points() -> Iterator[Measured]:
    """Yield the valid points of `--documents`; raises ConfigError for those that cannot be simulated."""
    for where, found in read_documents("--documents", [Path(name) for name in FLAGS.documents]):
        results = found["results"]
        # Older documents have no environment: they predate launches by another thread.
        launches = "jaxlib" if found.get("environment", {}).get(VARIABLE) == "1" else "engine"
        if results.get("loop") != _OPEN_LOOP or "config" not in results:
            limit = "files of open loops, of this project's own systems"
            hint = f"found {results['system']}, {results.get('loop')}"
            raise ConfigError("--documents", where, limit, hint)
        for point in results["points"]:
            if not point["void"]:
                yield Measured(where, results, point, launches)


def simulate_point(measured: Measured, profile: DeviceProfile) -> dict[str, Any]:
    """Simulate a load point under virtual time; return figures defined like the measured ones."""
    results = measured.results
    model_name = results["model"].removeprefix(_RANDOM)
    if model_name != profile.model:
        limit = f"a device's profile of {model_name!r}, the model of {measured.where}"
        raise ConfigError("--profile", FLAGS.profile, limit, f"this one is of {profile.model!r}")
    config = engine_config(measured)
    model = source_config(resolve_model(results["model"]), config.runner.max_position_embeddings)
    max_context_tokens = config.resolve_context_tokens(model.max_position_embeddings)
    trace, window, who = users(measured, max_context_tokens)
    has_end = math.isfinite(window.end_s)
    scenario = Scenario(
        config=config,
        profile=stored_profile(profile, config.cache).launching(measured.launches),
        cost_model=cost_model(measured, config, model),
        max_context_tokens=max_context_tokens,
        warm_up_s=window.start_s,
        window_s=window.end_s - window.start_s if has_end else None,
        drain_s=window.drain_s if has_end else 0.0,
    )
    answers: list[Answer] = []
    end_s = window.end_s + window.drain_s if has_end else None
    with LiveFigures(measured.name, end_s, shown=shows_progress()) as live:

        def see(answer: Answer) -> None:
            answers.append(answer)
            live.see(answer)

        outcome = simulate(scenario, who, see)
    return {"trace": trace.digest, **_figures(outcome, answers, window)}


def _figures(outcome: Outcome, answers: Sequence[Answer], window: Window) -> dict[str, Any]:
    """Return the benchmark's figures: latencies and hits of requests that arrived in the window, with
    drain."""
    arrived = [answer for answer in answers if window.has(answer.turn.arrival_s)]
    ended = [answer for answer in answers if window.has(answer.end_s)]
    found = figures(outcome, num_replicas=1)
    return {**found, **throughput(ended, outcome.seconds), **answer_figures(arrived)}


def engine_config(measured: Measured) -> EngineConfig:
    """Return the document's configuration; raises ConfigError if another version of this project wrote it."""
    values = measured.results["config"]
    try:
        scheduler = dict(values["scheduler"])
        if scheduler["token_buckets"] is not None:
            scheduler["token_buckets"] = tuple(scheduler["token_buckets"])
        return EngineConfig(
            stateful=values["stateful"],
            cache=CacheConfig(**_UNPACKED | values["cache"] | _costs(values["cache"])),
            scheduler=SchedulerConfig(**scheduler),
            runner=RunnerConfig(**values["runner"]),
        )
    except (KeyError, TypeError) as error:
        limit = "files that this version of benchmark_serving wrote"
        raise ConfigError("--documents", measured.where, limit, str(error)) from error


def _costs(cache: Mapping[str, Any]) -> dict[str, str]:
    """Return `cost_profile` in its present form: in old documents None meant the analytic estimate."""
    return {"cost_profile": cache.get("cost_profile") or "analytic"}


def cost_model(measured: Measured, config: EngineConfig, model: ModelConfig) -> CostModel:
    """Return the costs that the measured engine evicted by, as its document says."""
    costs = measured.results.get("costs")
    if costs is not None and costs["points"] is not None:
        return MeasuredCostModel([CostPoint(**point) for point in costs["points"]])
    if costs is None and config.cache.cost_profile != "analytic":
        return MeasuredCostModel(CostProfile.load(config.cache.cost_profile).points)
    return estimated_cost_model(model, config.cache.chunk_tokens)


def users(measured: Measured, max_context_tokens: int) -> tuple[Trace, Window, list[Session]]:
    """Return the trace, the window, and the sessions; raises ConfigError for another trace."""
    settings, rate = measured.results["settings"], measured.point["rate"]
    for name in _USERS:
        FLAGS[name].value = settings[name]
    who = {"seed": measured.point.get("seed"), "arrivals": measured.point.get("arrivals")}
    trace, expected = load_trace(max_context_tokens), measured.results["trace"]
    if trace.digest != expected["digest"]:
        limit = f"the trace of {measured.where}, {expected['name']} ({expected['digest'][:12]})"
        hint = "give the flags of the trace that the benchmark was given, such as --num_conversations"
        raise ConfigError("--trace", f"{trace.name} ({trace.digest[:12]})", limit, hint)
    if not settings["window_s"]:
        return trace, Window(), sessions(trace, rate, None, **who)
    end_s = settings["warm_up_s"] + settings["window_s"]
    window = Window(settings["warm_up_s"], end_s, settings["drain_s"])
    return trace, window, sessions(trace, rate, end_s + settings["drain_s"], **who)


def check_flags() -> None:
    """Raise ConfigError for flags that the documents determine, and for missing documents."""
    if not FLAGS.documents:
        raise ConfigError("--documents", "", "at least one file")
    for name in ("rates", *_USERS):
        if FLAGS[name].present:
            raise ConfigError(f"--{name}", FLAGS[name].value, "left out: --documents determine it")


def main() -> int:
    check_flags()
    profile = find_profile(FLAGS.profile)
    points = list(measured_points())
    if not points:
        raise ConfigError("--documents", ",".join(FLAGS.documents), "files with a point that is not void")
    compared, documents = [], []
    for measured in points:
        simulated = simulate_point(measured, profile)
        compared.append(criteria(measured.point, simulated))
        documents.append(document(measured, simulated, compared[-1], profile))
        print(f"{report(measured, compared[-1])}\n", flush=True)
    print(f"{summary(documents)}\n")
    num_missed = missed(compared)
    print(f"{num_missed} criteria missed" if num_missed else "every criterion passed")
    device = f"simulated: {profile.device}, {profile.model}, profile {profile.source}"
    results = {"profile": FLAGS.profile, "num_missed": num_missed, "points": documents}
    print_document(json_line("simulator_validation", results, units=UNITS, device=device))
    return EXIT_FAILED if num_missed else 0


def report(measured: Measured, compared: Sequence[Criterion]) -> str:
    """Format a load point as text."""
    where = "over the knee" if is_over_the_knee(measured.point) else "not over the knee"
    rows = [
        [
            one.figure,
            *("-" if value is None else float(value) for value in (one.measured, one.simulated)),
            "-" if one.difference is None else f"{100 * one.difference:+.1f}",
            "-" if one.limit is None else f"{100 * one.limit:.0f}",
            one.verdict,
        ]
        for one in compared
    ]
    columns = ["figure", "measured", "simulated", "% off", "limit", "verdict"]
    return f"{measured.name} ({where})\n{table(columns, rows)}"


def summary(documents: Sequence[Mapping[str, Any]]) -> str:
    """Format all load points: measured figures, and the simulator's differences in percent."""
    rows = []
    for point in documents:
        found = {one["figure"]: one for one in point["criteria"]}
        latency = found["ms/token mean"]
        differences = [found[name]["difference"] for name in _SUMMARY]
        rows.append(
            [
                point["document"].removesuffix(".json"),
                "fitted" if point["fitted"] else "over the knee" if point["over_the_knee"] else "",
                point["launches"],
                "-" if latency["measured"] is None else float(latency["measured"]),
                *("-" if value is None else f"{100 * value:+.1f}" for value in differences),
            ]
        )
    return table(["document", "", "launches", "ms/token", *_SUMMARY], rows)


def document(
    measured: Measured, simulated: Mapping[str, Any], compared: Sequence[Criterion], profile: DeviceProfile
) -> dict[str, Any]:
    """Return a load point as a JSON object."""
    return {
        "system": measured.results["system"],
        "rate": measured.point["rate"],
        "document": measured.file,
        "launches": measured.launches,
        "fitted": measured.file in profile.fitted_runs,
        "over_the_knee": is_over_the_knee(measured.point),
        "criteria": [{**one._asdict(), "verdict": one.verdict} for one in compared],
        "simulated": simulated,
    }


def define_flags() -> None:
    flags.DEFINE_list("documents", [], "Files of benchmark_serving's --output_json.")
    flags.DEFINE_string("profile", "h200_llama2-13b-gqa10", profile_help())
    flags.DEFINE_bool("progress", None, "Show a progress bar; default: on a terminal.")
    define_session_flags()
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
