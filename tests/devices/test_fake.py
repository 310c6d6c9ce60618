"""coli/devices/fake.py: the card of ordinary memory keeps the contract, fails as told, and catches its callers."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from devices.slabs import assert_bits, random_matrix, random_slabs, reference_ffn, reference_matmul

from coli.container.layout import FORMATS
from coli.devices.base import DeviceError, MixerSpec
from coli.devices.fake import OPERATIONS, POISON, FakeDevice

MIB = 1 << 20


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def opened(rng, *, format="i4_group", slots=4, resident_bytes=MIB, **options):
    """A device with four experts' slabs (128, 256) of which slots 0 to 2 are written."""
    slabs, spec = random_slabs(rng, format, 128, 256, 4)
    device = FakeDevice(64 * MIB, **options)
    device.open_arena(resident_bytes, slots, spec)
    for slot in range(min(3, slots)):
        device.write_slot(slot, slabs[slot])
    return device, slabs, spec


def rows(rng, n, cols):
    return rng.standard_normal((n, cols), np.float32)


# ---- the same bits as the contract ---------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("format", FORMATS)
def test_matmul_of_every_format_equals_the_reference(rng, format, n):
    """A resident answers with the contract's bits, whatever its format and the number of rows; ragged shapes too."""
    device = FakeDevice(MIB)
    device.open_arena(MIB, 0, None)
    device.upload(random_matrix(rng, "i8_row", 16, 128, "before"))
    m = random_matrix(rng, format, 40, 200)
    x = rows(rng, n, 200)
    assert_bits(reference_matmul(m, x), device.matmul(device.upload(m), x))


@pytest.mark.parametrize("format", FORMATS)
def test_ffn_and_group_of_every_format_equal_the_reference(rng, format):
    """A resident slab and a group of slots give the reference's FFN, in the order of issue, repeated slots too."""
    device, slabs, spec = opened(rng, format=format)
    x = rows(rng, 3, 128)
    shared = device.upload_slab("shared", spec, slabs[3])
    assert_bits(reference_ffn(slabs[3], spec, x), device.ffn(shared, x))
    slots, of = [2, 0, 2, 1], [0, 2, 1, 0]
    expected = np.concatenate([reference_ffn(slabs[s], spec, x[r : r + 1]) for s, r in zip(slots, of, strict=True)])
    assert_bits(expected, device.take(device.issue(0, slots, of, x)))


def test_group_reads_x_as_it_was_at_issue(rng):
    """The caller may overwrite x as soon as issue returns."""
    device, slabs, spec = opened(rng)
    x = rows(rng, 1, 128)
    expected = reference_ffn(slabs[0], spec, x)
    ticket = device.issue(0, [0], [0], x)
    x[:] = np.nan
    assert_bits(expected, device.take(ticket))


def test_device_computes_from_its_arena_only(rng):
    """What happens to the host's bytes after an upload does not reach the device."""
    device = FakeDevice(MIB)
    device.open_arena(MIB, 0, None)
    m = random_matrix(rng, "i8_row", 32, 128)
    x = rows(rng, 2, 128)
    expected = reference_matmul(m, x)
    handle = device.upload(m)
    m.data[:] = 0
    assert_bits(expected, device.matmul(handle, x))


# ---- memory ------------------------------------------------------------------------------------------------


def test_arena_of_8_gib_costs_only_what_is_written(rng):
    """The arena is mapped as it is used: a big card can be rehearsed on a small machine."""

    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    slabs, spec = random_slabs(rng, "i4_group", 128, 256, 1)
    device = FakeDevice(8 << 30)
    slots = (8 << 30) // spec.slab_bytes
    device.open_arena(0, slots, spec)
    device.write_slot(0, slabs[0])
    device.write_slot(slots - 1, slabs[0])
    assert 0 <= device.free_bytes() < spec.slab_bytes
    assert resident_bytes() - before < 64 * MIB


