"""A tiny llama model as a GGUF file by gguf's own writer, and an independent forward pass over it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

_SPECIAL = ("<|end|>", "<|start|>")
_MERGES = ("t h", "th e", "Ġ the", "i n", "Ġ a", "a n")


def _byte_pieces() -> list[str]:
    """The 256 printable stand-ins of a byte-level vocabulary, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


@dataclass
class TinyModel:
    """The keys and tensors of a small llama file; change them, then write."""

    layers: int = 2
    width: int = 32
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    rotary_dim: int | None = None
    tied: bool = True
    biased: bool = False
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    quantised: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)
    architecture: str = "llama"

    def __post_init__(self) -> None:
        tokens = [*_SPECIAL, *_byte_pieces(), *(merge.replace(" ", "") for merge in _MERGES)]
        self.vocabulary = len(tokens)
        self.keys = {
            "llama.block_count": self.layers,
            "llama.context_length": 512,
            "llama.embedding_length": self.width,
            "llama.feed_forward_length": self.hidden,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 10_000.0,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL)),
            "tokenizer.ggml.merges": list(_MERGES),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.add_bos_token": False,
            **self.keys,
        }
        if self.head_size * self.heads != self.width:
            self.keys.setdefault("llama.attention.key_length", self.head_size)
            self.keys.setdefault("llama.attention.value_length", self.head_size)
        if self.rotary_dim is not None:
            self.keys["llama.rope.dimension_count"] = self.rotary_dim
        self.tensors = self._random_tensors() | self.tensors

    def _random_tensors(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(7)

        def weight(*shape: int) -> np.ndarray:
            return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

        query, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        tensors = {"token_embd.weight": weight(self.vocabulary, self.width) * 4}
        tensors["output_norm.weight"] = 1 + 0.1 * weight(self.width)
        if not self.tied:
            tensors["output.weight"] = weight(self.vocabulary, self.width)
        for index in range(self.layers):
            shapes = {
                "attn_q": (query, self.width),
                "attn_k": (kv, self.width),
                "attn_v": (kv, self.width),
                "attn_output": (self.width, query),
                "ffn_gate": (self.hidden, self.width),
                "ffn_up": (self.hidden, self.width),
                "ffn_down": (self.width, self.hidden),
            }
            for name, shape in shapes.items():
                tensors[f"blk.{index}.{name}.weight"] = weight(*shape) * 2
                if self.biased:
                    tensors[f"blk.{index}.{name}.bias"] = weight(shape[0])
            for name in ("attn_norm", "ffn_norm"):
                tensors[f"blk.{index}.{name}.weight"] = (1 + 0.1 * weight(self.width)).astype(np.float32)
        return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.keys.items():
            _add_key(writer, key, value)
        for name, tensor in self.tensors.items():
            kind = self.quantised.get(name)
            if kind is None:
                writer.add_tensor(name, tensor)
            else:
                writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def logits(self, ids: list[int]) -> np.ndarray:
        """The logits after every token, in float64 and with adjacent rotary pairs, as the file has them."""
        tensors = {name: tensor.astype(np.float64) for name, tensor in self.tensors.items()}
        x = tensors["token_embd.weight"][ids]
        for index in range(self.layers):
            block = {
                name.removeprefix(f"blk.{index}."): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"blk.{index}.")
            }
            x = x + self._attention(block, _norm(x, block["attn_norm.weight"]))
            normed = _norm(x, block["ffn_norm.weight"])
            gate = _linear(block, "ffn_gate", normed)
            x = x + _linear(block, "ffn_down", gate / (1 + np.exp(-gate)) * _linear(block, "ffn_up", normed))
        output = tensors["token_embd.weight"] if self.tied else tensors["output.weight"]
        return _norm(x, tensors["output_norm.weight"]) @ output.T

    def _attention(self, block: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        count = len(x)
        query = self._rotate(_linear(block, "attn_q", x).reshape(count, self.heads, self.head_size))
        key = self._rotate(_linear(block, "attn_k", x).reshape(count, self.kv_heads, self.head_size))
        value = _linear(block, "attn_v", x).reshape(count, self.kv_heads, self.head_size)
        group = self.heads // self.kv_heads
        scores = np.einsum("qhd,khd->hqk", query, key.repeat(group, 1)) / np.sqrt(self.head_size)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, value.repeat(group, 1))
        return _linear(block, "attn_output", mixed.reshape(count, -1))

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        size = self.rotary_dim or self.head_size
        frequency = self.keys["llama.rope.freq_base"] ** (-np.arange(0, size, 2) / size)
        if "rope_freqs.weight" in self.tensors:
            frequency = frequency / self.tensors["rope_freqs.weight"]
        positions = np.arange(len(x)) / self.keys.get("llama.rope.scaling.factor", 1.0)
        turn = np.exp(1j * positions[:, None, None] * frequency)
        turned = (x[..., 0:size:2] + 1j * x[..., 1:size:2]) * turn
        result = x.copy()
        result[..., 0:size:2], result[..., 1:size:2] = turned.real, turned.imag
        return result


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def _linear(block: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ block[f"{name}.weight"].T + block.get(f"{name}.bias", 0.0)


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., TinyModel]:
    return TinyModel


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unchanged tiny model."""
    return TinyModel().write(tmp_path_factory.mktemp("model") / "tiny.gguf")
