"""CudaDevice over a driver that counts and does nothing: what is taken and given back, and what failures become."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from devices.cuda.fakes import CUresult, FakeDriver, FakeNvml, install
from devices.cuda.support import activations, matrix_spec, slab_bytes, slab_spec

from coli.container.layout import slab_layout
from coli.devices.base import DeviceError
from coli.devices.cuda import context as context_module
from coli.devices.cuda.device import CONTEXT_BYTES, STAGING_BYTES, CudaDevice
from coli.devices.cuda.mixer import MixerSpec
from coli.devices.cuda.probe import probe_cuda

CARD = {
    "name": "Card", "uuid": "GPU-aaaaaaaa-0000-0000-0000-000000000001", "pci": "0000:41:00.0", "total": 1 << 30,
    "free": 1 << 30, "compute": "8.6",
}  # fmt: skip
RNG = np.random.default_rng(0)
SPEC = slab_spec("i4_group", 256, 128)
SLAB = slab_bytes(RNG, slab_layout("i4_group", 256, 128))
MATRIX = matrix_spec(RNG, "i8_row", 64, 256)
X = activations(RNG, 2, 256)


@pytest.fixture
def make(monkeypatch):
    """A device over a FakeDriver with the given failures; (device, driver)."""

    def build(**driver_options):
        driver = FakeDriver([CARD], **driver_options)
        install(monkeypatch, driver, FakeNvml([CARD]))
        monkeypatch.setattr(context_module, "compile_cubin", lambda arch: b"")
        return CudaDevice(probe_cuda()[0]), driver

    return build


def use(device):
    """One of everything."""
    device.open_arena(1 << 20, 2, SPEC)
    matrix, slab = device.upload(MATRIX), device.upload_slab("shexp", SPEC, SLAB)
    device.write_slot(1, SLAB)
    ticket = device.issue(0, np.array([1], np.int32), np.array([1], np.int32), X)  # as the tier asks
    device.matmul(matrix, X)
    device.ffn(slab, np.repeat(X, 40, 0))
    return device.take(ticket)


def test_reopen_fifty_times_gives_everything_back(make):
    """After close nothing of the driver's is held, fifty times in one process."""
    device, driver = make()
    for _ in range(50):
        assert use(device).shape == (1, 256)
        device.close()
        assert driver.leaks() == {}
    device.close()


def test_arena_opened_anew_gives_the_old_one_back(make):
    """Only one arena is held however often it is opened."""
    device, driver = make()
    use(device)
    held = driver.leaks()
    use(device)
    assert driver.leaks() == held


def test_arena_too_large_takes_nothing(make):
    """Out of memory is said as such, nothing stays taken, and a smaller arena opens afterwards."""
    device, driver = make(free_bytes=STAGING_BYTES + (4 << 20))
    with pytest.raises(DeviceError) as caught:
        device.open_arena(8 << 20, 0, None)
    assert caught.value.kind == "out of memory"
    assert {"memory", "pinned", "stream"} & set(driver.leaks()) == set()
    use(device)


@pytest.mark.parametrize("n", range(1, 4))
def test_allocation_failing_at_any_place_takes_nothing(make, n):
    """Whichever device allocation of an arena fails, what came before it is given back."""
    device, driver = make(fail={"cuMemAlloc": (n, CUresult.CUDA_ERROR_OUT_OF_MEMORY)})
    with pytest.raises(DeviceError) as caught:
        device.open_arena(1 << 20, 2, SPEC)
    assert caught.value.kind == "out of memory"
    device.close()
    assert driver.leaks() == {}


@pytest.mark.parametrize("n", range(1, 8))
def test_pinning_failing_at_any_place_takes_nothing(make, n):
    """Whichever pinned buffer fails, the device closes without a leak."""
    device, driver = make(fail={"cuMemHostAlloc": (n, CUresult.CUDA_ERROR_OUT_OF_MEMORY)})
    with pytest.raises(DeviceError) as caught:
        use(device)
    assert caught.value.kind == "out of memory"
    device.close()
    assert driver.leaks() == {}


def test_resident_part_full_is_out_of_memory(make):
    """A resident beyond the arena's part is refused, and the ones before it stay usable."""
    device, _ = make()
    device.open_arena(MATRIX.data.size + 256, 0, None)
    handle = device.upload(MATRIX)
    with pytest.raises(DeviceError, match="are left of the resident part") as caught:
        device.upload(MATRIX)
    assert caught.value.kind == "out of memory"
    device.matmul(handle, X)


