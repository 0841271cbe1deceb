"""How each peer is called, held against stand-ins with the peer's documented interface that attend in NumPy.

No peer is installed where these tests run. A stand-in takes exactly the arguments of the function that it
stands for, so that a wrong order, shape or mask shows as a wrong output, which the check of a real run finds.
"""

import contextlib
import ctypes
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from paged_bench.measure.bench import Bench
from paged_bench.measure.case import CaseRun
from paged_bench.measure.counters import CudaCounters
from paged_bench.measure.inputs import Pool
from paged_bench.measure.nvml import Nvml
from paged_bench.measure.peers import all_peers
from paged_bench.measure.subject import Method
from paged_bench.measure.suite import CaseSpec
from paged_bench.measure.testing import SimulatedCounters, SimulatedGpu
from paged_cuda import CubinCache, Device, DriverError

BF16 = np.dtype(ml_dtypes.bfloat16)


class Tensor:
    """As much of a torch tensor as the peers use, over NumPy."""

    is_cuda = True

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return f"torch.{self.array.dtype}"

    def view(self, *shape):
        assert self.array.flags.c_contiguous
        return Tensor(self.array.reshape(shape))

    def reshape(self, *shape):
        return Tensor(self.array.reshape(shape))

    def transpose(self, first, second):
        return Tensor(self.array.swapaxes(first, second))

    def expand(self, *shape):
        wanted = [have if want == -1 else want for have, want in zip(self.shape, shape, strict=True)]
        return Tensor(np.broadcast_to(self.array, wanted))

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.array))

    def clone(self):
        return Tensor(self.array.copy())

    def copy_(self, other):
        self.array[...] = other.array

    def long(self):
        return Tensor(self.array.astype(np.int64))

    def __getitem__(self, key):
        return Tensor(self.array[key.array if isinstance(key, Tensor) else key])

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def get_device(self):
        return 0


def tensor_of(array: Any) -> Tensor:
    dtype = BF16 if array.dtype == "bfloat16" else np.dtype(array.dtype)
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.pointer)
    return Tensor(np.ctypeslib.as_array(memory).view(dtype).reshape(array.shape))


class Graph:
    """What is launched while it is captured runs at once; replays repeat nothing, they only take time."""

    gpu: SimulatedGpu

    def replay(self) -> None:
        self.gpu.clock_us += 100.0


@contextlib.contextmanager
def nothing(*arguments: object, **options: object):
    yield


