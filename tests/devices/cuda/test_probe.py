"""coli.devices.cuda.probe: every reason why a card is not used, and the join of CUDA's order with nvidia-smi's."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from devices.cuda.fakes import CUresult, FakeDriver, FakeNvml, install

from coli.devices.cuda import probe
from coli.devices.cuda.device import CONTEXT_BYTES

SWAPPED = json.loads((Path(__file__).parents[2] / "data" / "swapped_cards.json").read_text())
ONE = [SWAPPED["runtime_order"][0]]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No variable of the machine at hand, and none left behind."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_probe_package_missing_says_what_to_install(monkeypatch):
    """Without cuda-python the reason names the package."""
    install(monkeypatch, None, None)
    assert "cuda-python is not installed" in probe.probe_cuda()
    assert "pip install 'coli[cuda]'" in probe.probe_cuda()


def test_probe_no_driver_library_is_no_driver(monkeypatch):
    """Whatever RuntimeError the bindings raise for a missing libcuda is "no NVIDIA driver"."""
    driver = FakeDriver()

    def init(flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    driver.cuInit = init
    install(monkeypatch, driver, None)
    assert probe.probe_cuda() == "no NVIDIA driver"


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (FakeDriver(init=100), "no card"),
        (FakeDriver([]), "no card"),
        (FakeDriver(ONE, init=719), "driver does not start (CUDA_ERROR_LAUNCH_FAILED); nvidia-smi may say why"),
        (FakeDriver(ONE, version=12080), "the NVIDIA driver offers CUDA 12.8; driver 580 or newer is needed"),
        (FakeDriver([{**ONE[0], "compute": "6.1"}]), "compute capability 6.1, 7.5 is the least that works"),
    ],
)
def test_probe_unusable_names_the_reason(monkeypatch, driver, reason):
    """No card, a driver that fails, one that is too old, a card that is too old: one reason each."""
    install(monkeypatch, driver, FakeNvml())
    found = probe.probe_cuda()
    assert isinstance(found, probe.Reason)
    assert found.endswith(reason)


def test_probe_hidden_cards_name_the_variable(monkeypatch):
    """An empty CUDA_VISIBLE_DEVICES is named as what hides the cards."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    install(monkeypatch, FakeDriver(init=100), FakeNvml())
    assert probe.probe_cuda() == "no card with CUDA_VISIBLE_DEVICES=''"


def test_probe_no_compiler_is_a_reason(monkeypatch):
    """Without NVRTC the reason names its package."""
    from cuda.bindings import nvrtc

    def version():
        raise RuntimeError("Failure finding libnvrtc.so.13")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", version)
    install(monkeypatch, FakeDriver(ONE), FakeNvml(ONE))
    assert probe.probe_cuda() == "NVRTC is not installed; pip install nvidia-cuda-nvrtc"


@pytest.mark.parametrize("order", [None, "PCI_BUS_ID", "FASTEST_FIRST"])
def test_probe_orders_are_joined_by_uuid(monkeypatch, order):
    """Index, name and free bytes belong to one card, in nvidia-smi's order, whatever order CUDA has."""
    if order:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    runtime = SWAPPED["runtime_order"] if order == "FASTEST_FIRST" else SWAPPED["management_order"]
    install(monkeypatch, FakeDriver(runtime), FakeNvml(SWAPPED["management_order"]))
    cards = probe.probe_cuda()
    for index, (card, wanted) in enumerate(zip(cards, SWAPPED["management_order"], strict=True)):
        assert (card.index, card.name, card.uuid, card.pci_bus_id) == (
            index,
            wanted["name"],
            wanted["uuid"],
            wanted["pci"],
        )
        assert card.free_bytes == wanted["free"]
        assert runtime[card.cuda_ordinal]["uuid"] == card.uuid
        assert ".".join(map(str, card.capability)) == wanted["compute"]


def test_probe_order_of_the_user_is_kept(monkeypatch):
    """A CUDA_DEVICE_ORDER that the user set stays; without one, PCI order is set for the whole process."""
    import os

    install(monkeypatch, FakeDriver(ONE), FakeNvml(ONE))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    probe.probe_cuda()
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    probe.probe_cuda()
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("nvml", [None, FakeNvml(broken=True)])
def test_probe_without_nvml_uses_cuda_numbers(monkeypatch, nvml):
    """A missing or broken NVML costs the free bytes and nvidia-smi's numbers, not the card."""
    install(monkeypatch, FakeDriver(SWAPPED["runtime_order"]), nvml)
    cards = probe.probe_cuda()
    assert [card.index for card in cards] == [0, 1]
    assert [card.free_bytes for card in cards] == [None, None]


