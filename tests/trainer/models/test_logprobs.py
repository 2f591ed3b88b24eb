"""Log-probabilities by slices of the vocabulary or of the rows against those of all logits at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from starpod.trainer.models.logprobs import LinearHead, token_logprobs

ROWS, WIDTH, VOCABULARY = 11, 8, 103


def scored(
    head: nn.Linear, hidden: Tensor, tokens: Tensor, *, sliced: bool, at_once: int, dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """Log-probabilities and entropies, then the gradients of hidden states and weights."""
    head.zero_grad()
    hidden = hidden.clone().requires_grad_()
    linear = LinearHead(head.weight, head.bias, dtype) if sliced else None
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        logprobs, entropy = token_logprobs(
            head, hidden, tokens, linear=linear, logits_at_once=at_once, vocabulary=VOCABULARY, **options
        )
    draws = torch.Generator().manual_seed(5)
    total = torch.randn(ROWS, generator=draws) @ logprobs
    if entropy is not None:
        total = total + torch.randn(ROWS, generator=draws) @ entropy
    total.backward()  # type: ignore[no-untyped-call]
    gradients = [hidden.grad, *(parameter.grad for parameter in head.parameters())]
    assert all(each is not None for each in gradients)
    return [logprobs, *([] if entropy is None else [entropy]), *gradients]  # type: ignore[list-item]


@pytest.fixture
def inputs() -> tuple[Callable[[bool], nn.Linear], Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    # Logits up to about 60 in size, so that a sum of exponentials without its maximum would overflow or vanish.
    hidden = 8 * torch.randn(ROWS, WIDTH, generator=draws)
    tokens = torch.randint(0, VOCABULARY, (ROWS,), generator=draws)
    tokens[:2] = torch.tensor([0, VOCABULARY - 1])

    def head(bias: bool) -> nn.Linear:
        torch.manual_seed(1)
        return nn.utils.skip_init(nn.Linear, WIDTH, VOCABULARY, bias=bias).apply(
            lambda layer: [nn.init.normal_(parameter) for parameter in layer.parameters()]
        )

    return head, hidden, tokens


@pytest.mark.parametrize("sliced", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(
    ("at_once", "temperature", "bias"), [(ROWS * 40, 1.0, False), (ROWS * 7, 0.7, True), (1, 2, True)]
)
def test_parts_give_the_same_as_all_logits_at_once(
    inputs: tuple[Callable[[bool], nn.Linear], Tensor, Tensor],
    sliced: bool,
    entropy: bool,
    at_once: int,
    temperature: float,
    bias: bool,
) -> None:
    make, hidden, tokens = inputs
    options: dict[str, Any] = {"dtype": torch.float32, "temperature": temperature, "entropy": entropy}
    whole = scored(make(bias), hidden, tokens, sliced=False, at_once=2**25, **options)
    for part, expected in zip(
        scored(make(bias), hidden, tokens, sliced=sliced, at_once=at_once, **options), whole, strict=True
    ):
        torch.testing.assert_close(part, expected, atol=2e-5, rtol=1e-4)


def test_products_of_slices_are_rounded_as_those_of_the_layer(
    inputs: tuple[Callable[[bool], nn.Linear], Tensor, Tensor],
) -> None:
    make, hidden, tokens = inputs
    options: dict[str, Any] = {"dtype": torch.bfloat16, "temperature": 1.0, "entropy": True}
    whole = scored(make(False), hidden, tokens, sliced=False, at_once=2**25, **options)
    parts = scored(make(False), hidden, tokens, sliced=True, at_once=ROWS * 40, **options)
    assert [each.dtype for each in parts] == [torch.float32] * 4
    for part, expected in zip(parts[:2], whole[:2], strict=True):
        torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)
    for part, expected in zip(parts[2:], whole[2:], strict=True):
        torch.testing.assert_close(part, expected, atol=0.05, rtol=0.02)


class Sizes(TorchDispatchMode):
    """The number of entries of the largest result of any operation."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.largest = max(self.largest, result.numel())
        return result


def test_slices_hold_a_part_of_the_logits_and_give_frozen_weights_no_gradient(
    inputs: tuple[Callable[[bool], nn.Linear], Tensor, Tensor],
) -> None:
    make, hidden, tokens = inputs
    head = make(False).requires_grad_(False)
    # The weight has fewer entries than the logits of 11 rows, and more than those of 2, but only counts if rounded.
    for rows, dtype, largest in ((ROWS, torch.float32, ROWS * 20), (2, torch.bfloat16, 27 * WIDTH)):
        states = hidden[:rows].clone().requires_grad_()
        options: dict[str, Any] = {"linear": LinearHead(head.weight, None, dtype), "vocabulary": VOCABULARY}
        with Sizes() as sizes:
            logprobs, _ = token_logprobs(
                head, states, tokens[:rows], temperature=1.0, entropy=True, logits_at_once=ROWS * 20, **options
            )
            logprobs.sum().backward()  # type: ignore[no-untyped-call]
        assert states.grad is not None and head.weight.grad is None
        assert sizes.largest == largest
