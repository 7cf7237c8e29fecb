"""The two tiers of the tests: the default one, and what only ``pytest -m ''`` runs."""

import pytest


def sample(values, *default):
    """Return values for ``parametrize``; all but the ones named ``default`` are marked ``thorough``."""
    missing = [value for value in default if value not in values]
    assert default and not missing, f"give some of the values, not {missing}"
    return [value if value in default else pytest.param(value, marks=pytest.mark.thorough) for value in values]
