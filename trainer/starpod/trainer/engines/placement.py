"""Placement of requests on servers that hold the same weights, by cached prefix and by load."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Server = TypeVar("Server")

LARGEST_SHARE = 1.25
"""A server only gets another request if its number of requests in flight is at most this multiple of the mean."""
BLOCK = 16
"""Number of tokens of a cached block. vLLM finds prefixes by whole blocks."""
MOST_BLOCKS = 2**16
"""Number of blocks that are remembered for each server: a million tokens, about the size of a GPU's cache."""


class Placement(Generic[Server]):
    """Sends each request to the server that has the longest prefix of its prompt in the cache.

    Members of a group share their first prompt, and each turn of an episode begins with the previous one, so their
    requests go to the same server. If that server has too large a share of the requests in flight, the request goes to
    the next best one, which then caches the prefix as well. Servers that have the same prefix are chosen by load.

    Attributes:
        servers: The servers in use.

    Args:
        first: Index of the server that is chosen first if all are alike. Clients that share the servers pass different
            ones.
    """

    def __init__(self, servers: Sequence[Server], *, first: int = 0) -> None:
        self.servers = list(servers[first % len(servers) :]) + list(servers[: first % len(servers)])
        self._loads = [0] * len(self.servers)
        self._cached = [OrderedDict[int, None]() for _ in self.servers]

    @contextlib.contextmanager
    def place(self, prompt: Sequence[int], salt: str) -> Iterator[Server]:
        """Yield the server for a request, which counts as in flight inside the context.

        salt: prompts with another salt share no cache.
        """
        index = self._choose(_blocks(prompt, salt))
        server = self.servers[index]
        self.remember(server, prompt, salt)
        self._loads[index] += 1
        try:
            yield server
        finally:
            if server in self.servers:
                self._loads[self.servers.index(server)] -= 1

    def remember(self, server: Server, tokens: Sequence[int], salt: str) -> None:
        """Note that the server has these tokens in its cache. A dropped server is ignored."""
        if server not in self.servers:
            return
        cached_blocks = self._cached[self.servers.index(server)]
        for block in _blocks(tokens, salt):
            cached_blocks[block] = None
            cached_blocks.move_to_end(block)
        while len(cached_blocks) > MOST_BLOCKS:
            cached_blocks.popitem(last=False)

    def _choose(self, blocks: Sequence[int]) -> int:
        max_load = LARGEST_SHARE * sum(self._loads) / len(self._loads)

        def worth(index: int) -> tuple[int, int]:
            count = next((place for place, block in enumerate(blocks) if block not in self._cached[index]), len(blocks))
            return count, -self._loads[index]

        return max((index for index, load in enumerate(self._loads) if load <= max_load), key=worth)

    def drop(self, server: Server) -> None:
        """Use a server no more. It must not be the last one."""
        index = self.servers.index(server)
        for items in (self.servers, self._loads, self._cached):
            del items[index]


def _blocks(prompt: Sequence[int], salt: str) -> list[int]:
    """Return a hash of each prefix of whole blocks."""
    prefix, hashes = hash(salt), []
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        prefix = hash((prefix, *prompt[end - BLOCK : end]))
        hashes.append(prefix)
    return hashes
