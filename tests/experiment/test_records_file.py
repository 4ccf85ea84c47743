"""Records of a run in a file: what is read is what was written, whichever engine left it."""

import pyarrow as pa
import pytest

from moesim.core.record_table import RecordTable
from moesim.engine import native
from moesim.errors import InputError
from moesim.experiment.store import read_records, records_bytes
from moesim.records import Records, TransferRecord
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


def test_a_file_from_before_records_said_what_was_left_is_read_as_if_nothing_was():
    done = [TransferRecord(0, 5, "a->b", "demand", 0, 1, 7, 0, 0, 1, True, False)]
    data = records_bytes(Records(transfers=RecordTable(TransferRecord, done)))
    with pa.ipc.open_file(pa.BufferReader(data)) as file:
        table = file.read_all()
    stored = table["transfers"].chunk(0)
    fields = [field.name for field in stored.flatten().type if field.name != "left"]
    older = pa.StructArray.from_arrays([stored.flatten().field(name) for name in fields], names=fields)
    table = table.set_column(
        table.schema.get_field_index("transfers"), "transfers", pa.ListArray.from_arrays(stored.offsets, older)
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert list(read_records(sink.getvalue().to_pybytes(), "file").transfers) == done
