"""How far two results are apart: the same numbers, some distance, or not comparable; never a false "the same"."""

import math

import pytest
import torch

from labkit.graphs import difference

ONES = torch.ones(3)
NAN = torch.tensor([1.0, math.nan])


@pytest.mark.parametrize("one, other, apart", [
    (ONES, ONES.clone(), 0.0), (ONES, ONES + 0.5, 0.5), (NAN, NAN.clone(), 0.0), (NAN, torch.ones(2), math.inf),
    (ONES / 0, ONES / 0, 0.0), (ONES / 0, ONES, math.inf), (ONES, ONES[:1], math.inf), (ONES, ONES.double(), math.inf),
    (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), 4.0), (torch.zeros(0), torch.zeros(0), 0.0),
    ((ONES, [ONES, 7]), (ONES, [ONES * 3, 7]), 2.0), ((ONES,), (ONES, ONES), math.inf), (7, 8, None), (ONES, None, math.inf),
    (torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), 0.0), (torch.tensor([2**53 + 1]), torch.tensor([2**53 + 1]), 0.0),
    (torch.tensor([True]), torch.tensor([False]), 1.0)])
def test_the_largest_difference_is_told(one, other, apart):
    assert difference(one, other) == apart == difference(other, one)
