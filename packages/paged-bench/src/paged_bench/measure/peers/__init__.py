"""Other implementations of the same attention, each in a module of its own, none of them a dependency."""

from __future__ import annotations

from collections.abc import Sequence

from paged_bench.errors import OptionError
from paged_bench.measure.peers.base import Peer, PeerCalls, Unsuitable, is_installed, module, version_of
from paged_bench.measure.peers.flashinfer import FlashInfer
from paged_bench.measure.peers.flashmla import FlashMla
from paged_bench.measure.peers.flex import FlexAttention
from paged_bench.measure.peers.onnxruntime import OnnxRuntime
from paged_bench.measure.peers.sdpa import TorchSdpa
from paged_bench.measure.peers.vllm_triton import VllmTriton


def all_peers() -> tuple[Peer, ...]:
    """Return one of each."""
    return (
        FlashMla(),
        FlashInfer("fa3"),
        FlashInfer("fa2"),
        VllmTriton(),
        TorchSdpa(),
        FlexAttention(),
        OnnxRuntime(),
    )


def chosen_peers(words: str, peers: Sequence[Peer] | None = None) -> tuple[Peer, ...]:
    """Return the peers that `--peers` names.

    Args:
        words: `none`, `auto` for all that are installed, or names divided by commas.
        peers: What there is to choose from.

    Raises:
        OptionError: A name is not known, or what it names is not installed.
    """
    known = {peer.name: peer for peer in (all_peers() if peers is None else peers)}
    if words == "none":
        return ()
    if words == "auto":
        return tuple(peer for peer in known.values() if is_installed(peer))
    found = []
    for name in dict.fromkeys(word.strip() for word in words.split(",")):
        if name not in known:
            raise OptionError("--peers", f"there is no peer {name!r}", f"known are {', '.join(known)}")
        if not is_installed(known[name]):
            needed = ", ".join(known[name].modules)
            raise OptionError(
                "--peers", f"{name} needs {needed}, not all installed", "install it or leave it out"
            )
        found.append(known[name])
    return tuple(found)


def preload(peers: Sequence[Peer]) -> None:
    """Import torch, where a peer needs it, before anything of CUDA is loaded.

    Imported after NVRTC was loaded, torch 2.11 with CUDA 13.0 failed to register its own operators.
    """
    if any("torch" in peer.modules for peer in peers):
        module("torch")


__all__ = [
    "Peer",
    "PeerCalls",
    "Unsuitable",
    "all_peers",
    "chosen_peers",
    "is_installed",
    "preload",
    "version_of",
]