def test_arena_larger_than_what_is_free_is_out_of_memory_and_takes_nothing():
    """Free memory counts when the arena is opened, not when it was planned."""
    device = FakeDevice(4 * MIB)
    device.set_free_bytes(2 * MIB)
    with pytest.raises(DeviceError, match="4,194,304 bytes, 2,097,152 are free") as failed:
        device.open_arena(4 * MIB, 0, None)
    assert "out of memory" == failed.value.kind
    assert (2 * MIB, 4 * MIB) == (device.free_bytes(), device.total_bytes())
    device.open_arena(2 * MIB, 0, None)
    assert 0 == device.free_bytes()


def test_freed_and_cleared_memory_holds_poison(rng):
    """Nothing is left of a resident that was freed or an expert that was evicted."""
    device, slabs, _ = opened(rng)
    assert (slabs[1] == device.slot_bytes(1)).all()
    device.clear_slot(1)
    assert (device.slot_bytes(1) == POISON).all()
    handle = device.upload(random_matrix(rng, "i8_row", 16, 128))
    device.free(handle)
    assert (device._arena[handle.offset : handle.offset + handle.n_bytes] == POISON).all()


def test_closed_device_can_be_opened_again(rng):
    """Close gives everything back, may be called twice, and leaves the device usable."""
    device, slabs, spec = opened(rng)
    device.close()
    device.close()
    assert 64 * MIB == device.free_bytes()
    device.open_arena(0, 1, spec)
    device.write_slot(0, slabs[0])
    x = rows(rng, 1, 128)
    assert_bits(reference_ffn(slabs[0], spec, x), device.take(device.issue(0, [0], [0], x)))


# ---- misuse ------------------------------------------------------------------------------------------------


def misuses():
    def never_written(d, slabs, spec, x):
        d.issue(0, [3], [0], x)

    def cleared(d, slabs, spec, x):
        d.clear_slot(0)
        d.issue(0, [0], [0], x)

    def write_under_ticket(d, slabs, spec, x):
        d.issue(0, [0, 1], [0, 0], x)
        d.write_slot(1, slabs[3])

    def clear_under_ticket(d, slabs, spec, x):
        d.issue(0, [0], [0], x)
        d.clear_slot(0)

    def second_ticket_still_reads(d, slabs, spec, x):
        first = d.issue(0, [0], [0], x)
        d.issue(0, [0], [0], x)
        d.take(first)
        d.write_slot(0, slabs[3])

    def taken_twice(d, slabs, spec, x):
        ticket = d.issue(0, [0], [0], x)
        d.take(ticket)
        d.take(ticket)

    def ticket_of_a_closed_arena(d, slabs, spec, x):
        ticket = d.issue(0, [0], [0], x)
        d.close()
        d.open_arena(0, 4, spec)
        d.take(ticket)

    def reopened_under_ticket(d, slabs, spec, x):
        d.issue(0, [0], [0], x)
        d.open_arena(0, 4, spec)

    def no_such_slot(d, slabs, spec, x):
        d.write_slot(4, slabs[0])

    def short_slab(d, slabs, spec, x):
        d.write_slot(0, slabs[0][:-1])

    def wrong_width(d, slabs, spec, x):
        d.issue(0, [0], [0], x[:, :100])

    def wrong_type(d, slabs, spec, x):
        d.issue(0, [0], [0], x.astype(np.float64))

    def no_such_row(d, slabs, spec, x):
        d.issue(0, [0], [2], x)

    def empty_group(d, slabs, spec, x):
        d.issue(0, [], [], x)

    def resident_part_full(d, slabs, spec, x):
        d.upload(random_matrix(np.random.default_rng(0), "f32", 1024, 1024))

    def resident_freed(d, slabs, spec, x):
        handle = d.upload_slab("shared", spec, slabs[3])
        d.free(handle)
        d.ffn(handle, x)

    def resident_freed_twice(d, slabs, spec, x):
        handle = d.upload_slab("shared", spec, slabs[3])
        d.free(handle)
        d.free(handle)

    def slab_as_matrix(d, slabs, spec, x):
        d.matmul(d.upload_slab("shared", spec, slabs[3]), x)

    def wrong_block_size(d, slabs, spec, x):
        m = random_matrix(np.random.default_rng(0), "i8_row", 16, 128)
        d.upload(type(m)(m.name, "i4_row", m.rows, m.cols, m.block_bytes, m.n_blocks, m.n_groups, m.data))

    return [value for value in locals().values()]


