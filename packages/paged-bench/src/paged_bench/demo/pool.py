"""How many pages a run gets.

By default a pool for many prompts holds less than they want together, so that a run shows admission
waiting and pages used again; a pool for few prompts holds them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from paged_kv import PageGeometry

from paged_bench.demo.requests import Request
from paged_bench.errors import PromptError

_MANY = 8
_SHARE = 0.7


def pages_for(request: Request, block_size: int) -> int:
    """Pages that hold the whole of a request."""
    return -(-request.cache_tokens // block_size)


def pool_geometry(
    requests: Sequence[Request], block_size: int, pages: int | None, context: int
) -> PageGeometry:
    """The pool of a run; one more page, never handed out, is the null page.

    Args:
        requests: All requests of the run.
        block_size: Tokens of a page.
        pages: Pages to use, or None for the default.
        context: The model's longest sequence, in tokens.

    Raises:
        PromptError: A request that is longer than the model's context, or than the pool can ever hold.
    """
    for request in requests:
        if len(request.prompt_ids) + request.max_new > context:
            raise PromptError(
                _name(request), f"wants {_want(request)}, the model's context is {context}", _ADVICE
            )
    needs = [pages_for(request, block_size) for request in requests]
    usable = _default_pages(needs) if pages is None else pages
    for request, need in zip(requests, needs, strict=True):
        if need > usable:
            raise PromptError(
                _name(request),
                f"wants {_want(request)}, that is {need} pages of {block_size}, and the pool has {usable}",
                f"{_ADVICE}, or give --pages {need}",
            )
    return PageGeometry(usable + 1, block_size)


def _default_pages(needs: Sequence[int]) -> int:
    if len(needs) < _MANY:
        return sum(needs)
    return max(max(needs), int(sum(needs) * _SHARE))


_ADVICE = "shorten the prompt or lower --max-new"


def _name(request: Request) -> str:
    return f"prompt {request.index + 1}"


def _want(request: Request) -> str:
    return f"{len(request.prompt_ids)} + {request.max_new} tokens"
