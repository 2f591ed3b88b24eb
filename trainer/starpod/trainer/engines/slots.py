"""Which slot holds which conversation."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence


class Slots:
    """Slots are free, busy with a reply, or idle: kept for the next turn of a conversation until the slot is needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._idle: OrderedDict[str, int] = OrderedDict()  # conversation -> slot, the longest unused first
        self._tokens: list[Sequence[int]] = [()] * count  # what the cache holds of each idle slot

    def take(self, conversation: str, prompt: Sequence[int]) -> tuple[int, int] | None:
        """A slot for a reply to `prompt`, and how many of its first tokens are cached there; None while all are busy.

        The last token is never counted as cached: the model must read it to say what follows.
        """
        slot = self._idle.pop(conversation, None)
        if slot is not None:
            return slot, common_prefix(self._tokens[slot], prompt[:-1])
        if self._free:
            # The lowest, because attention runs over whole ranges.
            return heapq.heappop(self._free), 0
        if self._idle:
            return self._idle.popitem(last=False)[1], 0
        return None

    def give_back(self, slot: int, conversation: str, tokens: Sequence[int]) -> None:
        """The reply is over. tokens: what the cache holds. It is kept unless `conversation` is empty."""
        if not conversation:
            heapq.heappush(self._free, slot)
            return
        self.forget(conversation)
        self._tokens[slot] = tokens
        self._idle[conversation] = slot

    def forget(self, conversation: str) -> None:
        """Frees the slot that is kept for a conversation, if there is one."""
        slot = self._idle.pop(conversation, None)
        if slot is not None:
            heapq.heappush(self._free, slot)

    def forget_all(self) -> None:
        """Frees all slots that are not busy."""
        for conversation in list(self._idle):
            self.forget(conversation)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start."""
    shorter = min(len(first), len(second))
    if list(first[:shorter]) == list(second[:shorter]):
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])
