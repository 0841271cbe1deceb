"""Record what ORT's real CUDA provider decides about generated nodes, on a machine without a GPU.

The provider of each released wheel is loaded over `fake_cudart.c`: its kernels do nothing, its host code
decides as ever. The record, which the test suite replays, is `tests/data/cuda_provider_verdicts.json`. Needs
gcc and about 2 GB of disk: `python packages/paged-schema/tools/cuda_provider/record.py CACHE`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

from paged_schema.declaration import Declaration
from paged_schema.dtypes import ONNX_NUMBER
from paged_schema.inputs import INPUT_NAMES
from paged_schema.onnx import make_model
from paged_schema.testing.nodes import concrete, lengths

HERE = Path(__file__).parent
RECORD = HERE.parents[1] / "tests" / "data" / "cuda_provider_verdicts.json"
RELEASES = {"1.29": "1.29.0", "1.30": "1.30.0", "1.31": "1.31.1"}
LIBRARIES = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10", "libcuda.so.1")
HANDLE = re.compile(r"Create(_v2)?$|DescCreate$|LayoutCreate$|PreferenceCreate$|CreateGenerator$")
SEEDS = 2400

# A few words of each message, and the rules that it stands for.
SESSION = (
    ("Invalid KV quantization", "C04"),
    ("Invalid KV cache data", "C05"),
    ("Exception during initialization", "C01 C02 C03 C07 C08"),
    ("InsertedPrecisionFreeCast_|Could not find an implementation", "N02"),
    ("", "load"),
)
RUN = (
    ("requires the FlashAttention backend", "P06"),
    ("requires FlashAttention", "P08"),
    ("'head_sink' is only supported by", "P09"),
    ("same buffer", "P02"),
    ("cos_cache and sin_cache must be passed", "P01"),
    ("bytes of shared memory", "P04"),
    ("entries must be non-negative|lower_bound", "P05"),
    ("LaunchQkNormRotaryKernel", "P10"),
    ("'key' is required when", "R03a"),
    ("'value' must be absent when", "R03b"),
    ("Packed input 'query'", "R05d"),
    ("'query' hidden size must be a multiple", "R03d R04g"),
    ("^.*: head_size must be a multiple", "R03e R04b R05b"),
    ("shall be both present, or both absent in the case", "R04c R05c"),
    ("'key' is expected to have|'query' and 'key' shall have same", "R03f R04d"),
    ("kv_hidden_size", "R04e"),
    ("'value' is expected to have|'value' shall have same", "R04f"),
    (r"'v_head_size' must be 0", "R06a"),
    ("may only differ from head_size", "R06b"),
    ("explicit 'scale'", "R06c"),
    ("'value_cache' must be absent", "R07a"),
    ("'kv_num_heads' must be 1", "R07b"),
    ("'head_sink' is not supported", "R07c"),
    ("are not supported when 'kv_cache_layout'", "R07d"),
    ("must be unset when", "R07e"),
    ("'value_cache' is required", "R07f"),
    ("'key_cache' and 'value_cache'|'value_cache' dimension|'value_cache' is expected", "R08d"),
    ("'key_cache' is expected to have", "R08a"),
    ("block_size must be a power of two", "R08b"),
    ("'key_cache' shall have|'key_cache' dimension", "R08c"),
    ("does not support an INT4 cache", "I01"),
    ("INT4 caches require head_size", "I03"),
    ("requires an explicit int4", "I02"),
    ("cumulative_sequence_length must be shape", "R09a"),
    ("seqlens must be shape", "R09b"),
    ("block_table", "R10"),
    ("slot_mapping", "R11"),
    ("head_sink", "R12"),
    ("norm_weight", "R13"),
    ("shall be both present or both absent", "R14a"),
    ("must have the same shape", "R14f"),
    ("head_size must be a multiple of 16|multiple of 16", "R14b"),
    ("must be <= head_size / 2", "R14d"),
    ("dimension 1 must be the same", "R14e"),
    ("'rotary_offset'", "R15"),
    ("must not be provided when", "R16a"),
    ("has a quantized element type", "R16b"),
    ("element type is not quantized", "R16c"),
    ("_scale' (is required|must be provided)", "R16d"),
    ("exactly 1 element", "R16e"),
    ("for PER_CHANNEL", "R16f"),
    ("_cache_dtype'", "R17"),
    ("'attention_metadata'", "R18"),
)


def environment(release: str, cache: Path) -> Path:
    """Return the interpreter of an environment with the GPU wheel of one release."""
    home = cache / f"onnxruntime-gpu-{release}"
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run(["uv", "venv", "-q", "--python", sys.executable, home], check=True)
        packages = [f"onnxruntime-gpu=={release}", "numpy", "nvidia-cuda-runtime==13.0.96"]
        subprocess.run(["uv", "pip", "install", "-q", "--python", python, "--no-deps", *packages], check=True)
    return python


def build(home: Path) -> Path:
    """Build the fake libraries for one environment: every symbol that the provider wants, doing nothing."""
    site = next((home / "lib").glob("python*/site-packages"))
    provider = site / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", provider], capture_output=True, text=True, check=True
    )
    wanted: dict[str, set[str]] = {library: set() for library in LIBRARIES}
    for line in listed.stdout.splitlines():
        name, _, library = line.split()[-1].partition("@")
        if name.startswith(("cu", "__cuda")):
            wanted.setdefault(library.lstrip("@") or "libcuda.so.1", set()).add(name)
    out = home / "fake"
    include = out / "include" / "crt"
    include.mkdir(parents=True, exist_ok=True)
    empty = (
        "__device_builtin__",
        "__cudart_builtin__",
        "CUDART_CB",
        "CUDART_DEVICE",
        "__host__",
        "__device__",
    )
    macros = [f"#define {name}" for name in empty] + ["#define __align__(n) __attribute__((aligned(n)))"]
    macros.append("#define __builtin_align__(n) __attribute__((aligned(n)))")
    macros += ["#define __device_builtin_texture_type__", "#define __device_builtin_surface_type__"]
    (include / "host_defines.h").write_text("\n".join(macros) + "\n")
    for library in LIBRARIES:
        _compile(library, wanted[library], out, next(site.glob("nvidia/*/include")))
    return out


def _compile(library: str, wanted: set[str], out: Path, headers: Path) -> None:
    source = (HERE / "fake_cudart.c").read_text() if library.startswith("libcudart") else ""
    written = set(re.findall(r"^[\w* ]*?\b(\w+)\(", source, re.MULTILINE))
    for name in sorted(wanted - written):
        if HANDLE.search(name):
            source += f"int {name}(void **handle) {{ *handle = (void *)4096; return 0; }}\n"
        elif name.endswith(("StatusName", "StatusString")):
            source += f'const char *{name}(int status) {{ return "fake"; }}\n'
        else:
            source += f"int {name}() {{ return 0; }}\n"
    (out / f"{library}.c").write_text(source)
    (out / f"{library}.map").write_text(f"{library} {{ global: *; }};\n")
    versioned = [f"-Wl,--version-script={out / library}.map"] if not library.startswith("libcuda.") else []
    flags = [
        "-w",
        "-shared",
        "-fPIC",
        "-std=gnu11",
        f"-I{out / 'include'}",
        f"-I{headers}",
        f"-Wl,-soname,{library}",
    ]
    subprocess.run(["gcc", *flags, *versioned, "-o", out / library, out / f"{library}.c"], check=True)


class Provider:
    """The CUDA provider of one release in a child process, started anew when it dies."""

    def __init__(self, python: Path, libraries: Path) -> None:
        self.command = [str(python), str(HERE / "worker.py")]
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
        self.start()

    def start(self) -> None:
        """Start the child."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.child = subprocess.Popen(self.command, env=self.environment, **pipes)  # type: ignore[call-overload]

    def ask(self, declaration: Declaration) -> tuple[str, str]:
        """Return where it ended (`session`, `run`, `ok`, `died`) and the message."""
        request = pickle.dumps(_request(declaration))
        try:
            self.child.stdin.write(struct.pack("<I", len(request)) + request)
            self.child.stdin.flush()
            head = self.child.stdout.read(4)
        except BrokenPipeError:
            head = b""
        if len(head) < 4:
            status = self.child.wait()
            self.start()
            return "died", f"signal {-status}"
        found: tuple[str, str] = pickle.loads(self.child.stdout.read(struct.unpack("<I", head)[0]))
        return found


