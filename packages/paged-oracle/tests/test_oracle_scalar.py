"""The operator once more, one Python float at a time, sharing nothing with the package but the cases."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from paged_oracle import paged_attention
from paged_oracle.testing import Case, make_case

Vector = list[float]
Heads = list[list[Vector]]  # [token][head][channel]

# Significant digits, exponent of the smallest normal number, largest number.
FORMATS = {
    "float16": (11, -14, 65504.0),
    "bfloat16": (8, -126, 2.0**127 * (2 - 2.0**-7)),
    "float32": (24, -126, 2.0**127 * (2 - 2.0**-23)),
    "float8e4m3fn": (4, -6, 448.0),
}


def nearest(x: float, name: str) -> float:
    if x == 0 or not math.isfinite(x):
        return x
    digits, lowest, largest = FORMATS[name]
    quantum = 2.0 ** (max(math.frexp(x)[1] - 1, lowest) + 1 - digits)
    rounded = round(x / quantum) * quantum
    return math.copysign(rounded if abs(rounded) <= largest else math.inf, x)


class Scalar:
    """One call; `run` gives output, lse and the caches after it."""

    def __init__(
        self, case: Case, inputs: dict[str, np.ndarray], dtype: str, stored: str, exact: bool
    ) -> None:
        self.node = case.attributes
        self.inputs = inputs
        self.dtype, self.stored, self.exact = dtype, stored, exact
        self.caches = {n: inputs[n].copy() for n in ("key_cache", "value_cache") if n in inputs}
        self.heads, self.kv_heads = self.node.num_heads, self.node.kv_num_heads
        sections = self.heads + (0 if "key" in inputs else 2 * self.kv_heads)
        self.size = inputs["query"].shape[1] // sections
        self.tokens = len(inputs["query"])

    def to(self, x: float, name: str) -> float:
        return x if self.exact else nearest(x, name)

    def split(self, name: str, first: int, count: int) -> Heads:
        wide = self.inputs[name].astype(np.float64).tolist()
        return [
            [row[(first + h) * self.size : (first + h + 1) * self.size] for h in range(count)] for row in wide
        ]

    def projections(self) -> tuple[Heads, Heads, Heads | None]:
        q, kv = self.heads, self.kv_heads
        query = self.split("query", 0, q)
        if "key" not in self.inputs:
            return query, self.split("query", q, kv), self.split("query", q + kv, kv)
        values = self.split("value", 0, kv) if "value" in self.inputs else None
        return query, self.split("key", 0, kv), values

    def norm(self, head: Vector, name: str) -> Vector:
        weight = self.inputs[name].astype(np.float64).tolist()
        epsilon = nearest(self.node.qk_norm_epsilon, "float32")
        if self.exact:
            root = math.sqrt(math.fsum(x * x for x in head) / len(head) + epsilon)
            return [x / root * w for x, w in zip(head, weight, strict=True)]
        lanes = [nearest(x * x, "float32") for x in head]
        lanes += [0.0] * ((32 if len(head) <= 32 else 64) - len(head))
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [nearest(a + b, "float32") for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        mean = nearest(nearest(lanes[0] / len(head), "float32") + epsilon, "float32")
        inverse = nearest(1 / math.sqrt(mean), "float32")
        scaled = [
            nearest(nearest(x * inverse, "float32") * w, "float32") for x, w in zip(head, weight, strict=True)
        ]
        return [nearest(x, self.dtype) for x in scaled]

    def rotate(self, head: Vector, position: int) -> Vector:
        cos, sin = (self.inputs[n][position].astype(np.float64).tolist() for n in ("cos_cache", "sin_cache"))
        half, offset, interleaved = len(cos), self.node.rotary_offset, self.node.rotary_interleaved == 1
        rotated = list(head)
        for r in range(2 * half):
            partner = r ^ 1 if interleaved else (r + half) % (2 * half)
            column = r // 2 if interleaved else r % half
            sign = -1 if partner > r else 1
            other = self.to(sign * head[offset + partner] * sin[column], self.dtype)
            own = head[offset + r] * cos[column]
            own = own if self.dtype == "float16" else self.to(own, self.dtype)
            rotated[offset + r] = self.to(own + other, self.dtype)
        return rotated

    def scale(self, name: str, head: int, channel: int) -> float | None:
        if name not in self.inputs:
            return None
        flat = self.inputs[name].reshape(-1)
        return float(flat[0] if len(flat) == 1 else flat[head * self.size + channel])

    def code(self, x: float, scale: float | None) -> float:
        if scale is None:
            return nearest(x, self.stored)
        if self.exact or self.stored == "uint8":
            x = self.to(x / scale, "float32") if scale else 0.0
        else:
            x = nearest(x * (nearest(1 / scale, "float32") if scale else 0.0), "float32")
        if self.stored == "uint8":
            return round(min(7.0, max(-8.0, x))) + 8
        if self.stored == "int8":
            return min(127, max(-128, round(x)))
        return nearest(min(448.0, max(-448.0, x)), self.stored)

    def write(self, name: str, slot: int, rows: list[Vector]) -> None:
        cache = self.caches[name]
        block, offset = divmod(slot, cache.shape[1])
        for h, row in enumerate(rows):
            codes = [self.code(x, self.scale(f"{name[0]}_scale", h, c)) for c, x in enumerate(row)]
            if self.stored == "uint8":
                codes = [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
            cache[block, offset, h] = np.array(codes).astype(cache.dtype)

    def read(self, name: str, block: int, offset: int, head: int) -> Vector:
        codes = self.caches[name][block, offset, head].astype(np.float64).tolist()
        if self.stored == "uint8":
            codes = [nibble - 8 for byte in codes for nibble in (byte % 16, byte // 16)]
        scales = [self.scale(f"{name[0]}_scale", head, c) for c in range(self.size)]
        return [code if s is None else code * s for code, s in zip(codes, scales, strict=True)]

    def block(self, sequence: int, position: int) -> int | None:
        table, cache = self.inputs["block_table"], self.caches["key_cache"]
        column = position // cache.shape[1]
        entry = int(table[sequence, column]) if column < table.shape[1] else -1
        return entry if 0 <= entry < len(cache) else None

    def places(self, sequence: int, position: int, context: int) -> list[tuple[int, int]]:
        window = self.node.local_window_size
        first = max(0, position - window + 1) if window > 0 else 0
        last = position if self.node.is_causal in (None, 1) else context - 1
        found = [
            (self.block(sequence, j), j % self.caches["key_cache"].shape[1]) for j in range(first, last + 1)
        ]
        return [(block, offset) for block, offset in found if block is not None]

    def slot(self, token: int, sequence: int, position: int) -> int:
        blocks, block_size = self.caches["key_cache"].shape[:2]
        if "slot_mapping" in self.inputs:
            given = int(self.inputs["slot_mapping"][token])
            return given if 0 <= given < blocks * block_size else -1
        block = self.block(sequence, position)
        return -1 if block is None else block * block_size + position % block_size

    def attend(self, query: Vector, head: int, places: list[tuple[int, int]]) -> tuple[Vector, float]:
        size = self.node.v_head_size or self.size
        kv = head * self.kv_heads // self.heads
        scale = nearest(self.node.scale or self.size**-0.5, "float32")
        cap = nearest(self.node.softcap or 0.0, "float32")
        values = "value_cache" if "value_cache" in self.caches else "key_cache"
        logits = []
        for block, offset in places:
            score = math.fsum(
                a * b for a, b in zip(query, self.read("key_cache", block, offset, kv), strict=True)
            )
            logits.append(cap * math.tanh(score * (scale / cap)) if cap > 0 else score * scale)
        sink = [float(self.inputs["head_sink"][head])] if "head_sink" in self.inputs else []
        if not logits + sink:
            return [0.0] * size, -math.inf
        top = max(logits + sink)
        total = math.fsum(math.exp(x - top) for x in logits + sink)
        rows = [self.read(values, block, offset, kv) for block, offset in places]
        weights = [math.exp(x - top) / total for x in logits]
        output = [math.fsum(w * row[c] for w, row in zip(weights, rows, strict=True)) for c in range(size)]
        return output, top + math.log(total)

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        query, key, value = self.projections()
        bounds, past = (self.inputs[n].tolist() for n in ("cumulative_sequence_length", "past_seqlens"))
        owners = [(b, past[b] + i) for b in range(len(past)) for i in range(bounds[b + 1] - bounds[b])]
        prepare: list[Callable[[Vector, int, str], Vector]] = []
        if "q_norm_weight" in self.inputs:
            prepare.append(lambda head, _, side: self.norm(head, f"{side}_norm_weight"))
        if self.node.do_rotary == 1:
            prepare.append(lambda head, position, _: self.rotate(head, position))
        for step in prepare:
            for side, heads in (("q", query), ("k", key)):
                for token, (_, position) in enumerate(owners):
                    heads[token] = [step(head, position, side) for head in heads[token]]
        for token, (sequence, position) in enumerate(owners):
            slot = self.slot(token, sequence, position)
            if slot >= 0:
                self.write("key_cache", slot, key[token])
                if value is not None:
                    self.write("value_cache", slot, value[token])
        results = [
            [
                self.attend(head, h, self.places(b, position, past[b] + bounds[b + 1] - bounds[b]))
                for h, head in enumerate(query[token])
            ]
            for token, (b, position) in enumerate(owners)
        ]
        output = np.array([[x for row, _ in heads for x in row] for heads in results])
        return output.reshape(self.tokens, -1), np.array([[lse for _, lse in heads] for heads in results])


def draw(seed: int) -> tuple[Case, str, str]:
    """Any combination of the operator's options, with odd slots, holes and scales now and then."""
    rng = random.Random(seed)
    latent = rng.random() < 0.5
    dtype = rng.choice(["float16", "bfloat16", "float32"])
    stored = rng.choice([dtype, "int8", "float8e4m3fn", "int8" if latent else "uint8"])
    size, kv_heads = rng.choice([16, 32, 48]), 1 if latent else rng.choice([1, 2, 3])
    options: dict[str, object] = {"softcap": rng.choice([0.0, 0.0, 0.5, 30.0])}
    options["local_window_size"] = rng.choice([-1, -1, 0, 1, 2, 17, 1000])
    options["is_causal"] = rng.choice([1, 1, 0, 2])
    if rng.random() < 0.7:
        rotary = rng.choice([width for width in (16, 32, 48) if width <= size])
        options["rotary_dim"] = rotary
        options["rotary_offset"] = rng.choice([at for at in (0, 8, 32) if at + rotary <= size])
        options["rotary_interleaved"] = rng.choice([0, 1])
    if latent:
        options["v_head_size"] = rng.choice([0, 1, size - 1])
    else:
        options |= {name: rng.random() < 0.4 for name in ("packed", "sink", "norm")}
    sequences = rng.randint(1, 3)
    case = make_case(
        new=[rng.choice([1, 2, 5]), *rng.choices([0, 1, 4], k=sequences - 1)],
        past=rng.choices([0, 1, 15, 16, 31, 40, 130], k=sequences),
        num_heads=kv_heads * rng.choice([1, 2, 4]),
        kv_num_heads=kv_heads,
        head_size=size,
        layout="LATENT" if latent else "SEPARATE",
        dtype=dtype,
        cache_dtype=stored,
        per_channel=rng.random() < 0.5,
        # ONNX Runtime's kernel for a prefill over small blocks has no sink.
        block_size=256 if options.get("sink") else rng.choice([16, 32]),
        seed=seed,
        **options,  # type: ignore[arg-type]
    )
    inputs = case.inputs
    blocks, block_size = inputs["key_cache"].shape[:2]
    if rng.random() < 0.3:
        slots = rng.sample(range(-3, blocks * block_size + 3), len(inputs["query"]))
        inputs["slot_mapping"] = np.array(slots, np.int32)
    if rng.random() < 0.3:
        inputs["block_table"].flat[rng.randrange(inputs["block_table"].size)] = rng.choice([-1, -5, blocks])
    if "k_scale" in inputs and rng.random() < 0.2:
        inputs["k_scale"].flat[0] = rng.choice([0.0, -0.02])
    return case, dtype, stored


@pytest.mark.parametrize("rounding", ["ort", "exact"])
@pytest.mark.parametrize("seed", range(60))
def test_the_oracle_is_the_operator_written_out(seed: int, rounding: str) -> None:
    case, dtype, stored = draw(seed)
    outputs = paged_attention(case.attributes, case.fresh(), rounding=rounding, extensions=case.extensions)
    scalar = Scalar(case, case.fresh(), dtype, stored, rounding == "exact")
    expected, lse = scalar.run()
    assert outputs.key_cache.tobytes() == scalar.caches["key_cache"].tobytes()
    if outputs.value_cache is not None:
        assert outputs.value_cache.tobytes() == scalar.caches["value_cache"].tobytes()
    np.testing.assert_allclose(outputs.lse, lse, rtol=1e-12 if rounding == "exact" else 1e-6, atol=1e-6)
    digits, lowest, _ = FORMATS[dtype]
    unit = np.exp2(np.maximum(np.frexp(expected)[1] - 1, lowest) + 1.0 - digits)
    assert (np.abs(outputs.output.astype(np.float64) - expected) <= 0.51 * unit + 1e-13).all()
