"""Arrays and streams of other libraries reach the kernels as they are."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paged_cuda import ArgumentMismatch, DeviceArray, PagedAttention, Stream
from parity import Result, assert_close, bits, bounds_of, call_of, poisoned, reference, upload
from problems import Case, Problem, build

CASE = Case((2, 1), (20, 33), heads=4, head_size=192, v_head_size=128, block_size=16, slots=True)


def torch_arrays(problem: Problem) -> dict[str, Any]:
    import torch

    def tensor(array: Any) -> Any:
        if array.dtype.name != "bfloat16":
            return torch.from_numpy(array).cuda()
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).cuda()

    return {name: tensor(np.ascontiguousarray(array)) for name, array in problem.inputs.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("door", ["torch", "dlpack", "interface"])
def test_torch_tensors(dtype: str, door: str) -> None:
    torch = pytest.importorskip("torch")
    problem = build(Case(**{**CASE.__dict__, "dtype": dtype}))
    want = reference(problem)
    tensors = torch_arrays(problem)
    output = torch.full(want.output.shape, float("nan"), dtype=getattr(torch, dtype), device="cuda")
    lse = torch.full(want.lse.shape, float("nan"), device="cuda")
    wrap = {"torch": lambda t: t, "dlpack": by_dlpack, "interface": by_interface}[door]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    op = PagedAttention(call_of(problem), bounds_of(problem)).prepare()
    arrays = {name: wrap(tensor) for name, tensor in tensors.items()}
    op.run(
        **arrays, output=wrap(output), lse=wrap(lse), key_cache_out=wrap(tensors["key_cache"]), stream=stream
    )
    stream.synchronize()

    def back(tensor: Any) -> Any:
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.uint16).cpu().numpy().view(want.output.dtype)
        return tensor.cpu().numpy()

    got = Result(back(output), back(tensors["key_cache"]), back(lse))
    assert_close(f"arrays by {door}", op.explain().path, got, want)


def by_dlpack(tensor: Any) -> Any:
    return SimpleNamespace(
        __dlpack__=tensor.__dlpack__, __dlpack_device__=tensor.__dlpack_device__, kept=tensor
    )


def by_interface(tensor: Any) -> Any:
    import torch

    names = {torch.bfloat16: "<V2", torch.float16: "<f2", torch.float32: "<f4", torch.int32: "<i4"}
    interface = {
        "shape": tuple(tensor.shape),
        "strides": None,
        "typestr": names[tensor.dtype],
        "data": (tensor.data_ptr(), False),
        "version": 3,
    }
    return SimpleNamespace(__cuda_array_interface__=interface, kept=tensor)


def test_our_arrays_reach_torch_without_a_copy(stream: Stream) -> None:
    torch = pytest.importorskip("torch")
    host = np.arange(12, dtype=np.float16).reshape(3, 4)
    array = DeviceArray.from_numpy(host, stream, stream.device)
    tensor = torch.from_dlpack(array)
    assert tensor.data_ptr() == array.pointer
    del array
    np.testing.assert_array_equal(tensor.cpu().numpy(), host)
    halves = DeviceArray.from_numpy(np.arange(4, dtype=np.uint16), stream, stream.device, dtype="bfloat16")
    assert torch.from_dlpack(halves).dtype is torch.bfloat16


def test_cuda_core_buffers_and_streams() -> None:
    from cuda.core import Device as CoreDevice
    from cuda.core import DeviceMemoryResource

    problem = build(CASE)
    want = reference(problem)
    core = CoreDevice(0)
    core.set_current()
    stream = core.create_stream()
    arrays: dict[str, Any] = dict(upload(problem, Stream(0)))
    nbytes = want.output.nbytes
    buffer = DeviceMemoryResource(core).allocate(nbytes, stream=stream)
    output = DeviceArray.from_pointer(buffer, want.output.shape, "bfloat16", 0)
    op = PagedAttention(call_of(problem), bounds_of(problem)).prepare()
    op.run(**arrays, output=output, stream=stream)
    stream.sync()
    got = output.to_numpy(stream)
    np.testing.assert_allclose(
        got.astype(np.float32), want.output.astype(np.float32), rtol=2.01 / 128, atol=8e-4
    )
    np.testing.assert_array_equal(bits(arrays["key_cache"].to_numpy(stream)), bits(want.cache))


def test_cpu_tensors_are_refused(stream: Stream) -> None:
    torch = pytest.importorskip("torch")
    problem = build(CASE)
    op = PagedAttention(call_of(problem), bounds_of(problem), device=stream.device).prepare()
    arrays = {**upload(problem, stream), "output": torch.zeros(3, 512, dtype=torch.bfloat16)}
    with pytest.raises(ArgumentMismatch, match="output"):
        op.run(**arrays, stream=stream)


def test_cupy_arrays_and_streams() -> None:
    cupy = pytest.importorskip("cupy")
    problem = build(Case(**{**CASE.__dict__, "dtype": "float16"}))
    want = reference(problem)
    arrays = {name: cupy.asarray(array) for name, array in problem.inputs.items()}
    output, lse = (
        cupy.full(want.output.shape, np.nan, np.float16),
        cupy.full(want.lse.shape, np.nan, np.float32),
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    op = PagedAttention(call_of(problem), bounds_of(problem)).prepare()
    op.run(**arrays, output=output, lse=lse, stream=stream)
    stream.synchronize()
    got = Result(output.get(), arrays["key_cache"].get(), lse.get())
    assert_close("arrays by CuPy", op.explain().path, got, want)


def test_jax_arrays_as_inputs(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX arrays never change, so they are inputs only."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    problem = build(CASE)
    want = reference(problem)
    arrays: dict[str, Any] = dict(upload(problem, stream))
    for name in ("query", "key", "cos_cache", "sin_cache", "block_table"):
        arrays[name] = jax.numpy.asarray(problem.inputs[name]).block_until_ready()
    output, lse = poisoned(want.output.shape, "bfloat16", stream), poisoned(want.lse.shape, "float32", stream)
    op = PagedAttention(call_of(problem), bounds_of(problem), device=stream.device).prepare()
    op.run(**arrays, output=output, lse=lse, stream=stream)
    got = Result(output.to_numpy(stream), arrays["key_cache"].to_numpy(stream), lse.to_numpy(stream))
    assert_close("arrays by JAX", op.explain().path, got, want)
