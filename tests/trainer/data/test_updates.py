"""Records of updates: they equal what the loss used, recording changes nothing, and files can be read back."""

from pathlib import Path

import numpy as np
import pytest
import torch

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.data.updates import (
    ABOVE,
    BELOW,
    TRAINED,
    Verdict,
    read_tokens,
    read_verdicts,
    token_records,
    update_file,
    write_update,
)
from tests.trainer.tiny_learner import VERSION, group_of, learner_of, make_trainer, scored_table


@pytest.mark.parametrize("budget", [8192, 12])
def test_the_record_is_what_the_loss_saw(budget: int) -> None:
    of = make_trainer(AlgorithmConfig(preset="starpo-grpo", loss={"clip_low": 0.02, "clip_high": 0.01}), budget=budget)
    episodes = [episode for number in range(3) for episode in group_of(of.policy, number, (1.0, 0.0)).episodes]
    batch, table = scored_table(of, episodes)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in of.policy.parameters():
            parameter += 0.1 * parameter * torch.randn(parameter.shape, generator=generator)
    for _ in range(2):  # the last pass counts
        metrics, _ = of.accumulate(batch, table, range(len(batch)))
    told = dict(enumerate(tokens for _, tokens in token_records(table)))
    marks = np.concatenate([each.marks for each in told.values()])
    ratios = np.concatenate([each.ratios for each in told.values()])
    assert len(marks) == int(batch.mask_BT.sum()) and (marks & TRAINED).all()
    assert 0 < np.mean((marks & BELOW) > 0) == pytest.approx(metrics["policy/clip_fraction_low"])
    assert 0 < np.mean((marks & ABOVE) > 0) == pytest.approx(metrics["policy/clip_fraction_high"])
    assert ratios.max() == pytest.approx(metrics["policy/ratio_max"], rel=1e-3)
    for row, tokens in told.items():
        assert table.advantages is not None
        expected = table.advantages.advantages_BT[row, : batch.row_tokens[row]].numpy()
        assert tokens.advantages == pytest.approx(expected, rel=1e-3)


def test_truncated_replies_are_marked_as_left_out() -> None:
    of = make_trainer(AlgorithmConfig(preset="starpo-grpo", mask_truncated=True))
    group = group_of(of.policy, 0, (1.0, 0.0))
    group.episodes[1].turns[0].finish = "length"
    learner = learner_of(of)
    learner.learn([group], version=VERSION)
    assert learner.table is not None
    whole, cut = (tokens for _, tokens in token_records(learner.table))
    first = len(group.episodes[1].turns[0].reply)
    assert (whole.marks & TRAINED).all()
    assert not (cut.marks[:first] & TRAINED).any() and (cut.marks[first:] & TRAINED).all()


def test_a_file_comes_back_as_it_was_and_a_damaged_one_as_nothing(tmp_path: Path) -> None:
    of = make_trainer(AlgorithmConfig(preset="starpo-grpo"))
    learner, groups = learner_of(of), [group_of(of.policy, number, (1.0, 0.0)) for number in (4, 9)]
    learner.learn(groups, version=VERSION)
    assert learner.table is not None
    records = list(token_records(learner.table))
    path = update_file(tmp_path / "train-000007.jsonl.gz")
    assert path.name == "train-000007.update.gz"
    verdicts = {4: Verdict(True, "its score is the first"), 5: Verdict(False, "all alike")}
    write_update(path, verdicts, records)
    assert read_verdicts(path) == verdicts
    for episode, expected in records:
        found = read_tokens(path, episode.group, episode.member)
        assert found is not None and len(found.marks) == episode.sampled_tokens
        for name in ("advantages", "ratios", "marks"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert read_tokens(path, 5, 0) is None  # was not trained on
    path.write_bytes(path.read_bytes()[:60])
    assert read_verdicts(path) == {} and read_tokens(path, 4, 0) is None
    assert read_verdicts(tmp_path / "none") == {}
