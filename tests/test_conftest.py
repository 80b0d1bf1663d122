import pytest
import torch


@pytest.mark.parametrize("expression", [
    "torch.empty(3)", "torch.empty_like(torch.ones(3))", "torch.empty_strided((3, 2), (2, 1))",
    "torch.empty_permuted((3, 2), (1, 0))", "torch.ones(2).new_empty(3)",
    "torch.ones(2).new_empty_strided((3,), (1,))"])
def test_uninitialised_memory_of_the_package_is_nan(expression):
    assert eval(expression, {"__name__": "lineartime.model.layers", "torch": torch}).isnan().all()
    assert torch.get_num_threads() == 1
