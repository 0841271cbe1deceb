"""What a model file may get wrong, and that the error names the key or the tensor."""

import gguf
import numpy as np
import pytest
from paged_bench.demo.config import read_config
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.tokenizer import TextCodec
from paged_bench.demo.weights import read_weights
from paged_bench.errors import ModelFileError


def load(path):
    file = GgufFile(path)
    config = read_config(file)
    return config, TextCodec(file), read_weights(file, config)


def refusal(path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_tiny_model_loads(tiny_path):
    config, codec, weights = load(tiny_path)
    assert (config.heads, config.kv_heads, config.head_size, config.rotary_dim) == (4, 2, 16, 16)
    assert weights.output is weights.embedding
    assert codec.stop_ids == {0}


def test_an_absent_file(tmp_path):
    assert "nothing.gguf" in str(refusal(tmp_path / "nothing.gguf"))


def test_a_directory(tmp_path):
    assert str(tmp_path) in str(refusal(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"PK\x03\x04 something else", b"GGUF", b"GGUF\x03\x00\x00\x00"]
)
def test_not_a_gguf_file(tmp_path, content):
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    assert "other.gguf" in refusal(path).subject


def test_a_file_that_ends_early_anywhere(tmp_path, tiny_path):
    whole = tiny_path.read_bytes()
    for part in np.linspace(4, len(whole) - 1, 60).astype(int):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:part])
        assert refusal(path).subject


def test_a_length_that_the_file_cannot_hold(tmp_path, tiny_path):
    whole = bytearray(tiny_path.read_bytes())
    at = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    whole[at : at + 8] = (2**61).to_bytes(8, "little")
    path = tmp_path / "huge.gguf"
    path.write_bytes(whole)
    assert "huge.gguf" in refusal(path).subject


def test_flipped_bytes_never_escape_as_another_error(tmp_path, tiny_path):
    whole = tiny_path.read_bytes()
    random = np.random.default_rng(3)
    path = tmp_path / "flipped.gguf"
    refused = 0
    for _ in range(150):
        broken = bytearray(whole)
        # The header is what a damaged file breaks first; the weights are only numbers.
        broken[int(random.integers(4, 6000))] ^= int(random.integers(1, 256))
        path.write_bytes(broken)
        try:
            load(path)
        except ModelFileError:
            refused += 1
    assert refused


def test_another_architecture(tmp_path, tiny_model):
    assert "general.architecture" in refusal(tiny_model(architecture="qwen2").write(tmp_path / "m")).subject


@pytest.mark.parametrize(
    "key",
    [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.merges",
    ],
)
def test_a_missing_key_is_named(tmp_path, tiny_model, key):
    model = tiny_model()
    del model.keys[key]
    assert key in refusal(model.write(tmp_path / "m")).subject


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "yarn"),
        ("llama.expert_count", 8),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.head_count_kv", [2, 2]),
        ("llama.attention.value_length", 8),
        ("llama.rope.dimension_count", 15),
        ("llama.rope.dimension_count", 32),
        ("llama.block_count", "two"),
        ("llama.block_count", 0),
        ("llama.attention.sliding_window", 128),
        ("llama.rope.freq_base", "large"),
        ("tokenizer.ggml.model", "bert"),
        ("tokenizer.ggml.pre", "unheard-of"),
        ("tokenizer.ggml.merges", ["nospace"]),
        ("tokenizer.ggml.merges", ["never seen"]),
        ("tokenizer.ggml.eos_token_id", 1_000_000),
        ("tokenizer.ggml.token_type", [1, 2, 3]),
    ],
)
def test_a_value_out_of_place_is_named(tmp_path, tiny_model, key, value):
    error = refusal(tiny_model(keys={key: value}).write(tmp_path / "m"))
    # Three heads do not divide the width: the tensors' shapes give that away.
    assert key in error.subject or (value == 3 and "tensor" in error.subject)


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight", "blk.0.ffn_down.weight"]
)
def test_a_missing_tensor_is_named(tmp_path, tiny_model, name):
    model = tiny_model()
    del model.tensors[name]
    assert name in refusal(model.write(tmp_path / "m")).subject


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_norm.weight"])
def test_a_misshapen_tensor_is_named(tmp_path, tiny_model, name):
    model = tiny_model()
    model.tensors[name] = model.tensors[name][: len(model.tensors[name]) // 2]
    error = refusal(model.write(tmp_path / "m"))
    assert name in error.subject
    assert "shape" in error.problem


def test_a_misshapen_bias_is_named(tmp_path, tiny_model):
    model = tiny_model(biased=True)
    model.tensors["blk.0.attn_k.bias"] = np.zeros(5, np.float32)
    assert "blk.0.attn_k.bias" in refusal(model.write(tmp_path / "m")).subject


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "blk.0.ffn_gate_exps.weight", "blk.9.attn_q.weight"]
)
def test_a_tensor_without_a_place_is_named(tmp_path, tiny_model, name):
    model = tiny_model(tensors={name: np.ones((16, 16), np.float32)})
    assert name in refusal(model.write(tmp_path / "m")).subject


def test_values_that_are_not_finite_are_named(tmp_path, tiny_model):
    model = tiny_model()
    model.tensors["blk.0.attn_v.weight"][1, 1] = np.nan
    assert "blk.0.attn_v.weight" in refusal(model.write(tmp_path / "m")).subject


def test_an_integer_tensor_is_named(tmp_path, tiny_model):
    model = tiny_model()
    model.tensors["output_norm.weight"] = np.ones(32, np.int32)
    assert "output_norm.weight" in refusal(model.write(tmp_path / "m")).subject


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_quantised_tensors_are_dequantised(tmp_path, tiny_model, kind):
    quantised = gguf.GGMLQuantizationType[kind]
    name = "blk.0.ffn_up.weight"
    model = tiny_model(quantised={name: quantised})
    _, _, weights = load(model.write(tmp_path / "m"))
    expected = gguf.dequantize(gguf.quantize(model.tensors[name], quantised), quantised)
    np.testing.assert_array_equal(weights.blocks[0].gate_up.weight[:, 64:].T, expected)


@pytest.mark.parametrize("missing", [1, 2, 3, 4, 7])
def test_the_last_bytes_are_missed_in_our_own_words(tiny_path, tmp_path, missing):
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny_path.read_bytes()[:-missing])
    with pytest.raises(ModelFileError, match="bytes are wanted at byte"):
        GgufFile(path)