def test_upload_puts_the_bytes_where_the_handle_says(make):
    """Matrices lie 256-byte aligned in upload order, byte for byte, larger than a staging buffer or not."""
    device, driver = make()
    large = matrix_spec(RNG, "i8_row", 24000, 256)
    device.open_arena(large.data.size + MATRIX.data.size + 512, 0, None)
    small, big = device.upload(MATRIX), device.upload(large)
    assert small.address % 256 == big.address % 256 == 0 and big.address > small.address
    for handle, spec in ((small, MATRIX), (big, large)):
        there = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * spec.data.size).from_address(handle.address))
        assert (there == spec.data).all()


@pytest.mark.parametrize("call", ["matmul", "issue"])
def test_failed_launch_goes_on(make, call):
    """A launch that fails is that call's failure only; the next one answers."""
    device, driver = make()
    device.open_arena(1 << 20, 2, SPEC)
    handle = device.upload(MATRIX)
    device.write_slot(0, SLAB)
    run = {"matmul": lambda: device.matmul(handle, X), "issue": lambda: device.take(device.issue(0, [0], [0], X))}[call]
    run()
    driver.fail["cuGraphLaunch"] = (driver.count["cuGraphLaunch"] + 1, CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)
    with pytest.raises(DeviceError) as caught:
        run()
    assert caught.value.kind == "launch"
    run()
    device.close()
    assert driver.leaks() == {}


def test_failed_launch_in_a_batch_goes_on(make):
    """A batch whose second kernel fails to launch leaves the flag's count right."""
    device, driver = make()
    device.open_arena(1 << 20, 0, None)
    handle, many = device.upload(MATRIX), np.repeat(X, 10, 0)
    device.matmul(handle, many)
    driver.fail["cuLaunchKernel"] = (driver.count["cuLaunchKernel"] + 2, CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)
    with pytest.raises(DeviceError) as caught:
        device.matmul(handle, many)
    assert caught.value.kind == "launch"
    device.matmul(handle, many)


def trap(driver):
    """From now on kernels never answer, and the driver says why when it is asked."""
    driver.count["trap"] = 1
    driver.fail["cuStreamQuery"] = (driver.count["cuStreamQuery"] + 1, CUresult.CUDA_ERROR_LAUNCH_FAILED)


