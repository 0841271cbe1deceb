"""Importing a package is cheap and has no effect: it opens no driver, compiles nothing and writes nothing."""

import json
import subprocess
import sys

import pytest

PACKAGES = ("paged_schema", "paged_oracle", "paged_kv", "paged_cuda", "paged_bench")

# Runs in a fresh interpreter. Audit hooks see what C code does through ctypes, files and processes alike.
PROBE = """
import json, os, sys, time
effects = []
def watch(event, args):
    if event == "ctypes.dlopen" and any(word in str(args[0]) for word in ("cuda", "nv")):
        effects.append(f"loads {args[0]}")
    elif event in ("subprocess.Popen", "socket.connect", "os.mkdir", "os.rename", "os.remove"):
        effects.append(f"{event} {args}")
    elif event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        effects.append(f"writes {args[0]}")
sys.addaudithook(watch)
start = time.process_time()
for _ in range(2_000_000):
    pass
slowness = max(1.0, (time.process_time() - start) / 0.03)
before, start = set(sys.modules), time.process_time()
__import__(sys.argv[1])
seconds = (time.process_time() - start) / slowness
loaded = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
try:
    mapped = [line.split()[-1] for line in open("/proc/self/maps") if ".so" in line]
except FileNotFoundError:
    mapped = []
drivers = sorted({path for path in mapped if "libcuda.so" in path or "libnvrtc" in path})
print(json.dumps({"seconds": seconds, "loaded": loaded, "effects": effects + drivers}))
"""


def probe(package: str) -> dict[str, object]:
    command = [sys.executable, "-B", "-c", PROBE, package]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


@pytest.mark.parametrize("package", PACKAGES)
def test_import_has_no_effect(package: str) -> None:
    assert probe(package)["effects"] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_import_costs_well_under_half_a_second_of_cpu(package: str) -> None:
    # CPU time, the best of three, in the seconds of a machine that counts to two million in 30 ms: a heavy
    # import must fail this, a busy machine must not.
    assert min(float(str(probe(package)["seconds"])) for _ in range(3)) < 0.5


@pytest.mark.parametrize(
    ("package", "spared"),
    [
        ("paged_schema", {"numpy", "onnx", "google", "cuda"}),
        ("paged_oracle", {"onnx", "google", "cuda", "torch"}),
        ("paged_kv", {"pydantic", "ml_dtypes", "cuda"}),
        ("paged_cuda", {"ml_dtypes", "torch"}),
        ("paged_bench", {"gguf", "tokenizers", "onnx", "torch"}),
    ],
)
def test_import_does_without_what_is_optional_or_heavy(package: str, spared: set[str]) -> None:
    loaded = probe(package)["loaded"]
    assert isinstance(loaded, list)
    assert package in loaded
    assert spared & set(loaded) == set()
