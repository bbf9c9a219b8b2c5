"""The ring with which a front end names roots is the ring of Ray's router, to which it passes them."""

from __future__ import annotations

import asyncio
import secrets
from types import SimpleNamespace

import pytest

from pensieve_jax.balance.ring import HashRing

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Ray's imports

NAMES = ["x1ab3", "k9f0z", "qqw12", "0"]


def test_a_root_belongs_to_the_replica_that_the_router_chooses():
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

    from pensieve_jax.server.replicas.ray_replicas import router_hash
    from pensieve_jax.server.replicas.serve_app import ROUTER_OPTIONS

    replicas = {ReplicaID(name, DeploymentID("EngineReplica", "pensieve")) for name in NAMES}

    class Router(ConsistentHashRouter):
        """Router without a cluster: its ring, and its first choice."""

        def __init__(self):
            self._deployment_id = "EngineReplica"
            self.initialize_state(**ROUTER_OPTIONS)
            self._rebuild_ring(frozenset(replicas))
            self._replicas = {one: SimpleNamespace(replica_id=one) for one in replicas}

    router, ring = Router(), HashRing(NAMES, hash_key=router_hash)

    async def chosen(root):
        metadata = SimpleNamespace(session_id=root, internal_request_id="other")
        pending = SimpleNamespace(metadata=metadata, routing_context=SimpleNamespace())
        ranks = await router.choose_replicas(list(router._replicas.values()), pending)
        return ranks[0][0].replica_id.unique_id

    roots = [secrets.token_hex(8) for _ in range(500)]
    owners = [ring.owner(root) for root in roots]
    assert owners == [asyncio.run(chosen(root)) for root in roots] and {*owners} == {*NAMES}
