"""coli.placement.table: sums that add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coli.errors import PlacementError
from coli.placement import DeviceFacts, ModelShape, budget_table, plan
from coli.placement.table import Column
from placement.examples import LAW, QWEN36_35B, cards, heats, machines, model_shapes, place_lists, shape


def check(column: Column) -> None:
    """Do the sum that a reader would: every '=' line is what stands above it."""
    total = 0
    for row in column.rows:
        if row.is_sum:
            assert total == row.bytes, (column.title, row.label)
            assert row.bytes >= 0
        else:
            total += row.bytes


@LAW
@given(data=st.data(), model=model_shapes(), devices=machines())
def test_table_adds_up(data, model, devices):
    """Whatever is planned: free less what is held, placed and resident is what is left."""
    place = data.draw(st.sampled_from(["auto", "off"]) | place_lists(model.layers, len(devices)))
    try:
        made = plan(model, devices, place=place, heat=data.draw(heats(model)), context=data.draw(st.integers(0, 99)))
    except PlacementError:
        return
    table = budget_table(made)
    for column, device in zip(table.devices, devices, strict=True):
        check(column)
        assert device.free_bytes == column.rows[0].bytes
    check(table.host)
    lines = str(table).splitlines()
    assert len(lines) == sum(len(column.rows) + 1 for column in (*table.devices, table.host))


def test_table_shows_keys_and_values_where_they_lie():
    """On the host, growing with the context; the recurrent state does not grow, and no device's line moves."""
    model = ModelShape.from_config(QWEN36_35B)
    device = [DeviceFacts("a", 6 << 30, reserve_bytes=384 << 20)]
    tables = [budget_table(plan(model, device, context=context)) for context in (4096, 32768, 131072, 262144)]
    rows = [{row.label: row.bytes for row in table.host.rows} for table in tables]
    assert [20480 * n for n in (4096, 32768, 131072, 262144)] == [
        row[f"keys and values, {n:,} positions"] for row, n in zip(rows, (4096, 32768, 131072, 262144), strict=True)
    ]
    assert 1 == len({row["recurrent state, one sequence"] for row in rows})
    assert 1 == len({str(table.devices[0]) for table in tables})


def test_table_reads_as_a_sum():
    """Free, what is taken with its sign, and the sums between."""
    held = DeviceFacts("RTX", 64 << 20, reserve_bytes=4 << 20, uuid="GPU-1f2e3d4c-5555", staging_bytes=1 << 20)
    column = budget_table(plan(shape(10, 2, 6), [held])).devices[0]
    assert [
        "device 0 (RTX, GPU-1f2e3d4c)",
        "    free                                             67,108,864          64.0 MiB",
        "  - reserve                                           4,194,304           4.0 MiB",
        "  - staging                                           1,048,576           1.0 MiB",
        "  = allowance                                        61,865,984          59.0 MiB",
        "  - lmhead x 1                                       10,485,760          10.0 MiB",
        "  - dnproj x 6                                       12,582,912          12.0 MiB",
        "  = experts' budget                                  38,797,312          37.0 MiB",
        "  - 37 of 2,048 experts                              38,797,312          37.0 MiB",
        "  = left                                                      0           0.0 MiB",
    ] == str(column).splitlines()


def test_table_of_a_card_without_room_still_adds_up():
    """A reserve larger than what is free holds back what there is."""
    column = budget_table(plan(shape(10, 2, 6), [DeviceFacts("a", 100, reserve_bytes=500)])).devices[0]
    check(column)
    assert (100, -100) == (column.rows[0].bytes, column.rows[1].bytes)
    assert 2 == len(budget_table(plan(shape(10, 2, 6), cards(1, 2))).devices)
