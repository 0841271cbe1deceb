"""Records of measurements: the schema, the files, the environment block and the digests of the sources."""

from paged_bench.record.case import Case, Correctness, Memory, PeerRow, Shape, Variant, Work
from paged_bench.record.environment import capture, finish, revision
from paged_bench.record.file import dump, load, marked_history, parse, save
from paged_bench.record.join import joined
from paged_bench.record.machine import Ceiling, Environment, Gpu
from paged_bench.record.names import peer_name
from paged_bench.record.samples import MAIN_SERIES, STEP_KERNELS, Samples
from paged_bench.record.schema import SCHEMA_VERSION, History, Kernels, Peer, Record, Revision, Suite
from paged_bench.record.sources import package_digest, present_kernels, stale_kernels, tree_digest

__all__ = [
    "MAIN_SERIES",
    "SCHEMA_VERSION",
    "STEP_KERNELS",
    "Case",
    "Ceiling",
    "Correctness",
    "Environment",
    "Gpu",
    "History",
    "Kernels",
    "Memory",
    "Peer",
    "PeerRow",
    "Record",
    "Revision",
    "Samples",
    "Shape",
    "Suite",
    "Variant",
    "Work",
    "capture",
    "dump",
    "finish",
    "joined",
    "load",
    "marked_history",
    "package_digest",
    "parse",
    "peer_name",
    "present_kernels",
    "revision",
    "save",
    "stale_kernels",
    "tree_digest",
]
