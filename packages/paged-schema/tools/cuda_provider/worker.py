"""The child process: run each node that arrives in the real CUDA provider over the fake runtime."""

import os
import pickle
import struct
import sys

import numpy as np
import onnxruntime  # type: ignore[import-not-found, unused-ignore]

POOL = np.zeros(1 << 26, np.uint8)


def run(model, inputs, outputs):  # type: ignore[no-untyped-def]  # noqa: D103
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CUDAExecutionProvider"])
    except Exception as error:
        return "session", str(error)
    assert "CUDAExecutionProvider" in session.get_providers(), "the provider did not load"
    binding, kept, at = session.io_binding(), [], 1 << 20
    addresses = {}
    for name, (element, shape, values) in inputs.items():
        if values is None:
            address, at = POOL.ctypes.data + at, at + (1 << 16)
        else:
            kept.append(np.array(values, np.int32))
            address = kept[-1].ctypes.data
        addresses[name] = (element, list(shape), address)
        binding.bind_input(name, "cpu" if name == "attention_metadata" else "cuda", 0, *addresses[name])
    for name, source in outputs.items():
        binding.bind_output(name, "cuda", 0, *(addresses[source] if source else ()))
    try:
        session.run_with_iobinding(binding)
    except Exception as error:
        return "run", str(error)
    return "ok", ""


def main() -> None:
    """Serve until standard input ends; what ORT prints goes to standard error."""
    onnxruntime.set_default_logger_severity(4)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while head := sys.stdin.buffer.read(4):
        request = pickle.loads(sys.stdin.buffer.read(struct.unpack("<I", head)[0]))
        answer = pickle.dumps(run(*request))
        answers.write(struct.pack("<I", len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    main()
