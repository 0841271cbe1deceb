"""The CUDA backend over a driver without a GPU, and the choice between backends.

Memory, copies, the device plan, compiling and every check of the operator are the real ones. Only the
kernels do not run: the oracle computes their numbers from what lies in the device's arrays.
"""

from functools import partial

import numpy as np
import paged_cuda
import pytest
from paged_bench.demo import cuda_backend
from paged_bench.demo.backend import BackendSpec
from paged_bench.demo.config import read_config
from paged_bench.demo.cuda_backend import CudaBackend, cuda_call
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.layouts import LAYOUTS
from paged_bench.demo.llama import Llama
from paged_bench.demo.oracle_backend import OracleBackend
from paged_bench.demo.rope import read_tables
from paged_bench.demo.select import select_backend
from paged_bench.demo.weights import read_weights
from paged_bench.errors import BackendError, OptionError
from paged_cuda import Device, PagedAttention
from paged_cuda.testing import FakeDriver
from paged_kv import KVCacheManager, PageGeometry
from paged_oracle import paged_attention
from paged_schema import NotImplementedMode


class HostOp(PagedAttention):
    """The real op up to its launches, which the driver only records; then the oracle's numbers."""

    def run(self, *, stream, **operands):
        super().run(stream=stream, **operands)
        plan = operands.pop("plan")
        arrays = {name: array.to_numpy(stream) for name, array in operands.items()}
        names = ("cumulative_sequence_length", "past_seqlens", "slot_mapping", "block_table")
        arrays |= {name: array.to_numpy(stream) for name, array in zip(names, plan.arrays, strict=True)}
        # The device plan is as wide as its bounds: the rows behind the batch's own are empty.
        arrays["slot_mapping"] = arrays["slot_mapping"][: len(arrays["query"])]
        cache = arrays.pop("key_cache_out")
        del arrays["output"]
        result = paged_attention(self.call.attributes, {**arrays, "key_cache": cache}).output
        for target, host in ((operands["output"], result), (operands["key_cache"], cache)):
            self.device.driver.copy_to_device(target.pointer, host.ctypes.data, host.nbytes, 0)


@pytest.fixture
def host_device(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("PAGED_CUDA_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cubins"))
    monkeypatch.setattr(cuda_backend, "PagedAttention", HostOp)
    device = Device(FakeDriver(), 0)
    backend = partial(CudaBackend, device=device)
    monkeypatch.setattr(cuda_backend, "CudaBackend", backend)
    return backend


@pytest.fixture
def spec_of(tiny_path):
    def build(layout, dtype="float16"):
        file = GgufFile(tiny_path)
        config = read_config(file)
        cos, sin = read_tables(file, config, 64)
        return BackendSpec(
            config.layers, LAYOUTS[layout](config), PageGeometry(12, 16), dtype, cos, sin, 4, 40, 64
        )

    return build


def logits(tiny_path, backend):
    """Two sequences, prefill and decode in one step."""
    file = GgufFile(tiny_path)
    config = read_config(file)
    model = Llama(config, read_weights(file, config))
    kv = KVCacheManager(PageGeometry(12, 16), max_sequences=4, max_blocks_per_sequence=4)
    first, second = kv.admit([40, 40])
    found = []
    for handles, counts in (([first], [20]), ([first, second], [1, 30]), ([second, first], [1, 1])):
        with kv.begin_step(np.array(handles), counts) as step:
            backend.begin(step.plan())
            tokens = np.arange(sum(counts)) % 250
            found.append(model.logits(tokens, np.arange(sum(counts)), backend.attend))
            step.commit()
        kv.complete(step.epoch)
    return np.concatenate(found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_cuda_backend_hands_the_op_what_the_oracle_gets(host_device, tiny_path, spec_of, dtype):
    spec = spec_of("latent", dtype)
    backend = host_device(spec, cuda_call(spec))
    assert backend.device == "fake GPU"
    np.testing.assert_array_equal(logits(tiny_path, backend), logits(tiny_path, OracleBackend(spec)))


def test_separate_has_no_kernel(spec_of):
    with pytest.raises(NotImplementedMode, match="separate"):
        cuda_call(spec_of("separate"))


@pytest.fixture
def driver(monkeypatch):
    """Pretend that a driver is there; call with an error to pretend that it is not."""

    def pretend(error=None):
        def require_driver():
            if error is not None:
                raise error

        monkeypatch.setattr(paged_cuda, "require_driver", require_driver)

    return pretend


NO_DRIVER = paged_cuda.NoDriver("driver", "libcuda", "no such library", "an NVIDIA driver;\ninstall one")


def test_auto_takes_the_gpu_when_it_can(host_device, driver, spec_of):
    driver()
    chosen = select_backend("auto", None, spec_of("latent", "float32"))
    assert (chosen.backend.name, chosen.dtype) == ("cuda", "float16")


@pytest.mark.parametrize(
    ("layout", "dtype", "error", "reason"),
    [
        ("latent", None, NO_DRIVER, "no such library"),
        ("separate", None, None, "separate"),
        ("latent", "float32", None, "float32"),
    ],
)
def test_auto_says_why_it_takes_the_oracle(host_device, driver, spec_of, layout, dtype, error, reason):
    driver(error)
    chosen = select_backend("auto", dtype, spec_of(layout, "float32"))
    assert chosen.backend.name == "oracle"
    assert chosen.dtype == "float32"
    assert reason in chosen.reason
    assert "\n" not in chosen.reason


def test_auto_says_when_the_op_cannot_be_prepared(driver, monkeypatch, spec_of):
    def refuse(spec, call):
        raise paged_cuda.CompileError("arch", "baseline", "sm_50", "sm_80 or newer")

    driver()
    monkeypatch.setattr(cuda_backend, "CudaBackend", refuse)
    chosen = select_backend("auto", None, spec_of("latent", "float32"))
    assert chosen.backend.name == "oracle"
    assert "sm_50" in chosen.reason
    with pytest.raises(paged_cuda.CompileError):
        select_backend("cuda", None, spec_of("latent", "float32"))


def test_cuda_without_a_driver_is_an_error(driver, spec_of):
    driver(NO_DRIVER)
    with pytest.raises(BackendError, match="install one"):
        select_backend("cuda", None, spec_of("latent", "float32"))


def test_cuda_in_float32_is_an_error(spec_of):
    with pytest.raises(OptionError, match="float16"):
        select_backend("cuda", "float32", spec_of("latent", "float32"))


def test_cuda_with_separate_is_not_implemented(host_device, driver, spec_of):
    driver()
    with pytest.raises(NotImplementedMode):
        select_backend("cuda", None, spec_of("separate", "float32"))
