"""The KV cache of all conversations over two tiers of memory, and its eviction. It does not import jax."""

from pensieve_jax.cache.drops import ChunkCopy, ChunkDrop, DropReason
from pensieve_jax.cache.earlier_pages import EarlierPages
from pensieve_jax.cache.manager import CacheManager
from pensieve_jax.cache.order.cost import AnalyticCostModel, CostModel
from pensieve_jax.cache.order.learned_state import LearnedState
from pensieve_jax.cache.order.policies import EvictionPolicy, make_policy
from pensieve_jax.cache.order.victims import VictimOrder
from pensieve_jax.cache.page_table import PageTable
from pensieve_jax.cache.sequence import CachedSequence, Role
from pensieve_jax.cache.states import TRANSITIONS, ChunkEvent, ChunkState, EvictionClass
from pensieve_jax.cache.tiers import TierPool
from pensieve_jax.cache.trunks import OnMove

__all__ = [
    "TRANSITIONS",
    "AnalyticCostModel",
    "CacheManager",
    "CachedSequence",
    "ChunkCopy",
    "ChunkDrop",
    "ChunkEvent",
    "ChunkState",
    "CostModel",
    "DropReason",
    "EarlierPages",
    "EvictionClass",
    "EvictionPolicy",
    "LearnedState",
    "OnMove",
    "PageTable",
    "Role",
    "TierPool",
    "VictimOrder",
    "make_policy",
]
