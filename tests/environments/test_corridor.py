"""The corridor in which estimators are compared: each room is right or wrong by itself."""

from benchmarks.training.corridor import Corridor, DarkCorridor
from starpod.env_server.episodes.live_episode import LiveEpisode, Want
from tests.environments import episodes


def walk(actions: list[str], seed: int = 3) -> list[tuple[float, dict[str, bool], bytes]]:
    """Reward, criteria and the next state's key of each turn."""
    episode: LiveEpisode = episodes.start(Corridor, seed=seed)
    played = []
    for action in actions:
        transition = episode.turn([action], Want(state_key=True))
        assert transition.details is not None
        played.append((transition.reward, dict(transition.details.criteria or {}), transition.observation.state_key))
    return played


def test_every_room_pays_its_share_and_what_was_done_changes_no_later_state() -> None:
    one, other = walk(["Down"] * 4), walk(["Left"] * 4)
    assert [key for _, _, key in one] == [key for _, _, key in other]
    assert [reward for reward, _, _ in one] != [reward for reward, _, _ in other]
    for played in (one, other):
        for room, (reward, criteria, _) in enumerate(played, 1):
            assert list(criteria) == [f"room {passed}" for passed in range(1, room + 1)]
            assert reward == criteria[f"room {room}"] / 4


def test_the_expert_succeeds() -> None:
    episode: LiveEpisode = episodes.start(Corridor, seed=5)
    while not episode.end_reason:
        last = episode.turn([episode.environment.expert_action()], Want())
    assert last.success


def test_a_locked_corridor_ends_at_the_first_wrong_action_and_pays_at_the_end_alone() -> None:
    episode: LiveEpisode = episodes.start(Corridor, seed=5, locked=True)
    for room in range(1, 5):
        last = episode.turn([episode.environment.expert_action()], Want())
        assert (last.reward, bool(last.success), episode.environment.score()) == (room == 4, room == 4, room / 4)
    episode = episodes.start(Corridor, seed=5, locked=True)
    wrong = next(each for each in ("Left", "Right") if each != episode.environment.expert_action())
    last = episode.turn([wrong], Want())
    assert (last.reward, last.terminated, last.success, episode.environment.score()) == (0.0, True, False, 0.0)


def test_a_dark_room_shows_its_sign_for_one_turn_after_a_look() -> None:
    episode: LiveEpisode = episodes.start(DarkCorridor, seed=5, rooms=2)
    dark, signs = episode.environment, list(episode.environment.signs)
    seen = [dark.render()]
    for _ in range(4):
        last = episode.turn([dark.expert_action()], Want())
        seen.append(dark.render())
    assert seen == ["1 dark", f"1 {signs[0]}", "2 dark", f"2 {signs[1]}", "The end."]
    assert last.success
