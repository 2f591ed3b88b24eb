"""The choice of a server for a request: by load, and by the prefixes that servers have cached."""

import random
from collections import Counter
from contextlib import ExitStack

from starpod.trainer.engines.placement import BLOCK, LARGEST_SHARE, Placement


def tokens(*names: object, blocks: int = 2) -> list[int]:
    """A context: some blocks of tokens for each of its parts."""
    return [token for name in names for token in random.Random(str(name)).choices(range(1000), k=blocks * BLOCK)]


def test_shares_are_balanced_and_turns_stay_where_their_prefix_is_unless_that_server_has_too_much() -> None:
    """Groups of 8 episodes with one system prompt, of up to 6 turns, 64 requests in flight on 4 servers."""
    draws = random.Random(1)
    placement = Placement("abcd")
    waiting = [(group, member, 0) for group in range(40) for member in range(8)]
    flying: list[tuple[tuple[int, int, int], str, ExitStack]] = []
    loads, served, computed = Counter[str](), Counter[str](), 0
    at: dict[tuple[int, int], str] = {}
    seen: set[tuple[str, int]] = set()
    moved = stayed = 0
    while waiting or flying:
        if waiting and len(flying) < 64:
            group, member, turn = episode = waiting.pop(0)
            said = [f"{group} {member} {place}" for place in range(turn)]
            stack = ExitStack()
            server = stack.enter_context(placement.place(tokens("system", group, *said), "salt"))
            before = at.setdefault((group, member), server)
            bound = LARGEST_SHARE * loads.total() / 4
            assert loads[server] <= bound
            assert server == before or loads[before] > bound
            moved, stayed = moved + (server != before), stayed + (server == before)
            computed += (server, group) not in seen
            seen.add((server, group))
            at[group, member] = server
            loads[server] += 1
            served[server] += 1
            placement.remember(server, tokens("system", group, *said, f"{group} {member} {turn}"), "salt")
            flying.append((episode, server, stack))
        else:
            (group, member, turn), server, stack = flying.pop(draws.randrange(len(flying)))
            stack.close()
            loads[server] -= 1
            if turn < draws.randint(2, 6):
                waiting.insert(draws.randrange(min(len(waiting), 8) + 1), (group, member, turn + 1))
    assert max(served.values()) < LARGEST_SHARE * served.total() / 4
    assert moved < stayed / 4
    assert computed < 40 * 4 * 0.6, "a group's prompt is not computed by every server"


def test_prompts_of_older_weights_are_cached_nowhere_and_ties_begin_at_another_server_for_each_client() -> None:
    for first, server in enumerate("abc"):
        placement = Placement("abc", first=first)
        with placement.place(tokens("x"), "old") as chosen:
            assert chosen == server
        with placement.place(tokens("y"), "old") as busy, placement.place(tokens("x"), "new") as chosen:
            assert chosen != busy
        with placement.place(tokens("x"), "old") as chosen:
            assert chosen == server


def test_what_a_lost_server_had_is_served_by_the_others() -> None:
    placement = Placement("ab")
    with placement.place(tokens("x"), "") as lost:
        placement.drop(lost)
        with placement.place(tokens("x"), "") as other:
            assert [other] == placement.servers != [lost]
