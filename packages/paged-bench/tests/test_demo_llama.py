"""The forward pass over pages against an independent one over whole sequences, for every geometry."""

import gguf
import numpy as np
import pytest
from paged_bench.demo.backend import BackendSpec
from paged_bench.demo.config import read_config
from paged_bench.demo.decoder import GreedyDecoder
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.layouts import LAYOUTS
from paged_bench.demo.llama import Llama
from paged_bench.demo.oracle_backend import OracleBackend
from paged_bench.demo.rope import half_split_order, read_tables
from paged_bench.demo.weights import read_weights
from paged_bench.errors import BackendError, ModelFileError
from paged_kv import KVCacheManager, PageGeometry

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 264, 45)]


def paged_logits(path, layout, *, block_size=16, chunks=(45,), dtype="float32"):
    """The logits after every token, run through pages in chunks."""
    file = GgufFile(path)
    config = read_config(file)
    cos, sin = read_tables(file, config, 64)
    geometry = PageGeometry(8, block_size)
    backend = OracleBackend(
        BackendSpec(config.layers, LAYOUTS[layout](config), geometry, dtype, cos, sin, 1, 64, 64)
    )
    model = Llama(config, read_weights(file, config))
    kv = KVCacheManager(geometry, max_sequences=1, max_blocks_per_sequence=4)
    handles = kv.admit([len(IDS)])
    results, done = [], 0
    for chunk in chunks:
        with kv.begin_step(handles, [chunk]) as step:
            backend.begin(step.plan())
            results.append(model.logits(np.array(IDS[done : done + chunk]), np.arange(chunk), backend.attend))
            step.commit()
        kv.complete(step.epoch)
        done += chunk
    return np.concatenate(results)


MODELS = {
    "grouped": {},
    "multi-head": {"kv_heads": 4},
    "one key head": {"kv_heads": 1},
    "wide heads": {"head_size": 32},
    "half rotated": {"head_size": 32, "rotary_dim": 16},
    "biased": {"biased": True},
    "untied": {"tied": False},
    "linear scaling": {"keys": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
    "frequency divisors": {"tensors": {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}},
    "three layers": {"layers": 3, "hidden": 96},
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_independent_ones(tmp_path, tiny_model, name, layout):
    model = tiny_model(**MODELS[name])
    expected = model.logits(IDS)
    found = paged_logits(model.write(tmp_path / "m"), layout, chunks=(20, 1, 1, 23))
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_the_block_size_changes_nothing(tiny_path, tiny_model, layout, block_size):
    expected = tiny_model().logits(IDS)
    found = paged_logits(tiny_path, layout, block_size=block_size, chunks=(45,))
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.01), ("bfloat16", 0.08)])
def test_sixteen_bits_stay_near(tiny_path, tiny_model, layout, dtype, bound):
    expected = tiny_model().logits(IDS)
    found = paged_logits(tiny_path, layout, dtype=dtype)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert 0 < error < bound


def test_the_independent_pass_notices_the_wrong_pairing(tmp_path, tiny_model):
    model = tiny_model()
    expected = model.logits(IDS)
    order = half_split_order(model.heads, model.head_size, model.head_size)
    model.tensors["blk.0.attn_q.weight"] = model.tensors["blk.0.attn_q.weight"][order]
    found = paged_logits(model.write(tmp_path / "m"), "latent")
    assert np.abs(found - expected).max() > 1e-2 * np.abs(expected).max()


def test_a_quantised_model_runs(tmp_path, tiny_model):
    kind = gguf.GGMLQuantizationType.Q8_0
    model = tiny_model()
    model.quantised = {name: kind for name in model.tensors if "norm" not in name}
    path = model.write(tmp_path / "m")
    model.tensors |= {
        name: gguf.dequantize(gguf.quantize(model.tensors[name], kind), kind) for name in model.quantised
    }
    expected = model.logits(IDS)
    np.testing.assert_allclose(paged_logits(path, "separate"), expected, atol=2e-4 * np.abs(expected).max())


def test_values_beyond_the_element_type_are_refused(tmp_path, tiny_model):
    model = tiny_model()
    model.tensors["blk.0.attn_v.weight"] *= 1e6
    file = GgufFile(model.write(tmp_path / "m"))
    config = read_config(file)
    cos, sin = read_tables(file, config, 64)
    geometry = PageGeometry(8, 16)
    spec = BackendSpec(config.layers, LAYOUTS["latent"](config), geometry, "float16", cos, sin, 1, 64, 64)
    decoder = GreedyDecoder(Llama(config, read_weights(file, config)), OracleBackend(spec))
    kv = KVCacheManager(geometry, max_sequences=1, max_blocks_per_sequence=4)
    with kv.begin_step(kv.admit([4]), [4]) as step, pytest.raises(BackendError, match="float32"):
        decoder(step.plan(), np.arange(4), np.array([3]))


@pytest.mark.parametrize(
    "key", ["llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon", "llama.rope.scale_linear"]
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_numbers_that_make_no_angle_or_norm_are_refused(tiny_model, tmp_path, key, value):
    path = tiny_model(keys={key: value}).write(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="positive"):
        read_config(GgufFile(path))


def test_a_frequency_divisor_of_zero_is_refused(tiny_model, tmp_path):
    factors = np.array([1, 2, 0, 1, 1, 1, 1, 1], np.float32)
    file = GgufFile(tiny_model(tensors={"rope_freqs.weight": factors}).write(tmp_path / "model.gguf"))
    with pytest.raises(ModelFileError, match="rope_freqs"):
        read_tables(file, read_config(file), 4)
