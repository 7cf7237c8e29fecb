"""A file of arrays of which any byte is another one is read as it is, or refused as its reader refuses files."""

import numpy as np
import pytest

from fl_lightning.callbacks.measurement import Series
from fl_lightning.callbacks.spectrum import compare
from fl_lightning.data.plan import Plan
from fl_lightning.errors import UsageError
from fl_lightning.report.reading import load_arrays


def series(path):
    path.parent.mkdir(exist_ok=True)
    made = Series()
    for entry in (3, 4):
        made.append("rounds", entry)
    made.save(path)
    return made.stamps()


def plan(path):
    Plan([np.arange(5), np.arange(5, 9)]).save(path)


def spectra(path):
    np.savez(path, rounds=[0, 1], representation=np.ones((2, 4)))


READERS = {
    "measurements": (series, lambda path, stamps: Series().read(path, stamps), ()),
    "plan": (plan, lambda path, _: Plan.load(path), UsageError),
    "spectra": (spectra, lambda path, _: compare({"a": path.parent}), UsageError),
    "report": (spectra, lambda path, _: load_arrays(path), ValueError),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_no_byte_that_is_another_ends_in_another_error(name, tmp_path):
    write, read, refusal = READERS[name]
    path = tmp_path / "spectra.npz"
    known, refused = write(path), 0
    content = path.read_bytes()
    # compare draws a figure each time
    for at in range(0, len(content), 19 if name == "spectra" else 3):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        try:
            read(path, known)
        except refusal:
            refused += 1
    assert refused or name == "measurements"
