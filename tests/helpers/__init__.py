"""Helpers that tests share, in addition to fixtures."""

import pytest

# so that their assertions show the values that differ
pytest.register_assert_rewrite("helpers.runs", "helpers.conformance")