def _request(declaration: Declaration) -> tuple[bytes, dict[str, Any], dict[str, str | None]]:
    values = lengths(declaration)
    named = zip(INPUT_NAMES, declaration.inputs, strict=False)
    inputs = {name: (ONNX_NUMBER[spec.dtype], spec.shape, values.get(name)) for name, spec in named if spec}
    names = ("output", "key_cache_out", "value_cache_out")
    sources = (None, "key_cache", "value_cache")
    outputs = {n: s for n, s, spec in zip(names, sources, declaration.outputs, strict=False) if spec}
    return make_model(declaration).SerializeToString(), inputs, outputs


def digest(declaration: Declaration) -> str:
    """Return what tells that the generator still draws the same node."""
    return hashlib.sha256(repr(declaration).encode()).hexdigest()[:10]


def told(where: str, text: str) -> str:
    """Return the rules that one verdict can stand for: ORT says the same for some that we keep apart."""
    if where == "ok":
        return "ok"
    if where == "died":
        return "X01 X02 X03 X05 X06"
    for fragment, rules in SESSION if where == "session" else RUN:
        if re.search(fragment, text):
            return rules
    raise AssertionError(f"ORT said what no rule expects: {where}: {text}")


def main(cache: Path) -> None:
    """Record."""
    providers = {}
    for version, release in RELEASES.items():
        python = environment(release, cache)
        providers[version] = Provider(python, build(python.parents[1]))
    nodes = []
    for seed in range(SEEDS):
        declaration = concrete(Random(f"cuda {seed}"))
        verdicts = {version: told(*provider.ask(declaration)) for version, provider in providers.items()}
        nodes.append([digest(declaration), *verdicts.values()])
    RECORD.write_text(json.dumps({"versions": list(RELEASES), "nodes": nodes}, indent=0) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
