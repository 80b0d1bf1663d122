"""The order in which gradients are added, without any other process."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lineartime.base.errors import UsageError
from lineartime.base.ranks import Ranks
from lineartime.model.language_model import empty_model
from lineartime.training.ordered import VECTOR, cut_for_ranks, own_rows, require_fitting, tree_sum
from lineartime.training.shard import shard_model
from tiny_models import CONFIGS


def terms(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(5, generator=generator) * 10.0**i, torch.randn(2, 3, generator=generator)]
            for i in torch.randint(-3, 4, (n,), generator=generator).tolist()]


def by_levels(values):
    """The complete binary tree over a list of numbers, a level at a time."""
    while len(values) > 1:
        values = [sum(values[i + 1 : i + 2], values[i]) for i in range(0, len(values), 2)]
    return values[0]


@pytest.mark.parametrize("n", range(1, 18))
def test_the_sum_is_the_complete_binary_tree(n):
    """Also if ranks have first added blocks of 2^k terms, which are its subtrees."""
    expected = [by_levels([term[i] for term in terms(n)]) for i in range(2)]
    assert all(map(torch.equal, tree_sum(iter(terms(n))), expected))
    for size in (1, 2, 4, 8):
        blocks = [tree_sum(iter(terms(n)[first : first + size])) for first in range(0, n, size)]
        assert all(map(torch.equal, tree_sum(iter(blocks)), expected))


@pytest.mark.parametrize(("shard", "fitting"), [(False, [1, 3, 6, 12]), (True, [1, 2, 4, 12])])
def test_a_number_of_ranks_that_does_not_fit_is_refused_with_those_that_do(shard, fitting):
    for n_ranks in range(1, 25):
        if n_ranks in fitting:
            require_fitting(12, shard, Ranks(0, n_ranks))
        else:
            with pytest.raises(UsageError, match=f"12 micro-batches in a step; run {', '.join(map(str, fitting))}, or"):
                require_fitting(12, shard, Ranks(0, n_ranks))


def test_each_layer_of_a_sharded_model_has_initial_values_of_its_own():
    shard_model(model := empty_model(CONFIGS["flash"]), 0, Ranks(), torch.device("cpu"))
    first, second = (layer.in_proj.weight for layer in model.layers)
    assert (first != second).all()


@pytest.mark.parametrize("shard", [False, True])
def test_the_rows_of_a_step_are_shared_out(shard):
    rows = [own_rows(16, 2, shard, Ranks(rank, 4)) for rank in range(4)]
    assert rows[1] == ([2, 3, 10, 11] if shard else [4, 5, 6, 7])
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(16))


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 40)), min_size=1, max_size=8), st.integers(1, 9))
def test_every_element_has_one_rank(shapes, n_ranks):
    shares = cut_for_ranks(tuple(shapes), n_ranks)
    n_elements = [sum(stop - start for start, stop in share) for share in shares]
    assert max(n_elements) - min(n_elements) <= 2 * VECTOR * max(row for _, row in shapes)
    for i, (n_rows, row) in enumerate(shapes):
        cuts = [share[i] for share in shares if share[i][0] < share[i][1]]
        assert cuts[0][0] == 0 and cuts[-1][1] == n_rows * row
        assert all(a[1] == b[0] and a[1] % row == a[1] % VECTOR == 0 for a, b in itertools.pairwise(cuts))