def test_probe_old_card_beside_a_usable_one_is_left_out(monkeypatch, caplog):
    """A card below 7.5 is named in a line and left out; the others stay."""
    old = {**SWAPPED["runtime_order"][1], "compute": "6.1"}
    install(monkeypatch, FakeDriver([ONE[0], old]), FakeNvml([ONE[0], old]))
    with caplog.at_level(logging.INFO, "coli.cuda"):
        cards = probe.probe_cuda()
    assert [card.uuid for card in cards] == [ONE[0]["uuid"]]
    assert f"{old['name']} ({old['pci']}) is left out: compute capability 6.1" in caplog.text


def reasons(found: probe.Survey) -> list[str | None]:
    return [card.reason for card in found.cards]


def no_library(flags):
    raise RuntimeError("Failed to dlopen libcuda.so.1")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 12080}, "the NVIDIA driver offers CUDA 12.8; driver 580 or newer is needed"),
        ({"init": 719}, "the NVIDIA driver does not start (CUDA_ERROR_LAUNCH_FAILED); nvidia-smi may say why"),
        ({"init": 100}, "CUDA does not show it"),
        ({"cuInit": no_library}, "there is no libcuda; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        (None, "cuda-python is not installed"),
    ],
)
def test_survey_without_cuda_is_nvmls_cards_with_the_reason(monkeypatch, changes, reason):
    """What keeps CUDA from showing any card is said of each that NVML knows, with all that NVML knows of it."""
    driver = None
    if changes is not None:
        library = {name: changes.pop(name) for name in ["cuInit"] if name in changes}
        driver = FakeDriver(SWAPPED["runtime_order"], **changes)
        vars(driver).update(library)
    install(monkeypatch, driver, FakeNvml(SWAPPED["management_order"]))
    found = probe.survey()
    for index, (card, wanted) in enumerate(zip(found.cards, SWAPPED["management_order"], strict=True)):
        assert (card.index, card.cuda_ordinal, card.driver) == (index, None, "580.65.06")
        assert (card.name, card.uuid, card.pci_bus_id) == (wanted["name"], wanted["uuid"], wanted["pci"])
        assert (card.total_bytes, card.free_bytes) == (wanted["total"], wanted["free"])
        assert ".".join(map(str, card.capability)) == wanted["compute"]
        assert card.reason.startswith(reason)
    assert found.reason is not None and found.nvml_reason is None