def attention(query: np.ndarray, keys: np.ndarray, width: int, scale: float, *, causal: bool) -> np.ndarray:
    """query (tokens, heads, D) at the end of keys (n, D); the first `width` channels are the values."""
    q, k = query.astype(np.float64), keys.astype(np.float64)
    scores = np.einsum("thd,nd->thn", q, k) * scale
    if causal:
        last = len(k) - len(q) + np.arange(len(q))
        scores = np.where(np.arange(len(k)) > last[:, None, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("thn,nv->thv", weights / weights.sum(-1, keepdims=True), k[:, :width])


def rows_of(cache: Tensor, pages: np.ndarray, length: int) -> np.ndarray:
    return cache.array[pages].reshape(-1, cache.shape[-1])[:length]


def torch_module(gpu: SimulatedGpu) -> ModuleType:
    torch = ModuleType("torch")
    Graph.gpu = gpu
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    torch.cuda = SimpleNamespace(
        set_device=lambda ordinal: None,
        ExternalStream=lambda handle: SimpleNamespace(**{**vars(stream), "cuda_stream": handle}),
        stream=nothing,
        graph=nothing,
        CUDAGraph=Graph,
        is_initialized=lambda: True,
        empty_cache=lambda: None,
    )
    torch.int8, torch.int32, torch.float32 = np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.float32)
    torch.bfloat16, torch.uint8 = BF16, np.dtype(np.uint8)
    torch.from_dlpack = tensor_of
    torch.as_tensor = lambda values, dtype=None, device=None: Tensor(np.array(values, dtype))
    torch.empty = lambda *shape, dtype, device: Tensor(
        np.empty(shape[0] if isinstance(shape[0], tuple) else shape, dtype)
    )
    torch.full_like = lambda like, value: Tensor(np.full(like.shape, value, like.array.dtype))
    return torch


def dense(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> Tensor:
    """(batch, heads, tokens, D) attention; heads folded into tokens see everything."""
    out = np.empty((*query.shape[:3], value.shape[-1]), BF16)
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            keys = key.array[batch, head % key.shape[1]]
            assert np.array_equal(keys[:, : value.shape[-1]], value.array[batch, head % key.shape[1]])
            rows = query.array[batch, head][:, None]
            out[batch, head] = attention(rows, keys, value.shape[-1], scale, causal=causal)[:, 0]
    return Tensor(out)


def sdpa_modules(torch: ModuleType) -> dict[str, ModuleType]:
    chosen: list[str] = []

    @contextlib.contextmanager
    def sdpa_kernel(backend):
        chosen.append(backend)
        yield

    def scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if chosen[-1] == "cudnn":
            raise RuntimeError("No available kernel. Aborting execution.\nmore")
        return dense(query, key, value, causal=is_causal, scale=scale)

    def flex_attention(
        query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False
    ):
        assert enable_gqa == (query.shape[1] != key.shape[1])
        return dense(query, key, value, causal=block_mask is not None, scale=scale)

    def create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device="cuda"):  # noqa: N803 - torch's names
        assert mask_mod(0, 0, 3, 3)
        assert not mask_mod(0, 0, 3, 4)
        return (Q_LEN, KV_LEN)

    torch.nn = SimpleNamespace(
        functional=SimpleNamespace(scaled_dot_product_attention=scaled_dot_product_attention)
    )
    torch.compile = lambda function, dynamic: function
    kernels = ModuleType("torch.nn.attention")
    kernels.sdpa_kernel = sdpa_kernel
    kernels.SDPBackend = SimpleNamespace(
        CUDNN_ATTENTION="cudnn", FLASH_ATTENTION="flash", EFFICIENT_ATTENTION="efficient"
    )
    flex = ModuleType("torch.nn.attention.flex_attention")
    flex.flex_attention, flex.create_block_mask = flex_attention, create_block_mask
    return {"torch.nn.attention": kernels, "torch.nn.attention.flex_attention": flex}


def flash_mla_module(*, newer: bool) -> ModuleType:
    def get_mla_metadata(cache_seqlens=None, num_q_tokens_per_head_k=None, num_heads_k=None):
        return (SimpleNamespace(used=False), None) if newer else ("schedule", "splits")

    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
    ):
        assert (num_splits is None) == newer
        assert k_cache.shape[1:] == (64, 1, 576)
        out = np.empty((*q.shape[:3], head_dim_v), BF16)
        for row, length in enumerate(cache_seqlens.array):
            keys = rows_of(k_cache, block_table.array[row], length)
            out[row] = attention(q.array[row], keys, head_dim_v, softmax_scale, causal=causal)
        return Tensor(out), None

    found = ModuleType("flash_mla")
    found.get_mla_metadata, found.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    return found


class BatchMLAPagedAttentionWrapper:
    """FlashInfer's, as its documentation lists the parameters."""

    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        assert float_workspace_buffer.shape == (128 << 20,)
        self.buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        for buffer, given in zip(self.buffers, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True):
            buffer.copy_(given)
        assert (q_data_type, kv_data_type) == (BF16, BF16)
        self.plan_of = (page_size, causal, sm_scale, head_dim_ckv, head_dim_kpe, num_heads)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False):
        page_size, causal, scale, width, rope, heads = self.plan_of
        queries, pages, indices, lengths = (buffer.array for buffer in self.buffers)
        assert q_nope.shape[1:] == (heads, width)
        assert kpe_cache.shape[1:] == (page_size, rope)
        query = np.concatenate([q_nope.array, q_pe.array], -1)
        cache = Tensor(np.concatenate([ckv_cache.array, kpe_cache.array], -1))
        for row, length in enumerate(lengths):
            keys = rows_of(cache, indices[pages[row] : pages[row + 1]], length)
            mine = slice(queries[row], queries[row + 1])
            out.array[mine] = attention(query[mine], keys, width, scale, causal=causal)


