"""What tests share beside fixtures."""

import pytest

# so that their assertions show the values that differ
pytest.register_assert_rewrite("helpers.runs", "helpers.conformance")
