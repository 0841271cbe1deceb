"""What is to be decoded, and how far each sequence has come."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """One prompt, as it waits to be served.

    Attributes:
        index: Its place in the order of the prompts.
        text: The prompt.
        prompt_ids: Its token ids, at least one.
        max_new: Most tokens to generate, at least one.
        arrival: The step at which it arrives.
    """

    index: int
    text: str
    prompt_ids: tuple[int, ...]
    max_new: int
    arrival: int = 0

    @property
    def cache_tokens(self) -> int:
        """Tokens that its pages must hold; the last generated token is never fed back."""
        return len(self.prompt_ids) + self.max_new - 1


@dataclass
class Sequence:
    """A request on its way.

    Attributes:
        request: What was asked for.
        handle: The page authority's handle while it is admitted, else None.
        cached: Tokens whose keys and values are in pages.
        new_ids: Tokens generated so far.
        finished: Whether it has stopped.
    """

    request: Request
    handle: int | None = None
    cached: int = 0
    new_ids: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def pending(self) -> int:
        """Known tokens that have not been run yet."""
        return len(self.request.prompt_ids) + len(self.new_ids) - self.cached

    def next_tokens(self, count: int) -> list[int]:
        """The first `count` pending tokens."""
        known = (*self.request.prompt_ids, *self.new_ids)
        return list(known[self.cached : self.cached + count])

    @property
    def state(self) -> str:
        """`waiting`, `prefill`, `decode` or `done`."""
        if self.finished:
            return "done"
        if self.handle is None:
            return "waiting"
        return "decode" if self.new_ids else "prefill"