@pytest.mark.parametrize("misuse", misuses(), ids=lambda f: f.__name__)
def test_misuse_is_an_assertion_error(rng, misuse):
    """What a real card would answer with garbage stops the caller's test instead; no fallback may swallow it."""
    device, slabs, spec = opened(rng)
    with pytest.raises(AssertionError):
        misuse(device, slabs, spec, rows(rng, 2, 128))


def test_slot_is_not_readable_while_it_is_written(rng):
    """An upload thread's slot belongs to nobody until the copy is done."""
    device, slabs, _ = opened(rng, latency_us=50_000)
    writing = Event()

    def upload():
        writing.set()
        device.write_slot(3, slabs[3])

    thread = Thread(target=upload)
    thread.start()
    writing.wait()
    while device._slots.state(3) == "empty":
        time.sleep(0.001)
    with pytest.raises(AssertionError, match="slot 3 is read; it is writing"):
        device.issue(0, [3], [0], rows(rng, 1, 128))
    thread.join()
    device.take(device.issue(0, [3], [0], rows(rng, 1, 128)))


# ---- failures ----------------------------------------------------------------------------------------------


def exercise(device, slabs, spec, x):
    """Twice of everything; the failures by operation."""
    failed = []

    def attempt(operation, call, *arguments):
        try:
            return call(*arguments)
        except DeviceError as error:
            failed.append((operation, error.kind))
            return None

    attempt("open_arena", device.open_arena, MIB, 2, spec)
    handles = [attempt("upload_slab", device.upload_slab, f"s{i}", spec, slabs[i]) for i in range(2)]
    for slot in range(2):
        attempt("write_slot", device.write_slot, slot, slabs[slot])
    for handle in handles:
        if handle is not None:
            attempt("ffn", device.ffn, handle, x)
    for slot in range(2):
        if slot < len(device._slots) and device._slots.state(slot) == "written":
            ticket = attempt("issue", device.issue, 0, [slot], [0], x)
            if ticket is not None:
                attempt("take", device.take, ticket)
    return failed


@pytest.mark.parametrize(
    ("operation", "n", "expected"),
    [
        ("alloc", 3, [("upload_slab", "out of memory")]),
        ("upload", 1, [("upload_slab", "launch")]),
        ("upload", 4, [("write_slot", "launch")]),
        ("matmul", 2, [("ffn", "launch")]),
        ("issue", 1, [("issue", "launch")]),
        ("take", 2, [("take", "launch")]),
    ],
)
def test_nth_operation_fails_once_with_its_kind(rng, operation, n, expected):
    """A told failure hits the n-th operation of its name and no other; the device goes on."""
    slabs, spec = random_slabs(rng, "i4_group", 128, 128, 2)
    device = FakeDevice(64 * MIB, fail=[(operation, n)])
    assert expected == exercise(device, slabs, spec, rows(rng, 1, 128))
    assert n <= [call[0] for call in device.calls].count(operation)


@pytest.mark.parametrize("n", range(1, 13))
def test_dying_device_is_lost_for_ever(rng, n):
    """From the n-th operation on every call fails as lost; closing it stays safe."""
    slabs, spec = random_slabs(rng, "i4_group", 128, 128, 2)
    device = FakeDevice(64 * MIB, fail=[("die", n)])
    failed = exercise(device, slabs, spec, rows(rng, 1, 128))
    assert failed and {"lost"} == {kind for _, kind in failed}
    with pytest.raises(DeviceError, match="fake0 is lost"):
        device.free_bytes()
    device.close()
    with pytest.raises(DeviceError):
        device.open_arena(0, 0, None)


