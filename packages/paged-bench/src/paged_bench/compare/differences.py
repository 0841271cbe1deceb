"""What must agree between two records before their times may be compared."""

from __future__ import annotations

from dataclasses import dataclass

from paged_bench.record import Record


@dataclass(frozen=True)
class Difference:
    """One key of the environment that differs."""

    key: str
    base: str
    head: str


def differences(base: Record, head: Record) -> tuple[Difference, ...]:
    """Return every key that differs; the versions of the packages under test are not among the keys."""
    ours, theirs = _identity(base), _identity(head)
    pairs = ((key, ours.get(key, "not stated"), theirs.get(key, "not stated")) for key in ours | theirs)
    return tuple(Difference(*pair) for pair in pairs if pair[1] != pair[2])


def _identity(record: Record) -> dict[str, str]:
    environment = record.environment
    found: dict[str, object] = {
        "kind": record.kind,
        "processor": environment.cpu,
        "cores": environment.cores,
        "governor": environment.governor,
        "Python": ".".join(environment.python.split(".")[:2]),
        "system": " ".join((environment.system.split() or ["?"])[::2]),
        "NumPy": environment.packages.get("numpy"),
    }
    if (gpu := environment.gpu) is not None:
        found |= {
            "GPU": gpu.name,
            "GPU card": gpu.uuid_sha256 and gpu.uuid_sha256[:12],
            "compute capability": gpu.compute_capability,
            "GPU memory": gpu.memory_bytes,
            "driver": gpu.driver_release or gpu.driver,
            "NVRTC": gpu.nvrtc,
            "ECC": gpu.ecc,
            "MIG": gpu.mig,
            "power limit": gpu.power_limit_w,
        }
    return {key: str(value) for key, value in found.items() if value is not None}
