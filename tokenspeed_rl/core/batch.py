"""What one step computes, as decided by the scheduler: plain Python, no tensor."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenspeed_rl.core.request import Request


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + count) of a request's tokens, to be prefilled."""

    request: Request
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether a token can be drawn after this chunk."""
        return self.start + self.count == len(self.request.tokens)


@dataclass(slots=True)
class StepPlan:
    """One step: rows that decode one token each, then chunks of prompts.

    `forks` maps requests to the one whose last chunk completes their prompt too: they draw from the same
    logits. `copies` (source, destination) duplicate that prompt's unfinished page for each of them, after the
    forward.
    """

    decodes: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    forks: dict[Request, Request] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def sharers(self, chunk: Chunk) -> Iterator[Request]:
        """Whose prompt this chunk completes: its request, and the forks of that."""
        yield chunk.request
        yield from (fork for fork, leader in self.forks.items() if leader is chunk.request)

    @property
    def readers(self) -> Iterator[Request]:
        """Requests whose prompt this step completes, and that read it."""
        for chunk in self.chunks:
            if chunk.completes:
                yield from (request for request in self.sharers(chunk) if request.wants.reading)

    @property
    def spans(self) -> list[Chunk]:
        """Every token of the step in order: decodes as chunks of one, then the chunks."""
        return [*(Chunk(request, request.computed, 1) for request in self.decodes), *self.chunks]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.count for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks
