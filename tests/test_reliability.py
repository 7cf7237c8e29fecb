"""A handful of what ``experiments/reliability/torture.py`` does by the hundred."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments" / "reliability"))


@pytest.mark.filterwarnings("ignore")
def test_killed_runs_and_damaged_checkpoints_end_with_the_bits_of_a_whole_run(tmp_path):
    import torture

    counts = torture.torture(kills=2, corruptions=2, seed=3, root=tmp_path, cases=("SCAFFOLD",))
    assert sum(counts["kills"].values()) == 2 and sum(counts["corruptions"].values()) == 2
    assert not counts["kills"]["wrong"] and not counts["corruptions"]["wrong"]
