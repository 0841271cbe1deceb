"""What pages call the implementations that records know by short names."""

PEER_NAMES = {
    "flashmla": "FlashMLA",
    "fa3-vllm": "FA3 (vLLM)",
    "flashinfer-fa3": "FlashInfer fa3",
    "flashinfer-fa2": "FlashInfer fa2",
    "vllm-triton": "Triton (vLLM)",
    "bmm": "torch bmm",
    "sdpa": "torch SDPA",
    "flex": "flex_attention",
    "ort": "ONNX Runtime",
}


def peer_name(short: str) -> str:
    """Return the name that pages print; an unknown one stays.

    Example:
        >>> peer_name("sdpa"), peer_name("another")
        ('torch SDPA', 'another')
    """
    return PEER_NAMES.get(short, short)