def decode_attention_fwd(
    q,
    k_buffer,
    v_buffer,
    o,
    lse,
    req_to_token,
    b_seq_len,
    attn_logits,
    num_kv_splits,
    sm_scale,
    page_size=1,
    logit_cap=0.0,
):
    assert num_kv_splits == attn_logits.shape[2]
    assert attn_logits.shape == (q.shape[0], q.shape[1], num_kv_splits, v_buffer.shape[-1] + 1)
    assert k_buffer.shape[1] == page_size
    for row, length in enumerate(b_seq_len.array):
        keys = rows_of(k_buffer, req_to_token.array[row], length)
        o.array[row] = attention(q.array[row][None], keys, v_buffer.shape[-1], sm_scale, causal=False)[0]


class Binding:
    """ONNX Runtime's I/O binding over addresses."""

    def __init__(self) -> None:
        self.bound: dict[str, np.ndarray] = {}

    def bind_input(self, name, device_type, device_id, element_type, shape, buffer_ptr):
        import onnx

        assert (device_type, device_id) == ("cuda", 0)
        dtype = {onnx.TensorProto.INT32: np.dtype(np.int32), onnx.TensorProto.BFLOAT16: BF16}[element_type]
        count = int(np.prod(shape)) * dtype.itemsize
        memory = (ctypes.c_uint8 * count).from_address(buffer_ptr)
        self.bound[name] = np.ctypeslib.as_array(memory).view(dtype).reshape(shape)

    bind_output = bind_input


class InferenceSession:
    """Runs the one node of the model by the oracle, with the attributes and inputs that the model names."""

    def __init__(self, model: bytes, providers: list[Any]) -> None:
        import onnx

        ((name, options),) = providers
        assert name == "CUDAExecutionProvider"
        assert int(options["user_compute_stream"])
        loaded = onnx.load_model_from_string(model)
        onnx.checker.check_model(loaded)
        (self.node,) = loaded.graph.node
        self.attributes = {one.name: onnx.helper.get_attribute_value(one) for one in self.node.attribute}

    def io_binding(self) -> Binding:
        return Binding()

    def run_with_iobinding(self, binding: Binding) -> None:
        from paged_oracle import paged_attention

        order = (
            *("query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length"),
            *("past_seqlens", "block_table", "cos_cache", "sin_cache", "slot_mapping"),
        )
        names = dict(zip(order, self.node.input, strict=True))
        inputs = {name: binding.bound[given] for name, given in names.items() if given}
        attributes = {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in self.attributes.items()
        }
        assert binding.bound["key_cache_out"].ctypes.data == binding.bound["key_cache"].ctypes.data
        binding.bound["output"][:] = paged_attention(attributes, inputs).output


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> CubinCache:
    return CubinCache(tmp_path_factory.mktemp("cubins"))


@pytest.fixture
def gpu() -> SimulatedGpu:
    return SimulatedGpu(limit=256 << 20)


@pytest.fixture
def installed(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch):
    """Puts the stand-ins where imports find them."""
    torch = torch_module(gpu)
    flashinfer, vllm = ModuleType("flashinfer.mla"), ModuleType("triton_decode_attention")
    flashinfer.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper
    vllm.decode_attention_fwd = decode_attention_fwd
    ort = ModuleType("onnxruntime")
    ort.InferenceSession = InferenceSession
    ort.get_available_providers = lambda: ["CUDAExecutionProvider"]
    modules = {
        "torch": torch,
        **sdpa_modules(torch),
        "flash_mla": flash_mla_module(newer=True),
        "flashinfer.mla": flashinfer,
        "vllm.v1.attention.ops.triton_decode_attention": vllm,
        "onnxruntime": ort,
    }
    for name, found in modules.items():
        monkeypatch.setitem(sys.modules, name, found)
    return modules


