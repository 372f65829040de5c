"""utils/data/permutation.py: every index once, as random as torch.randperm, always the same."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from utils.data import Permutation


def orders_of(length: int, count: int) -> torch.Tensor:
    return torch.stack([Permutation(length, length, epoch)(torch.arange(length)) for epoch in range(count)])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 31, 1000, 4096, 4097, 131072, 10**8, 10**10, 10**15, 2**60])
def test_no_index_comes_twice(length: int) -> None:
    """Of a huge order the test looks at 50,000 places."""
    step = max(1, length // 50_000) if length > 200_000 else 1
    order = Permutation(length, 1, 2)(torch.arange(0, length, step))
    assert 0 <= int(order.min()) and int(order.max()) < length
    assert len(order.unique()) == len(order)


def test_the_order_of_a_key_never_changes() -> None:
    """A run that resumes with a newer release needs the same order, or a higher ORDER_VERSION."""
    assert Permutation(10, 0, 0)(torch.arange(10)).tolist() == [0, 1, 3, 2, 7, 4, 6, 5, 9, 8]
    assert Permutation(1 << 20, 0, 0)(torch.arange(4)).tolist() == [726526, 270253, 342699, 564302]
    assert Permutation(10**10, 0, 1)(torch.arange(2)).tolist() == [9893941043, 1475216443]
    orders = [Permutation(1000, *key)(torch.arange(9)).tolist() for key in ((0, 1), (1, 0))]
    assert orders[0] != orders[1]


# For a random permutation each of these statistics has mean 0 and variance 1. The mean over K independent ones is
# normal: chance exceeds the bound of 4.5 standard deviations once in 150,000 times. The keys are fixed, so the
# result is, too. With fewer rounds than the network has, one of them exceeds the bound.

def ascents(orders: torch.Tensor) -> torch.Tensor:
    n = orders.shape[1]
    return ((orders[:, 1:] > orders[:, :-1]).sum(1) - (n - 1) / 2) / math.sqrt((n + 1) / 12)


def correlation_with_next_epoch(orders: torch.Tensor) -> torch.Tensor:
    n = orders.shape[1]
    middle = (n - 1) / 2
    products = (orders[::2].double() - middle) * (orders[1::2] - middle)
    return products.sum(1) / (n * (n * n - 1) / 12) * math.sqrt(n - 1)


def small_indices_in_the_first_half(orders: torch.Tensor) -> torch.Tensor:
    half = orders.shape[1] // 2
    found = (orders[:, :half] < half).sum(1).double()
    return (found - half / 2) / math.sqrt(half * 0.25 * half / (2 * half - 1))


def fixed_points(orders: torch.Tensor) -> torch.Tensor:
    return (orders == torch.arange(orders.shape[1])).sum(1).double() - 1


@pytest.mark.parametrize("length, count", [(100, 1000), (200_000, 20)])
def test_the_order_is_as_random_as_randperm(length: int, count: int) -> None:
    orders = orders_of(length, count)
    statistics: list[Callable[[torch.Tensor], torch.Tensor]] = [
        ascents, correlation_with_next_epoch, small_indices_in_the_first_half, fixed_points]
    for statistic in statistics:
        values = statistic(orders).double()
        assert abs(float(values.mean())) * math.sqrt(len(values)) < 4.5, statistic
        assert abs(float(values.var()) - 1) < 4.5 * math.sqrt(3 / len(values)), statistic


def is_odd(order: list[int]) -> bool:
    """Whether the permutation is a product of an odd number of transpositions."""
    cycles, seen = 0, set[int]()
    for first in order:
        cycles += first not in seen
        while first not in seen:
            seen.add(first)
            first = order[first]
    return (len(order) - cycles) % 2 == 1


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7, 9, 12, 17, 31, 40, 144])
def test_half_of_the_orders_are_odd_and_no_place_is_special(length: int) -> None:
    orders = orders_of(length, 400)
    assert abs(sum(map(is_odd, orders.tolist())) - 200) < 4.5 * 10

    places = (torch.arange(length).expand_as(orders), orders)
    times = torch.zeros(length, length).index_put_(places, torch.tensor(1.0), accumulate=True)
    chi_square = ((times - 400 / length) ** 2 / (400 / length)).sum()
    freedom = (length - 1) ** 2
    assert abs(chi_square - freedom) < 4.5 * math.sqrt(2 * freedom) + 4


def test_every_order_of_four_samples_occurs() -> None:
    assert len(orders_of(4, 400).unique(dim=0)) == 24
