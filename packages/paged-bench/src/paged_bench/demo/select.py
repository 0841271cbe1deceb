"""Which backend runs, and why; a backend that cannot run is never chosen silently."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paged_schema import NotImplementedMode

from paged_bench.demo.backend import AttentionBackend, BackendSpec
from paged_bench.demo.oracle_backend import OracleBackend
from paged_bench.errors import BackendError, OptionError

# Half precision keeps three more bits of the model's keys and values than bfloat16, and they are small.
_CUDA_DTYPE = "float16"
_ORACLE_DTYPE = "float32"


@dataclass(frozen=True)
class Selection:
    """An opened backend, its element type, and why it is this one."""

    backend: AttentionBackend
    dtype: str
    reason: str


def select_backend(choice: str, dtype: str | None, spec: BackendSpec) -> Selection:
    """Open the asked-for backend; `auto` takes CUDA where it can run the call.

    Args:
        choice: `auto`, `oracle` or `cuda`.
        dtype: Element type, or None for the backend's default.
        spec: What to build for; its dtype is replaced.

    Raises:
        OptionError: float32 with the CUDA backend.
        BackendError: CUDA was asked for and there is no driver or device.
        NotImplementedMode: CUDA was asked for and has no kernel for the layout.
    """
    if choice == "oracle":
        return _oracle(dtype, spec, "asked for")
    if choice == "cuda":
        if dtype == "float32":
            raise OptionError(
                "--dtype float32",
                "the CUDA op computes in 16 bits",
                "use float16 or bfloat16, or --backend oracle",
            )
        try:
            return _cuda(dtype, spec, "asked for")
        except NotImplementedMode as error:
            error.add_note("use --layout latent, or --backend oracle")
            raise
    if dtype == "float32":
        return _oracle(dtype, spec, "float32 runs on the reference only")
    try:
        return _cuda(dtype, spec, "a GPU is here")
    except BackendError as error:
        return _oracle(dtype, spec, f"no CUDA, {error.problem}")
    except NotImplementedMode:
        return _oracle(dtype, spec, f"the CUDA op has no kernel for the {spec.layout.name} layout")
    except _cuda_error() as error:
        return _oracle(dtype, spec, f"CUDA failed, {' '.join(str(error).split())}")


def _oracle(dtype: str | None, spec: BackendSpec, reason: str) -> Selection:
    chosen = dtype or _ORACLE_DTYPE
    return Selection(OracleBackend(replace(spec, dtype=chosen)), chosen, reason)


def _cuda_error() -> type[Exception]:
    from paged_cuda import PagedCudaError

    return PagedCudaError


def _cuda(dtype: str | None, spec: BackendSpec, reason: str) -> Selection:
    from paged_cuda import NoDriver, require_driver

    from paged_bench.demo.cuda_backend import CudaBackend, cuda_call

    chosen = dtype or _CUDA_DTYPE
    wanted = replace(spec, dtype=chosen)
    call = cuda_call(wanted)
    try:
        require_driver()
    except NoDriver as error:
        advice = f"required is {error.expected}; --backend oracle needs no GPU"
        raise BackendError("--backend cuda", f"{error.subject}: {error.got}", advice) from error
    return Selection(CudaBackend(wanted, call), chosen, reason)
