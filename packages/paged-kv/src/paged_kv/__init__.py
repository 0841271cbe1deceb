"""The page authority of a paged KV cache: one owner of every page, step transactions, int32 index plans."""

from .admission_calls import PreemptedSequence
from .block_table import PAD
from .copy_plan import CopyPlan
from .errors import KvError
from .events import KVCacheEvent
from .geometry import (
    LatentCacheGeometry,
    PageGeometry,
    latent_element_offset,
    token_major_element_offset,
)
from .hashing import CacheKey, PrefixChain
from .index_buffers import DirtyRanges, IndexPlanBuffers, PadPolicy
from .index_plan import SLOT_SKIP, PagedIndexPlan, PagedRequest, bucket_columns
from .manager import KVCacheManager
from .outcomes import CapacityDeferred, PoolShrinkRefused, UnserviceableRequest
from .prefix_cache import PagePins, PrefixHit
from .stats import KVCacheStats
from .step import StepState, StepTransaction
from .swap import SwapPlan
from .view import KVView

__version__ = "0.1.0"

__all__ = [
    "PAD",
    "SLOT_SKIP",
    "CacheKey",
    "CapacityDeferred",
    "CopyPlan",
    "DirtyRanges",
    "IndexPlanBuffers",
    "KVCacheEvent",
    "KVCacheManager",
    "KVCacheStats",
    "KVView",
    "KvError",
    "LatentCacheGeometry",
    "PadPolicy",
    "PageGeometry",
    "PagePins",
    "PagedIndexPlan",
    "PagedRequest",
    "PoolShrinkRefused",
    "PreemptedSequence",
    "PrefixChain",
    "PrefixHit",
    "StepState",
    "StepTransaction",
    "SwapPlan",
    "UnserviceableRequest",
    "bucket_columns",
    "latent_element_offset",
    "token_major_element_offset",
]
