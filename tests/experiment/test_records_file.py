"""Records of a run in a file: what is read is what was written, whichever engine left it."""

import pytest

from moesim.engine import native
from moesim.errors import InputError
from moesim.experiment.store import read_records, records_bytes
from moesim.records import Records
from tests.engine.engine_kit import assert_same
from tests.policies.golden_kit import CASES, run_case

# Messages; widths, inexact slots and a copy that the end cuts off; activations.
NAMES = ["dali, contention", "hobbit, contention", "fiddler, contention"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_what_was_written(name: str):
    records = run_case(CASES[name], "simpy")
    data = records_bytes(records)
    back = read_records(data, "file")
    assert_same(records, back)
    assert records_bytes(back) == data
    if native.AVAILABLE:
        assert records_bytes(run_case(CASES[name], "native")) == data


def test_no_records_and_damage():
    data = records_bytes(Records())
    assert_same(Records(), read_records(data, "file"))
    with pytest.raises(InputError, match="expected the records of a run"):
        read_records(data[:-40], "file")