def test_unknown_failure_is_refused():
    """A mistyped operation would be a failure that never comes, and a test that proves nothing."""
    known = "alloc, upload, matmul, issue, take, mix, span, ask, answer, finish, die"
    with pytest.raises(ValueError, match=f"'mathmul'.*{known}"):
        FakeDevice(1, fail=[("mathmul", 1)])


def test_calls_record_everything_in_order(rng):
    """The record names each operation with what it was about."""
    device, slabs, spec = opened(rng, slots=1, resident_bytes=MIB)
    m = random_matrix(rng, "i8_row", 16, 128, "lm_head")
    n_bytes = m.n_blocks * m.block_bytes
    handle = device.upload(m)
    device.matmul(handle, rows(rng, 2, 128))
    device.take(device.issue(5, [0], [0], rows(rng, 1, 128)))
    device.clear_slot(0)
    device.free(handle)
    device.close()
    assert [
        ("alloc", MIB + spec.slab_bytes, 1),
        ("upload", 0, spec.slab_bytes),
        ("alloc", n_bytes, "lm_head"),
        ("upload", "lm_head", n_bytes),
        ("matmul", "lm_head", 2),
        ("issue", 5, (0,), (0,)),
        ("take", 5),
        ("clear", 0),
        ("free", "lm_head"),
        ("close",),
    ] == list(device.calls)
    in_layers = {"mix", "span", "ask", "answer", "finish"}
    assert set(OPERATIONS) - in_layers <= {call[0] for call in device.calls}


# ---- time --------------------------------------------------------------------------------------------------


def test_speed_and_delay_are_waited_for(rng):
    """A product takes the delay and then its bytes at the given speed."""
    m = random_matrix(rng, "i8_row", 256, 1024)
    device = FakeDevice(MIB)
    device.open_arena(MIB, 0, None)
    handle = device.upload(m)
    device.latency_us, device.gb_s = 10_000, m.data.size / 10e-3 / 1e9
    start = time.perf_counter()
    device.matmul(handle, rows(rng, 1, 1024))
    assert 0.020 <= time.perf_counter() - start < 0.500


def test_group_runs_beside_the_caller(rng):
    """The delay of a group passes while the caller does something else; take waits only for the rest."""
    device, _, _ = opened(rng)
    device.latency_us = 300_000
    start = time.perf_counter()
    ticket = device.issue(0, [0], [0], rows(rng, 1, 128))
    assert time.perf_counter() - start < 0.200
    time.sleep(0.250)
    device.take(ticket)
    assert 0.300 <= time.perf_counter() - start < 0.500


# ---- whole layers --------------------------------------------------------------------------------------------


def deltanet_layer(rng, device):
    """A small DeltaNet layer on an opened device, and rows for it."""
    g = {"dn_k_heads": 2, "dn_v_heads": 4, "dn_k_dim": 16, "dn_v_dim": 16, "conv_taps": 4, "q_scale": 0.25, "eps": 1e-6}
    vectors = {
        "conv": rows(rng, 4, 128), "exp_a_log": np.ones(4, np.float32), "dt_bias": np.zeros(4, np.float32),
        "dn_norm": np.ones(16, np.float32),
    }  # fmt: skip
    into = device.upload(random_matrix(rng, "i8_row", 192, 128, "into"))
    out = device.upload(random_matrix(rng, "i8_row", 128, 64, "out"))
    return device.mixer(MixerSpec(False, g, vectors, random_matrix(rng, "f32", 8, 128, "ba")), into, out)


NO_TURNS = np.empty((9, 0), np.float32)