def test_sticky_error_loses_the_card_and_later_calls_say_so(make):
    """A kernel that traps is "lost" at once and at every later call, and the driver is not called any more."""
    device, driver = make()
    device.open_arena(1 << 20, 2, SPEC)
    handle = device.upload(MATRIX)
    device.write_slot(0, SLAB)
    ticket = device.issue(0, [0], [0], X)
    device.take(ticket)
    trap(driver)
    with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED") as caught:
        device.matmul(handle, X)
    assert caught.value.kind == "lost"
    before = dict(driver.count)
    for call in (
        lambda: device.matmul(handle, X),
        lambda: device.issue(0, [0], [0], X),
        lambda: device.write_slot(0, SLAB),
        lambda: device.upload(MATRIX),
        lambda: device.open_arena(1, 0, None),
        device.free_bytes,
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.kind == "lost"
    device.free(handle)
    device.close()
    device.close()
    assert dict(driver.count) == before


def test_card_lost_under_a_ticket_is_said_by_take(make):
    """A group that was under way when its card died raises "lost" when it is taken."""
    device, driver = make()
    device.open_arena(1 << 20, 2, SPEC)
    device.write_slot(0, SLAB)
    trap(driver)
    ticket = device.issue(0, [0], [0], X)
    with pytest.raises(DeviceError) as caught:
        device.take(ticket)
    assert caught.value.kind == "lost"


def test_kernels_that_end_without_an_answer_are_a_failed_launch(make):
    """An idle stream under a flag that nobody raised is not waited for."""
    device, driver = make()
    device.open_arena(1 << 20, 0, None)
    handle = device.upload(MATRIX)
    driver.count["trap"] = 1
    with pytest.raises(DeviceError, match="without an answer") as caught:
        device.matmul(handle, X)
    assert caught.value.kind == "launch"
    driver.count["trap"] = 0
    device.matmul(handle, X)


def test_second_group_keeps_the_first_ones_answer(make):
    """A ticket issued while another is open does not lose the other's answer."""
    device, _ = make()
    device.open_arena(0, 2, SPEC)
    device.write_slot(0, SLAB)
    first = device.issue(0, [0], [0], X)
    second = device.issue(1, [0, 0], [0, 1], X)
    assert device.take(second).shape == (2, 256)
    assert device.take(first).shape == (1, 256)


def test_dense_call_keeps_an_open_ffn_answer(make):
    """A product asked for while a shared expert is under way does not lose its answer."""
    device, _ = make()
    device.open_arena(1 << 20, 0, None)
    matrix, slab = device.upload(MATRIX), device.upload_slab("shexp", SPEC, SLAB)
    ticket = device.begin_ffn(slab, X)
    device.matmul(matrix, X)
    assert device.take(ticket).shape == X.shape


def test_slots_are_written_from_another_thread(make):
    """An uploader thread may write a slot while the engine thread asks for products."""
    device, driver = make()
    device.open_arena(1 << 20, 2, SPEC)
    handle = device.upload(MATRIX)
    failed = []

    def write():
        try:
            for _ in range(50):
                device.write_slot(1, SLAB)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(50):
        device.matmul(handle, X)
    thread.join()
    assert failed == []


def test_slot_of_another_size_is_refused(make):
    """Bytes that are not a slab are an error before anything is copied."""
    device, driver = make()
    device.open_arena(0, 1, SPEC)
    with pytest.raises(DeviceError, match=r"slot 0: 100 bytes given"):
        device.write_slot(0, SLAB[:100])
    assert driver.count["cuMemcpyHtoDAsync"] == 0


def test_free_bytes_leave_room_for_the_context(make):
    """Before the card is opened its context is still to be paid for; afterwards the card's own word counts."""
    device, driver = make()
    assert device.free_bytes() == CARD["free"] - CONTEXT_BYTES
    use(device)
    assert device.free_bytes() == driver.cuMemGetInfo()[1]


def attention_layer(device):
    """A small attention layer on a device with an arena."""
    n_q, n_kv, d = 2, 1, 32
    into = device.upload(matrix_spec(RNG, "i8_row", (2 * n_q + 2 * n_kv) * d, 64))
    out = device.upload(matrix_spec(RNG, "i8_row", 64, n_q * d))
    geometry = {"n_q_heads": n_q, "n_kv_heads": n_kv, "head_dim": d, "rotary_half": 4, "kv_f16": True, "eps": 1e-6,
                "attn_scale": 0.1}  # fmt: skip
    norms = {name: np.ones(d, np.float32) for name in ("q_norm", "k_norm")}
    return device.mixer(MixerSpec(True, geometry, norms), into, out)


def deltanet_layer(device):
    """A small DeltaNet layer on a device with an arena."""
    geometry = {"dn_k_heads": 1, "dn_v_heads": 2, "dn_k_dim": 16, "dn_v_dim": 16, "conv_taps": 4, "q_scale": 0.25,
                "eps": 1e-6}  # fmt: skip
    vectors = {name: np.ones(n, np.float32) for name, n in (("exp_a_log", 2), ("dt_bias", 2), ("dn_norm", 16))}
    vectors["conv"] = np.ones((4, 64), np.float32)
    into = device.upload(matrix_spec(RNG, "i8_row", 96, 64))
    out = device.upload(matrix_spec(RNG, "i8_row", 64, 32))
    return device.mixer(MixerSpec(False, geometry, vectors, matrix_spec(RNG, "f32", 4, 64)), into, out)


def test_layer_state_grows_is_copied_and_given_back(make):
    """K/V memory grows with the positions, a copy has its own, and closing leaves nothing."""
    device, driver = make()
    device.open_arena(1 << 20, 0, None)
    mixer = attention_layer(device)
    state, x, turn = device.new_state(mixer), activations(RNG, 70, 64), np.ones((70, 4), np.float32)
    assert device.mix(mixer, state, 0, x, turn, turn).shape == (70, 64)
    assert (state.chunks, len(state.pieces)) == (16, 1)
    for position in (70, 1023, 1024):
        device.mix(mixer, state, position, x[:1], turn[:1], turn[:1])
    assert (state.chunks, len(state.pieces)) == (32, 2)
    other = state.copy()
    assert [n for _, n in other.pieces] == [n for _, n in state.pieces]
    assert not {at for at, _ in other.pieces} & {at for at, _ in state.pieces}
    held = driver.leaks()["memory"]
    driver.fail["cuMemAlloc"] = (driver.count["cuMemAlloc"] + 1, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(DeviceError) as caught:
        state.reach(5000)
    assert caught.value.kind == "out of memory"
    assert driver.leaks()["memory"] == held and state.chunks == 32
    other.close()
    state.close()
    device.close()
    assert driver.leaks() == {}


def test_layer_answers_where_it_is_told(make):
    """``out`` may be rows of a wider buffer; so may the rows that go in."""
    device, _ = make()
    device.open_arena(1 << 20, 0, None)
    mixer, matrix = deltanet_layer(device), device.upload(MATRIX)
    state, wide, turn = device.new_state(mixer), np.full((5, 80), 7, np.float32), np.empty((5, 0), np.float32)
    for at, n in ((0, 3), (3, 1), (4, 1)):
        rows = wide[at : at + n, :64]
        found = device.mix(mixer, state, at, rows, turn[at : at + n], turn[at : at + n], rows)
        assert found is rows and (wide[:, 64:] == 7).all() and not (rows == 7).any()
    answer = np.full((2, 80), 7, np.float32)
    assert np.shares_memory(device.matmul(matrix, X, answer[:, :64]), answer) and (answer[:, 64:] == 7).all()


def test_layer_whose_table_is_full_grows_within_one_graphs_grids(make):
    """The grids of a graph cover more blocks than the tables may hold; a position beyond them makes room first."""
    device, _ = make()
    device.open_arena(1 << 20, 0, None)
    mixer = attention_layer(device)
    state, x, turn = device.new_state(mixer), activations(RNG, 1, 64), np.ones((1, 4), np.float32)
    for position in (2100, 3071, 3072):  # 33 to 48 blocks in the tables, grids for 64
        device.mix(mixer, state, position, x, turn, turn)
        assert position < 64 * state.chunks
    assert state.chunks == 64


@pytest.mark.parametrize("layer", [attention_layer, deltanet_layer])
def test_states_end_with_the_arena(make, layer):
    """States that nobody closed are given back with the arena they belong to; closing them afterwards does nothing."""
    device, driver = make()
    device.open_arena(1 << 20, 0, None)
    mixer = layer(device)
    states = [device.new_state(mixer) for _ in range(2)]
    turn = np.ones((1, 4), np.float32)
    for state in states:
        device.mix(mixer, state, 0, X[:1, :64], turn, turn)
    states.append(states[0].copy())
    device.close()
    assert driver.leaks() == {}
    for state in states:
        state.close()


@pytest.mark.parametrize("n", [1, 2])
def test_state_that_does_not_fit_takes_nothing(make, n):
    """Whichever of a state's allocations fails, new or copied, what came before it is given back."""
    device, driver = make()
    device.open_arena(1 << 20, 0, None)
    mixer, attention = deltanet_layer(device), attention_layer(device)
    grown = device.new_state(attention)
    grown.reach(10)
    for take in (lambda: device.new_state(mixer), device.new_state(mixer).copy, grown.copy):
        held = driver.leaks()
        driver.fail["cuMemAlloc"] = (driver.count["cuMemAlloc"] + n, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        with pytest.raises(DeviceError) as caught:
            take()
        assert caught.value.kind == "out of memory" and driver.leaks() == held


def test_states_of_a_lost_card_are_left_alone(make):
    """Closing a state of a dead context calls nothing."""
    device, driver = make()
    device.open_arena(1 << 20, 0, None)
    mixer = deltanet_layer(device)
    state, turn = device.new_state(mixer), np.empty((1, 0), np.float32)
    device.mix(mixer, state, 0, X[:1, :64], turn, turn)
    trap(driver)
    with pytest.raises(DeviceError) as caught:
        device.mix(mixer, state, 1, X[:1, :64], turn, turn)
    assert caught.value.kind == "lost"
    before = dict(driver.count)
    state.close()
    device.close()
    assert dict(driver.count) == before
