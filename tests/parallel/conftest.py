"""Two and three ranks, started when the first test asks for them and used by all that follow."""

import pytest
from ranks import Ranks


def _team(size):
    team = Ranks(size)
    yield team
    team.close()


@pytest.fixture(scope="session")
def two():
    yield from _team(2)


@pytest.fixture(scope="session")
def three():
    yield from _team(3)
