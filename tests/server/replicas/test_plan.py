"""Plans of replicas: what is refused before anything starts, derived sizes, and the number of replicas."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import yaml

from pensieve_jax import ConfigError, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.replicas.plan import FLUSH_S, ReplicaPlan, plan_of
from pensieve_jax.server.replicas.scaling import QUEUED_TOKENS, QueuedTokens
from tests.launching import ROOT

URL = "postgresql://me@database/kept"


def plan(**values) -> ReplicaPlan:
    return ReplicaPlan(**({"history": URL, "model": "chat"} | values))


@pytest.mark.parametrize(
    "values, field",
    [
        ({"replicas": 0}, "--replicas"),
        ({"replicas": True}, "--replicas"),
        ({"history": None}, "--history"),
        ({"history": "chats.sqlite"}, "--history"),
        ({"num_gpus": 2}, "num_gpus"),
        ({"num_gpus": -1}, "num_gpus"),
    ],
)
def test_an_invalid_plan_is_refused_with_its_field(values, field):
    with pytest.raises(ConfigError) as caught:
        plan(**values)
    assert caught.value.field == field


def test_a_replica_takes_one_gpu_per_tensor_parallel_device_if_there_are_gpus():
    two = EngineConfig(runner=RunnerConfig(tensor_parallel_size=2))
    assert plan().gpus_each(0) == 0 and plan().gpus_each(8) == 1
    assert plan(config=two).gpus_each(8) == 2 and plan(config=two, num_gpus=2).gpus_each(0) == 2
    assert plan(num_gpus=0).gpus_each(8) == 0
    plan(replicas=4, config=two).check_gpus(8)
    plan(replicas=9).check_gpus(0)
    for bad, num_there in ((plan(replicas=5, config=two), 8), (plan(replicas=1, config=two), 0)):
        with pytest.raises(ConfigError, match="GPUs"):
            bad.check_gpus(num_there)


def test_derived_sizes_follow_from_what_a_replica_runs_and_how_long_it_drains():
    sized = plan(config=EngineConfig(scheduler=SchedulerConfig(max_num_running=8)))
    settings = ServerSettings(drain_s=5.0)
    assert sized.max_ongoing(settings) == 8 + 2 * 8 + 16
    assert sized.shutdown_s(settings) == 5 + FLUSH_S
    assert sized.per_replica() == plan(config=sized.config), "the same for any number"


def test_a_file_uses_the_names_of_the_flags():
    found, settings = plan_of(
        {
            "model": "chat",
            "history": URL,
            "engine": {"max_num_running": 8, "token_buckets": [8, 64], "tensor_parallel_size": 2},
            "server": {"drain_s": 5.0, "allowed_hosts": ["a.example"], "allow_no_keys": True},
            "num_gpus": 2,
        }
    )
    assert found.config.scheduler.token_buckets == (8, 64) and found.config.scheduler.max_num_running == 8
    assert found.config.runner.tensor_parallel_size == 2
    assert settings.chat_history == "durable" and settings.is_routed
    assert settings.allowed_hosts == ("a.example",)


@pytest.mark.parametrize(
    "values, field",
    [
        ({"history": URL}, "args.model"),
        ({"model": "chat"}, "args.history"),
        ({"model": "chat", "history": URL, "replicas": 3}, "args.replicas"),
        ({"model": "chat", "history": URL, "engine": {"pages": 3}}, "engine.pages"),
        ({"model": "chat", "history": URL, "server": {"queue": 3}}, "args.server.queue"),
        ({"model": "chat", "history": "a.sqlite"}, "--history"),
        ({"model": "chat", "history": URL}, "args.server.api_keys_file"),
        ({"model": "chat", "history": URL, "server": {"allow_no_keys": "yes"}}, "args.server.api_keys_file"),
        ({"model": "chat", "history": URL, "server": {"allow_no_keys": True, "host": "0.0.0.0"}}, "host"),
        (
            {"model": "chat", "history": URL, "server": {"allow_no_keys": True, "max_in_flight_per_key": 9}},
            "args.server.max_in_flight_per_key",
        ),
    ],
)
def test_a_file_with_unknown_fields_or_values_is_refused_with_the_field(values, field):
    with pytest.raises(ConfigError) as caught:
        plan_of(values)
    assert caught.value.field == field


def applications() -> list[dict]:
    kube = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text("utf-8"))
    files = [
        yaml.safe_load((ROOT / "deploy" / "ray_serve.yaml").read_text("utf-8")),
        yaml.safe_load(kube["spec"]["serveConfigV2"]),
    ]
    return [application for file in files for application in file["applications"]]


@pytest.mark.parametrize("application", applications(), ids=["ray_serve", "kuberay"])
def test_the_shipped_files_are_valid_plans_with_a_fitting_policy(application):
    arguments = application["args"]
    assert arguments["server"]["api_keys_file"], "the files that are given let nobody in without a key"
    found, _ = plan_of(arguments)
    (deployment,) = application["deployments"]
    policy = deployment["autoscaling_config"]["policy"]
    module, _, name = policy["policy_function"].partition(":")
    assert (module, name) == (QueuedTokens.__module__, QueuedTokens.__name__)
    QueuedTokens(**policy["policy_kwargs"])
    assert policy["policy_kwargs"]["max_num_running"] == found.config.scheduler.max_num_running


def test_the_manifest_has_the_required_fields_of_rayservice():
    """The fields are those that its schema requires; pods outlive the drain."""
    kube = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text("utf-8"))
    assert (kube["apiVersion"], kube["kind"]) == ("ray.io/v1", "RayService")
    cluster = kube["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"] is not None
    (group,) = cluster["workerGroupSpecs"]
    assert group["groupName"] and group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    application = yaml.safe_load(kube["spec"]["serveConfigV2"])["applications"][0]
    found, settings = plan_of(application["args"])
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        pod = template["spec"]
        assert pod["terminationGracePeriodSeconds"] > found.shutdown_s(settings)
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            one["name"] for one in pod["volumes"]
        }
        assert container["image"] and container["env"][0]["name"] == "PGPASSWORD"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(found.num_gpus)
    scales = application["deployments"][0]["autoscaling_config"]
    assert scales["max_replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((), None),
        (("spec", "rayClusterConfig", "rayVersion"), 2.6),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "groupname"), "gpus"),
        (("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0, "images"), "x"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "replicas"), "two"),
    ],
    ids=lambda one: "" if one is None else str(one[-1:]) if isinstance(one, tuple) else str(one),
)
def test_the_manifest_matches_the_operators_schema(path, value):
    schema = json.loads(Path(__file__).with_name("kuberay_schema.json").read_text("utf-8"))["schema"]
    manifest = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text("utf-8"))
    if path:
        place = manifest
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
    complaints = [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)]
    assert bool(complaints) == bool(path), complaints


def test_replicas_scale_with_waiting_tokens_and_not_below_what_runs():
    policy = QueuedTokens(queued_tokens=1000, max_num_running=10)
    wanted = policy.wanted
    assert wanted(2, 0, 16) == 2 and wanted(2, 1999, 16) == 2
    assert wanted(2, 2000, 16) == 3 and wanted(2, 5000, 0) == 4
    assert wanted(2, 0, 8) == 1 and wanted(3, 0, 9) == 2 and wanted(3, 0, 0) == 2
    assert wanted(8, 0, 80) == 8 and wanted(1, 0, 0) == 1
    context = SimpleNamespace(
        aggregated_metrics={QUEUED_TOKENS: {"a": 1500.0, "b": 600.0}},
        current_num_replicas=2,
        total_num_requests=4.0,
    )
    assert policy(context) == (3, {})
    context.aggregated_metrics = None
    assert policy(context) == (1, {})
