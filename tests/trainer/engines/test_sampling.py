"""Random draws of tokens from logits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from starpod.trainer.engines.sampling import Uniforms, draw

LOGITS = torch.tensor([[0.0, 2.0, -torch.inf, 1.0]])


def test_tokens_come_as_often_as_they_are_likely() -> None:
    count = 4000
    tokens, logprobs = draw(LOGITS.expand(count, -1), [1.0] * count, [1.0] * count, [i / count for i in range(count)])
    shares = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(shares, LOGITS[0].softmax(-1), atol=1e-3, rtol=0)
    assert torch.equal(logprobs, LOGITS[0].log_softmax(-1)[tokens])


@given(
    arrays.arrays(np.float32, (3, 7), elements=st.floats(-50, 50, width=32)),
    st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=3, max_size=3),
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=3, max_size=3),
    st.lists(st.sampled_from([0.1, 0.5, 0.9, 1.0]), min_size=3, max_size=3),
)
def test_a_row_depends_on_itself_alone(
    logits: np.ndarray, uniforms: list[float], temperatures: list[float], top_ps: list[float]
) -> None:
    rows = torch.from_numpy(logits)
    tokens, logprobs = draw(rows, temperatures, top_ps, uniforms)
    for row in range(3):
        alone = draw(rows[row, None], [temperatures[row]], [top_ps[row]], [uniforms[row]])
        assert (alone[0][0], alone[1][0]) == (tokens[row], logprobs[row])


def test_a_nucleus_is_the_smallest_likely_set_and_probabilities_are_within_it() -> None:
    logits = torch.tensor([[0.05, 0.3, 0.15, 0.5]]).log().expand(100, -1)
    tokens, logprobs = draw(logits, [1.0] * 100, [0.7] * 100, [i / 100 for i in range(100)])
    assert sorted(set(tokens.tolist())) == [1, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.0, 0.3, 0.0, 0.5])[tokens] / 0.8)
    assert draw(logits[:1], [1.0], [1e-6], [0.99])[0].tolist() == [3]


def test_temperature_zero_is_greedy_and_certain() -> None:
    assert [value.tolist() for value in draw(LOGITS, [0.0], [1.0], [0.0])] == [[1], [0.0]]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_distribution(uniform: float) -> None:
    token, logprob = draw(torch.tensor([[-torch.inf, 0.0, -torch.inf]]), [1.0], [1.0], [uniform])
    assert token.tolist() == [1]
    assert logprob.tolist() == [0.0]


def test_weights_that_diverged_are_an_error() -> None:
    with pytest.raises(FloatingPointError, match="diverged"):
        draw(torch.tensor([[0.0, torch.nan]]), [1.0], [1.0], [0.5])


def test_random_numbers_are_the_streams_own() -> None:
    first, again, other = Uniforms(5), Uniforms(5), Uniforms(6)
    late = again[100]
    numbers = [first[index] for index in range(101)]
    assert numbers[100] == late
    assert numbers[:5] == [again[index] for index in range(5)]
    assert numbers != [other[index] for index in range(101)]
    assert all(0 <= number < 1 for number in numbers)
    assert 0.4 < sum(numbers) / len(numbers) < 0.6
    assert isinstance(Uniforms(2**127 + 3)[0], float)