def test_layer_in_any_cut_and_on_a_copy_answers_alike(rng):
    """Positions one by one, all at once, and the rest on a copy of the state: the same bits."""
    device, _, _ = opened(rng)
    mixer, x = deltanet_layer(rng, device), rows(rng, 9, 128)
    state = device.new_state(mixer)
    expected = device.mix(mixer, state, 0, x, NO_TURNS, NO_TURNS)
    state = device.new_state(mixer)
    found = [device.mix(mixer, state, 0, x[:5], NO_TURNS, NO_TURNS)]
    copied = state.copy()
    device.mix(mixer, state, 5, x[:4], NO_TURNS, NO_TURNS)
    for at in range(5, 9):
        found.append(device.mix(mixer, copied, at, x[at : at + 1], NO_TURNS, NO_TURNS, np.empty((1, 128), np.float32)))
    assert_bits(expected, np.concatenate(found))


def test_layer_and_states_take_memory_and_give_it_back(rng):
    """Vectors and states lie beside the arena; a closed state's bytes are free again."""
    device, _, _ = opened(rng)
    before = device.free_bytes()
    mixer = deltanet_layer(rng, device)
    with_layer = device.free_bytes()
    states = [device.new_state(mixer) for _ in range(3)]
    states.append(states[0].copy())
    one = (with_layer - device.free_bytes()) // 4
    assert before > with_layer and one > 4 * 4 * 16 * 16
    for state in states:
        state.close()
        state.close()
    assert device.free_bytes() == with_layer
    device.set_free_bytes(device._arena.size + device._beside_bytes + one - 1)
    with pytest.raises(DeviceError) as failed:
        device.new_state(mixer)
    assert failed.value.kind == "out of memory" and device.free_bytes() == one - 1


def wrong_states():
    def position_left_out(d, mixer, x):
        d.mix(mixer, d.new_state(mixer), 1, x, NO_TURNS, NO_TURNS)

    def closed(d, mixer, x):
        state = d.new_state(mixer)
        state.close()
        d.mix(mixer, state, 0, x, NO_TURNS, NO_TURNS)

    def of_an_arena_before(d, mixer, x):
        state, spec = d.new_state(mixer), d._slots.slab
        d.open_arena(MIB, 0, spec)
        state.reach(5)

    def of_another_layer(d, mixer, x):
        d.mix(deltanet_layer(np.random.default_rng(0), d), d.new_state(mixer), 0, x, NO_TURNS, NO_TURNS)

    def spoiled(d, mixer, x):
        state = d.new_state(mixer)
        d._fail = frozenset([("mix", 1)])
        with pytest.raises(DeviceError):
            d.mix(mixer, state, 0, x, NO_TURNS, NO_TURNS)
        d.mix(mixer, state, 0, x, NO_TURNS, NO_TURNS)

    return [value for value in locals().values()]


@pytest.mark.parametrize("misuse", wrong_states(), ids=lambda f: f.__name__)
def test_state_that_is_out_of_step_is_an_assertion_error(rng, misuse):
    """A state of another time, layer or arena would be somebody else's memory."""
    device, _, _ = opened(rng)
    with pytest.raises(AssertionError):
        misuse(device, deltanet_layer(rng, device), rows(rng, 2, 128))


def test_ffn_begun_beside_a_group_answers_as_alone(rng):
    """The shared expert and a group are under way at once; rows may be overwritten as soon as both have begun."""
    device, slabs, spec = opened(rng)
    x = rows(rng, 2, 128)
    shared = device.upload_slab("shared", spec, slabs[3])
    expected = device.ffn(shared, x), device.take(device.issue(0, [1], [1], x))
    group, ticket = device.issue(0, [1], [1], x), device.begin_ffn(shared, x)
    x[:] = np.nan
    assert_bits(expected[0], device.take(ticket))
    assert_bits(expected[1], device.take(group))
    with pytest.raises(AssertionError, match="taken twice"):
        device.take(ticket)