WIDE = CaseSpec("decode", (130, 130), (1, 1), 3, 576, 512, 64, rotary_dim=0)
NARROW = CaseSpec("decode", (40, 40), (1, 1), 4, 192, 128, 16, rotary_dim=0)
ROTATED = replace(NARROW, rotary_dim=64)
RAGGED = CaseSpec("mixed", (40, 33, 70), (1, 17, 2), 4, 192, 128, 16)
PREFILL = CaseSpec("prefill", (24,), (24,), 4, 192, 128, 16)
SPECULATIVE = replace(WIDE, group="speculative", query_lens=(2, 2))


def row_of(gpu, cubins, name, spec):
    (peer,) = (peer for peer in all_peers() if peer.name == name)
    bench = Bench(Device(gpu, 0), SimulatedCounters(gpu))
    run = CaseRun(bench, Pool(bench), Method(kernel="baseline", peers=(peer,), cache=cubins))
    (row,) = run.measure(spec).case.peers
    return row


@pytest.mark.parametrize(
    ("name", "spec", "title"),
    [
        ("flashmla", WIDE, "FlashMLA"),
        ("flashmla", SPECULATIVE, "FlashMLA"),
        ("flashinfer-fa3", ROTATED, "FlashInfer fa3"),
        ("flashinfer-fa2", RAGGED, "FlashInfer fa2"),
        ("vllm-triton", ROTATED, "Triton (vLLM)"),
        ("vllm-triton", replace(RAGGED, query_lens=(1, 1, 1)), "Triton (vLLM)"),
        ("sdpa", ROTATED, "torch SDPA (flash)"),
        ("sdpa", PREFILL, "torch SDPA (flash)"),
        ("flex", PREFILL, "flex_attention"),
        ("ort", ROTATED, "ONNX Runtime"),
        ("ort", RAGGED, "ONNX Runtime"),
    ],
)
def test_a_peer_gets_what_its_interface_asks_for(gpu, cubins, installed, name, spec, title):
    row = row_of(gpu, cubins, name, spec)
    assert row.failed is None
    assert row.peer == title
    assert row.correctness.relative_error < 5e-3
    timings = {one.timing for one in row.series}
    assert timings == ({"eager"} if name == "ort" else {"graph", "eager"})


def test_the_older_interface_of_flashmla_works_too(gpu, cubins, installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla_module(newer=False))
    assert row_of(gpu, cubins, "flashmla", WIDE).failed is None


def test_a_peer_that_computes_something_else_is_a_row_and_not_timed(gpu, cubins, installed, monkeypatch):
    def wrong(q, *arguments, **options):
        decode_attention_fwd(Tensor(q.array[:, ::-1]), *arguments, **options)

    name = "vllm.v1.attention.ops.triton_decode_attention"
    monkeypatch.setattr(sys.modules[name], "decode_attention_fwd", wrong)
    row = row_of(gpu, cubins, "vllm-triton", NARROW)
    assert "wrong output" in row.failed
    assert row.series == ()


def test_sizes_that_did_not_compile_are_not_tried_again(gpu, cubins, installed, monkeypatch):
    tried = []

    def refuse(*arguments, **options):
        tried.append(1)
        raise ValueError("out of\nshared memory")

    monkeypatch.setattr(sys.modules["torch"], "compile", lambda function, dynamic: refuse)
    (peer,) = (peer for peer in all_peers() if peer.name == "flex")
    bench = Bench(Device(gpu, 0), SimulatedCounters(gpu))
    run = CaseRun(bench, Pool(bench), Method(kernel="baseline", peers=(peer,), cache=cubins))
    for spec in (PREFILL, replace(PREFILL, heads=5)):
        (row,) = run.measure(spec).case.peers
        assert "out of shared memory" in row.failed
    assert len(tried) == 1


def test_a_build_of_ort_without_cuda_says_so(gpu, cubins, installed, monkeypatch):
    monkeypatch.setattr(
        sys.modules["onnxruntime"], "get_available_providers", lambda: ["CPUExecutionProvider"]
    )
    assert "no CUDA provider" in row_of(gpu, cubins, "ort", NARROW).failed


