"""The machine of a record and what it can do at best."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paged_bench.record.types import AtLeastOne, Block, Count, Positive, Sha256, Text


class Gpu(Block):
    """One device and its state; what could not be asked is None."""

    name: Text
    uuid_sha256: Sha256 | None = None
    compute_capability: Text  # "9.0"
    multiprocessors: AtLeastOne
    l2_bytes: Count | None = None
    memory_bytes: Count | None = None
    driver: Text  # the CUDA version the driver offers, "13.0"
    driver_release: str | None = None  # "580.65.06"
    nvrtc: str | None = None
    ecc: bool | None = None
    mig: bool | None = None
    persistence: bool | None = None
    power_limit_w: Positive | None = None
    sm_clock_mhz: tuple[Positive, Positive] | None = None  # before, after
    memory_clock_mhz: tuple[Positive, Positive] | None = None
    temperature_c: tuple[float, float] | None = None
    throttle_reasons: tuple[str, ...] | None = None  # those seen before or after; () = asked, none seen
    other_processes: Count | None = None


class Environment(Block):
    """The machine and the versions; no host name, no user name, no path."""

    python: Text
    system: Text  # "Linux 6.8.0 x86_64"
    cpu: Text
    cores: AtLeastOne | None = None
    governor: str | None = None
    load: tuple[float, float] | None = None  # one-minute load before and after
    packages: dict[str, str] = Field(default={})
    gpu: Gpu | None = None


class Ceiling(Block):
    """A rate that the same machine reached in the same run by the plainest program for it.

    Attributes:
        what: `read` and `copy` count bytes, `matmul` counts operations, `launch` is microseconds of an empty
            kernel inside a graph.
        value: bytes/s, operations/s or microseconds.
        dtype: of a matmul.
        method: how it was measured, in words.
        samples: the single values, in order, in the unit of `value`.
    """

    what: Literal["read", "copy", "l2_read", "matmul", "launch"]
    value: Positive
    dtype: str | None = None
    method: Text
    samples: tuple[Positive, ...] = ()
