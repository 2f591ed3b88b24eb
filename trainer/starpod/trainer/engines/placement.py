"""Placement of requests on servers that hold the same weights, by cached prefix and by load."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Server = TypeVar("Server")

LARGEST_SHARE = 1.25
"""A server only gets another request if its number of requests in flight is at most this multiple of the mean."""
BLOCK = 16
"""Number of tokens of a cached block. vLLM finds prefixes by whole blocks."""
MOST_BLOCKS = 2**16
"""Number of blocks that are remembered for each server: a million tokens, about the size of a GPU's cache."""


@dataclass(slots=True)
class _State:
    load: int = 0
    """Number of requests in flight."""
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Blocks that the server should have in its cache, the most recently used last."""

    def remember(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.cached[block] = None
            self.cached.move_to_end(block)
        while len(self.cached) > MOST_BLOCKS:
            self.cached.popitem(last=False)

    def count_cached(self, blocks: Sequence[int]) -> int:
        """Return the number of blocks before the first one that is not cached."""
        return next((index for index, block in enumerate(blocks) if block not in self.cached), len(blocks))


class Placement(Generic[Server]):
    """Sends each request to the server that has the longest prefix of its prompt in the cache.

    Members of a group share their first prompt, and each turn of an episode begins with the previous one, so their
    requests go to the same server. If that server has too large a share of the requests in flight, the request goes to
    the next best one, which then caches the prefix as well. Servers that have the same prefix are chosen by load.

    Args:
        first: Index of the server that is chosen first if all are alike. Clients that share the servers pass different
            ones.
    """

    def __init__(self, servers: Sequence[Server], *, first: int = 0) -> None:
        rotated = [*servers[first % len(servers) :], *servers[: first % len(servers)]]
        self._states = {server: _State() for server in rotated}

    @property
    def servers(self) -> list[Server]:
        """The servers in use."""
        return list(self._states)

    @contextlib.contextmanager
    def place(self, prompt: Sequence[int], salt: str) -> Iterator[Server]:
        """Yield the server for a request, which counts as in flight inside the context.

        salt: prompts with another salt share no cache.
        """
        blocks = _blocks(prompt, salt)
        server, state = self._choose(blocks)
        state.remember(blocks)
        state.load += 1
        try:
            yield server
        finally:
            state.load -= 1

    def load(self, server: Server) -> int:
        """Return the number of requests in flight on a server."""
        return self._states[server].load

    def remember(self, server: Server, tokens: Sequence[int], salt: str) -> None:
        """Note that the server has some tokens in its cache. A dropped server is ignored.

        Args:
            tokens: Token ids from the start of a context.
            salt: Salt of the request. Prompts with another salt share no cache.
        """
        if state := self._states.get(server):
            state.remember(_blocks(tokens, salt))

    def _choose(self, blocks: Sequence[int]) -> tuple[Server, _State]:
        max_load = LARGEST_SHARE * sum(state.load for state in self._states.values()) / len(self._states)
        candidates = (item for item in self._states.items() if item[1].load <= max_load)
        return max(candidates, key=lambda item: (item[1].count_cached(blocks), -item[1].load))

    def drop(self, server: Server) -> None:
        """Use a server no more. It must not be the last one."""
        del self._states[server]


def _blocks(prompt: Sequence[int], salt: str) -> list[int]:
    """Return a hash of each prefix of whole blocks."""
    prefix, hashes = hash(salt), []
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        prefix = hash((prefix, *prompt[end - BLOCK : end]))
        hashes.append(prefix)
    return hashes