class Library:
    """NVML as far as it is asked; a function that is not here is not in the library."""

    def __init__(self, known: str = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f") -> None:
        self.known = known

    def nvmlInit_v2(self):  # noqa: N802 - NVML's name
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802 - NVML's name
        return 0 if uuid.decode() == self.known else 6

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802 - NVML's name
        return 0

    def nvmlDeviceGetUtilizationRates(self, device, rates):  # noqa: N802 - NVML's name
        rates._obj.gpu = 42
        return 0

    def nvmlDeviceGetMigMode(self, device, current, pending):  # noqa: N802 - NVML's name
        current._obj.value = 0
        return 0

    def nvmlDeviceGetEccMode(self, device, current, pending):  # noqa: N802 - NVML's name
        return 3  # not supported

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device, count, rows):  # noqa: N802 - NVML's name
        count._obj.value = 2
        rows[0].pid, rows[1].pid = 7, 9
        return 0

    def nvmlDeviceGetClockInfo(self, device, kind, value):  # noqa: N802 - NVML's name
        value._obj.value = {1: 1980, 2: 3201}[kind]
        return 0

    def nvmlDeviceGetPowerManagementLimit(self, device, value):  # noqa: N802 - NVML's name
        value._obj.value = 700_000
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device, value):  # noqa: N802 - NVML's name
        value._obj.value = 0x4 | 0x1
        return 0

    def nvmlSystemGetDriverVersion(self, text, length):  # noqa: N802 - NVML's name
        text.value = b"580.159.04"
        return 0


UUID = bytes(range(16)).hex()


def test_the_state_is_what_the_library_says_and_none_where_it_says_nothing(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    state = Nvml().state(UUID)
    assert (state.utilization, state.processes, state.mig) == (42, frozenset({7, 9}), False)
    assert (state.sm_clock_mhz, state.memory_clock_mhz, state.power_limit_w) == (1980.0, 3201.0, 700.0)
    assert (state.throttle, state.driver_release) == (("sw power cap",), "580.159.04")
    assert state.ecc is state.temperature_c is state.persistence is None
    assert Nvml().state().utilization == 42


def test_a_slice_is_known_by_its_uuid(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library("MIG-00010203-0405-0607-0809-0a0b0c0d0e0f"))
    state = Nvml().state(UUID)
    assert (state.mig, state.utilization) == (True, None)
    assert Nvml().state("ff" * 16).mig is None


def test_the_driver_s_answers_are_read_and_its_failures_are_typed(monkeypatch):
    class Status(int):
        name = "CUDA_ERROR_INVALID_VALUE"

    fine, wrong = Status(0), Status(1)
    answers = {
        "cuEventCreate": (fine, 5),
        "cuEventElapsedTime": (fine, 1.5),
        "cuMemGetInfo": (fine, 3, 4),
        "cuDeviceGet": (fine, 0),
        "cuDeviceGetUuid": (fine, SimpleNamespace(bytes=bytes(range(16)))),
        "cuDeviceGetAttribute": (fine, 60),
        "cuDeviceTotalMem": (fine, 141),
        "cuEventDestroy": (wrong,),
        "cuEventRecord": (fine,),
    }
    counters = CudaCounters()
    functions = {name: lambda *arguments, answer=answer: answer for name, answer in answers.items()}
    kinds = {
        "CUevent_flags": counters._cuda.CUevent_flags,
        "CUdevice_attribute": counters._cuda.CUdevice_attribute,
    }
    monkeypatch.setattr(counters, "_cuda", SimpleNamespace(**functions, **kinds))
    event = counters.create_event()
    counters.record_event(event, 0)
    assert (event, counters.elapsed_us(5, 6), counters.memory()) == (5, 1500.0, (3, 4))
    facts = counters.facts(0)
    assert (facts.uuid, facts.l2_bytes, facts.memory_bytes) == (UUID, 60, 141)
    assert len(facts.uuid_sha256) == 64
    with pytest.raises(DriverError, match="cuEventDestroy"):
        counters.destroy_event(event)
