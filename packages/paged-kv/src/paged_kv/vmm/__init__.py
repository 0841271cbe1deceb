"""Physical memory behind reserved addresses: what a cache commits, who pays, and when a graph survives it."""

from .ahead import CommitAhead
from .arena import VirtualArena
from .buckets import capacity_bucket
from .capture import PROCESS_GATE, CaptureGate
from .commit import CommitOutcome
from .decommit import DecommitOutcome
from .driver import DriverCalls, VmmDriver
from .fake_driver import FakeVmmDriver
from .fake_memory import FakeDriverFailure, ImpossibleSequence
from .fence import WorkFence
from .geometry import BindingGeometry, KvCacheGeometry, KvLayout, live_prefix_ranges
from .governor import MemoryGovernor
from .grant import MappedGrowthGrant
from .granules import GranuleTable
from .graph import BindingSignature, GraphAction, GraphKeepDecision, GraphLifecycle, GraphSignature
from .growth import Growth, GrowthCounters, KvGrowthController
from .handle_pool import HandlePool
from .lease import Holder, MemoryLease
from .ledger import AccountStats, AdmissionRefused, Tier, TierStats
from .paged_pool import PagedPool, PoolResized, paged_cache_geometry
from .placement import BasePlacement, Placement
from .planner import CommitPlan, CommitPlanner, DecommitPlan
from .realloc import ReallocStorage
from .shareability import Shareability
from .storage import KvStorage, MappedStorage

__all__ = [
    "PROCESS_GATE",
    "AccountStats",
    "AdmissionRefused",
    "BasePlacement",
    "BindingGeometry",
    "BindingSignature",
    "CaptureGate",
    "CommitAhead",
    "CommitOutcome",
    "CommitPlan",
    "CommitPlanner",
    "DecommitOutcome",
    "DecommitPlan",
    "DriverCalls",
    "FakeDriverFailure",
    "FakeVmmDriver",
    "GranuleTable",
    "GraphAction",
    "GraphKeepDecision",
    "GraphLifecycle",
    "GraphSignature",
    "Growth",
    "GrowthCounters",
    "HandlePool",
    "Holder",
    "ImpossibleSequence",
    "KvCacheGeometry",
    "KvGrowthController",
    "KvLayout",
    "KvStorage",
    "MappedGrowthGrant",
    "MappedStorage",
    "MemoryGovernor",
    "MemoryLease",
    "PagedPool",
    "Placement",
    "PoolResized",
    "ReallocStorage",
    "Shareability",
    "Tier",
    "TierStats",
    "VirtualArena",
    "VmmDriver",
    "WorkFence",
    "capacity_bucket",
    "live_prefix_ranges",
    "paged_cache_geometry",
]
