"""One compiled federation for all laws that are about data and not about parts."""

import pytest

from tests.laws import problems


@pytest.fixture(scope="session")
def federation():
    return problems.Federation()
