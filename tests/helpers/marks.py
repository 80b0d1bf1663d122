"""Cases of a parametrised test that `make test` leaves to `make test-all`."""

import pytest


def rest(*cases: object) -> list[object]:
    """Each case with the mark `rest`; a tuple has the values of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.rest) for case in cases]
