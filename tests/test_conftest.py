import pytest
import torch
from conftest import poisoned

MADE = ["torch.empty(3)", "torch.empty(3, requires_grad=True)", "torch.empty_like(torch.ones(3))",
        "torch.empty_strided((3, 2), (2, 1))", "torch.empty_permuted((3, 2), (1, 0))", "torch.ones(2).new_empty(3)",
        "torch.ones(2).new_empty_strided((3,), (1,))", "torch.empty(3, dtype=torch.bfloat16)"]


@pytest.mark.parametrize("expression", MADE)
def test_uninitialised_memory_of_the_package_is_nan(expression):
    assert eval(expression, {"__name__": "lineartime.layers", "torch": torch}).isnan().all()


def test_uninitialised_integers_are_no_index():
    scope = {"__name__": "lineartime.data.prepare", "torch": torch}
    assert (eval("torch.empty(3, dtype=torch.int64)", scope) < 0).all()


def test_memory_of_others_is_left_alone():
    make = poisoned(lambda: torch.ones(3))
    assert (eval("make()", {"__name__": "torch.nn", "make": make}) == 1).all()
    assert eval("make()", {"__name__": "lineartime", "make": make}).isnan().all()


def test_one_thread():
    assert torch.get_num_threads() == 1