def test_survey_gives_each_card_its_own_reason(monkeypatch):
    """A usable card, one that is too old and one that CUDA hides, each by nvidia-smi's number."""
    hidden, good = SWAPPED["management_order"]
    old = {**good, "name": "Old", "uuid": "GPU-cccccccc-0000-0000-0000-000000000003", "compute": "6.1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    install(monkeypatch, FakeDriver([old, good]), FakeNvml([hidden, good, old]))
    found = probe.survey()
    assert [(card.index, card.cuda_ordinal, card.name) for card in found.cards] == [
        (0, None, hidden["name"]), (1, 1, good["name"]), (2, 0, "Old"),
    ]  # fmt: skip
    assert reasons(found) == [
        "CUDA does not show it with CUDA_VISIBLE_DEVICES='2,1'",
        None,
        "compute capability 6.1, 7.5 is the least that works",
    ]
    assert found.reason is None


def test_survey_of_a_driver_that_refuses_to_list_is_a_reason(monkeypatch):
    """The bindings answer a code and no value: neither is taken for a number of cards."""
    driver = FakeDriver(ONE)
    driver.cuDeviceGetCount = lambda: (CUresult.CUDA_ERROR_INVALID_VALUE, None)
    install(monkeypatch, driver, FakeNvml(ONE))
    reason = "the NVIDIA driver does not list its cards (CUDA_ERROR_INVALID_VALUE); nvidia-smi may say why"
    found = probe.survey()
    assert (reasons(found), found.reason) == ([reason], reason)


@pytest.mark.parametrize("query", ["cuDeviceGet", "cuDeviceGetUuid", "cuDeviceTotalMem"])
def test_survey_of_a_card_that_does_not_answer_keeps_the_others(monkeypatch, query):
    """A card whose query fails is not shown by CUDA; NVML's facts of it stay."""
    broken, good = SWAPPED["management_order"]
    driver = FakeDriver([broken, good])
    answer = getattr(driver, query)
    setattr(driver, query, lambda which: (CUresult.CUDA_ERROR_INVALID_VALUE, None) if which == 0 else answer(which))
    install(monkeypatch, driver, FakeNvml([broken, good]))
    found = probe.survey()
    assert [(card.name, card.cuda_ordinal) for card in found.cards] == [(broken["name"], None), (good["name"], 1)]
    assert reasons(found) == ["CUDA does not show it", None]


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetMemoryInfo", "nvmlShutdown"])
def test_survey_survives_any_error_of_nvml(monkeypatch, call):
    """Wherever NVML fails, CUDA's cards are there with CUDA's numbers, and why is said."""
    nvml = FakeNvml(ONE)

    def fail(*arguments):
        raise nvml.NVMLError("GPU is lost")

    setattr(nvml, call, fail)
    install(monkeypatch, FakeDriver(ONE), nvml)
    found = probe.survey()
    assert [(card.index, card.free_bytes, card.driver, card.reason) for card in found.cards] == [
        (0, None, "CUDA 13.0", None)
    ]
    whose = "describe card 0" if call == "nvmlDeviceGetMemoryInfo" else "answer"
    assert found.nvml_reason == f"NVML does not {whose} (GPU is lost)"


def test_survey_of_a_card_that_nvml_cannot_describe_keeps_the_numbers_of_the_others(monkeypatch):
    """One GPU that is lost: --devices 1 means the same card as before."""
    lost, good = SWAPPED["runtime_order"]
    nvml = FakeNvml([lost, good])
    uuid_of = nvml.nvmlDeviceGetUUID

    def describe(card):
        if card is lost:
            raise nvml.NVMLError("GPU is lost")
        return uuid_of(card)

    nvml.nvmlDeviceGetUUID = describe
    install(monkeypatch, FakeDriver([good]), nvml)
    found = probe.survey()
    assert [(card.index, card.name, card.free_bytes is not None) for card in found.cards] == [(1, good["name"], True)]
    assert "card 0" in found.nvml_reason


def test_list_devices_off_says_one_line(monkeypatch, caplog):
    """No card is one line "off: why" and an empty list."""
    install(monkeypatch, FakeDriver(init=100), FakeNvml())
    with caplog.at_level(logging.INFO, "coli.cuda"):
        assert probe.list_devices() == []
    assert [record.getMessage() for record in caplog.records] == ["off: no card"]


def test_list_devices_carry_the_cards_identity(monkeypatch):
    """Devices are not opened by being listed, and say who they are."""
    driver = FakeDriver(SWAPPED["runtime_order"])
    install(monkeypatch, driver, FakeNvml(SWAPPED["management_order"]))
    devices = probe.list_devices()
    assert [device.index for device in devices] == [0, 1]
    assert devices[0].uuid == SWAPPED["management_order"][0]["uuid"]
    assert devices[1].total_bytes() == SWAPPED["management_order"][1]["total"]
    assert devices[0].free_bytes() == SWAPPED["management_order"][0]["free"] - CONTEXT_BYTES
    assert driver.leaks() == {}


@pytest.mark.parametrize(
    ("nvml", "expected"),
    [
        (FakeNvml(ONE, release="580.95.05"), "580.95.05"),
        (FakeNvml(ONE, release=b"580.95.05"), "580.95.05"),
        (FakeNvml(broken=True), "CUDA 13.0"),
        (None, "CUDA 13.0"),
    ],
)
def test_list_devices_carry_the_drivers_version(monkeypatch, nvml, expected):
    """As nvidia-smi prints it; without NVML the CUDA that the driver offers, which changes less often."""
    install(monkeypatch, FakeDriver(ONE, version=13000), nvml)
    assert [device.driver for device in probe.list_devices()] == [expected]


def test_uuid_text_is_as_nvml_writes_it():
    """16 bytes become GPU- and the usual groups."""
    assert probe.uuid_text(bytes(range(16))) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
