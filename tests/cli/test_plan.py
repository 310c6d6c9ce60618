"""``coli plan``: facts from flags and files, the plan to standard output, the reasons to standard error."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from itertools import pairwise

import pytest

from coli.cli.main import main
from coli.cli.plan import parse_device
from coli.container.reader import Container
from coli.placement import CpuSpeeds, Speed
from placement.examples import QWEN36_35B

SMALL = "Small 6 GiB=6012954214"  # of 6 GiB, what its driver leaves


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch):
    """The tagged lines go to this test's standard error, not to the one that the first test of the process had."""
    monkeypatch.setattr(logging.getLogger("coli"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("coli"), "propagate", True)


@pytest.fixture
def config(tmp_path):
    """config.json of the 35B model."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN36_35B))
    return path


@pytest.fixture
def run(capsys):
    """run(*args) -> (status, standard output, standard error)."""

    def call(*args: object) -> tuple[int, str, str]:
        status = main(["plan", *map(str, args)])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


def test_plan_of_a_config_prints_the_table_and_the_reasons(run, config):
    """The sum that adds up is data; the verdicts are tagged lines on standard error."""
    status, out, err = run(config, "--device", SMALL)
    assert status == 0
    assert out.startswith("device 0 (Small 6 GiB)\n    free")
    assert "keys and values, 8,192 positions" in out
    assert "predicted" not in out + err
    lines = err.splitlines()
    assert all(line.startswith("[place] ") for line in lines)
    assert "[place] lmhead -> 0 (Small 6 GiB)  486.9 MiB  value 1.0000/B > 0.0312/B (the 315 coldest experts)" in err


def test_plan_json_is_the_whole_answer(run, config):
    """--json: one object on standard output, with the decisions of the lines."""
    status, out, _ = run(config, "--device", SMALL, "--json")
    found = json.loads(out)
    assert status == 0
    assert 111 == len(found["decisions"])
    device = found["devices"][0]
    state = 253_501_440  # of one sequence of 8,192 positions, and the vectors of whole layers
    allowance = 6012954214 - 6012954214 // 16 - state
    assert allowance == device["allowance_bytes"] == device["placed_bytes"] + device["budget_bytes"]
    assert found["predicted_ms_per_token"] is None


def test_plan_with_speeds_predicts(run, config):
    """With the speed of the card and the CPU: ms and tok/s, and time decides."""
    status, out, err = run(config, "--device", "RTX 3070=7.5GiB:448:12", "--cpu", "40")
    assert status == 0
    assert "ms a token" in out and "[place] auto:time: " in err


def test_plan_verbose_has_a_line_for_each_component(run, config):
    """-v: every component by itself."""
    _, _, err = run(config, "--device", SMALL, "-v")
    assert 30 == sum(line.startswith("[place] dnproj ") for line in err.splitlines())


def test_plan_of_a_container_counts_its_bytes(run, make_container, monkeypatch):
    """What the CPU reads for a token without a card is what inspect says that a token reads."""
    monkeypatch.setenv("COLI_DEVICES", "none")
    for bits in ((8, 4), (16, 16)):
        folder = make_container("tiny-random", trunk_bits=bits[0], expert_bits=bits[1])
        with Container.open(folder) as container:
            expected = sum(container.bytes_read_per_token().values())
        found = json.loads(run(folder, "--json", "--context", 64)[1])
        assert expected == found["cpu_bytes_per_token"]


def test_plan_of_a_tied_16_bit_container_offers_the_embedding_as_the_head(run, make_container):
    """A tied 16-bit container has no lm_head of its own."""
    folder = make_container("tiny-textonly", trunk_bits=16, expert_bits=16)
    found = json.loads(run(folder, "--device", "a=1GiB", "--json", "--context", 64)[1])
    assert 512 * 48 * 2 == found["decisions"][0]["bytes"]
    assert found["cpu_bytes_per_token"] < 70_000, "the head is on the card, and is not counted twice"


def test_plan_of_a_converted_fixture_equals_the_plan_of_its_config(run, make_container):
    """What convert would write is what it wrote: a config.json gives the container's sizes."""
    folder = make_container("tiny-random")
    sizes = [
        [
            (d["component"], d["layer"], d["bytes"])
            for d in json.loads(run(path, "--device", "a=1MiB", "--json")[1])["decisions"]
        ]
        for path in (folder, folder / "config.json")
    ]
    assert sizes[0] == sizes[1]


def test_plan_verbose_shows_every_alternative_of_two_cards(run, config):
    """Off, bytes, each card alone, experts here and trunk there, both weighted, whole layers split: each with tok/s."""
    cards = ("--device", "A=11GiB:900:9:30", "--device", "B=7.5GiB:448:12:40", "--cpu", "60")
    looked_at = [line for line in run(config, *cards, "-v")[2].splitlines() if line.startswith("[place] looked at: ")]
    assert all("tok/s)" in line for line in looked_at)
    for label in (
        "off", "bytes", "nothing on a device", "device 0: bytes, 1 left out", "device 1: bytes, 0 left out",
        "trunk on 0, experts on 1", "trunk on 1, experts on 0", "trunk on 0, experts on 0+1 by speed",
        "whole layers split over 0+1, experts with their layers",
    ):  # fmt: skip
        assert any(f"looked at: {label} " in line for line in looked_at), label


def test_plan_without_every_speed_says_what_times_need(run, config):
    """A speed that was given and is of no use alone is not dropped in silence."""
    said = "no times: they need the speed of the CPU (--cpu GBPS)"
    assert said in run(config, "--device", "A=11GiB:900:9:30")[2]
    assert said in run(config, "--device", "A=11GiB", "--cpu", "40")[2]
    assert said not in run(config, "--device", "A=11GiB:900:9:30", "--cpu", "40")[2]


def test_plan_of_a_list_prints_what_auto_would_take(run, config):
    """A list is obeyed; beside its predicted cost stands auto's."""
    _, _, err = run(config, "--device", "A=11GiB:900:9:30", "--cpu", "60", "--place", "lmhead=0,experts=cpu")
    head = err.splitlines()[0]
    assert "ms/token, obeyed; auto:time would take " in head


def test_plan_by_time_measures_the_fake_cards_that_it_has_no_figures_of(run, config, monkeypatch, tmp_path):
    """auto:time without speeds probes now; auto alone does not measure what has no identity; --reprobe does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu = CpuSpeeds(Speed(40), Speed(40))
    monkeypatch.setattr("coli.probing.host.measure_cpu", lambda beside: (cpu, 40.0))
    _, _, err = run(config, "--devices", "fake:20MiB", "--place", "auto:time")
    assert 2 == sum(line.startswith("[probe] ") for line in err.splitlines())
    assert "[place] auto:time: " in err and "predicted" in err
    _, _, err = run(config, "--devices", "fake:20MiB")
    assert "[probe]" not in err and "[place] auto:bytes: " in err
    _, _, err = run(config, "--devices", "fake:20MiB", "--reprobe")
    assert 2 == sum("measured in" in line for line in err.splitlines())
    assert "(kept)" in run(config, "--devices", "fake:20MiB", "--place", "auto:time")[2], "the CPU's"


def test_plan_plot_is_a_picture(run, config, tmp_path):
    """--plot: a PNG that is not empty, and no half of one."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    status, _, err = run(config, "--device", "A=11GiB:900:9:30", "--cpu", "60", "--plot", path)
    assert status == 0 and f"[place] drawn: {path}" in err
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
    assert [path] == list(tmp_path.glob("*.png")) and not list(tmp_path.glob(".*"))
    assert 0 == run(config, "--device", SMALL, "--plot", tmp_path / "bytes.svg")[0], "also without speeds"


@pytest.mark.parametrize("name", ["plan.txt", "missing/plan.png"])
def test_plan_plot_into_no_picture_is_one_line(run, config, tmp_path, name):
    """Another ending, or a folder that is not there."""
    status, out, err = run(config, "--device", SMALL, "--plot", tmp_path / name)
    assert (2, "", 1) == (status, out, len(err.splitlines()))
    assert "--plot" in err


def test_plan_plot_without_matplotlib_says_what_to_install(run, config, tmp_path, monkeypatch):
    """The extra is named."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(config, "--device", SMALL, "--plot", tmp_path / "plan.png")
    assert (2, "", 1) == (status, out, len(err.splitlines()))
    assert "coli[plot]" in err


# ---- Acceptance cases


def test_c01_a_partial_list_leaves_the_rest_fitted(run, config):
    """C01: one part named; it is charged, the experts are fitted, the rest is said to stay on the CPU."""
    status, out, err = run(config, "--device", SMALL, "--place", "lmhead=0", "--json")
    device = json.loads(out)["devices"][0]
    assert status == 0
    assert 510_545_920 == device["placed_bytes"]
    assert device["placed_bytes"] + device["residents"] * 1_622_016 <= 6012954214 - 6012954214 // 16
    for name in ("dnproj", "dnout", "attnproj", "shexp"):
        assert any(f" {name} " in line and "the list does not name it" in line for line in err.splitlines())


def test_c02_a_model_that_fits_the_fast_card_stays_there_or_the_gain_is_printed(run, config):
    """C02: in bytes all is on the fast card; in time a split is printed beside what the fast card alone would take."""
    fast, slow = "Fast 32 GiB=32212254720", "Slow 10 GiB=10200547328"
    found = json.loads(run(config, "--device", fast, "--device", slow, "--json")[1])
    assert [0, 0] == [found["devices"][1]["placed_bytes"], found["residents"][1]]
    timed = ("--device", f"{fast}:1790", "--device", f"{slow}:760", "--cpu", "40")
    chosen, *others = json.loads(run(config, *timed, "--json")[1])["alternatives"]
    alone = next(other for other in others if other["devices"] == [0])
    if chosen["devices"] != [0]:
        assert f"{alone['label']} {alone['ms_per_token']:.2f} ms/token" in run(config, *timed)[2].splitlines()[0]


def test_c04_a_list_that_does_not_fit_says_where_how_much_and_what_to_change(run, config):
    """C04: exit 2, one line: device, part, bytes needed, bytes available, the reserve, and one change that fits."""
    status, out, err = run(config, "--device", "Small=1773MiB", "--place", "lmhead=0,dnproj=0,dnout=0,attnproj=0")
    assert (2, "") == (status, out)
    assert 1 == len(err.splitlines())
    for part in ("device 0 (Small)", "attnproj 7", "27,353,088 bytes", "reserve", "available", "would fit"):
        assert part in err, part


def test_c05_the_context_is_part_of_the_plan(run, config):
    """C05: keys and values grow where they lie; weights never grow; what cannot be held is refused."""
    grown = []
    for context in (4096, 32768, 131072, 262144):
        found = json.loads(run(config, "--device", SMALL, "--context", context, "--json")[1])
        host = {row["line"]: row["bytes"] for row in found["host"]}
        grown.append(
            (host[f"keys and values, {context:,} positions"], host["recurrent state, one sequence"], found["budgets"])
        )
    assert [20480 * n for n in (4096, 32768, 131072, 262144)] == [kv for kv, _, _ in grown]
    assert 1 == len({state for _, state, _ in grown})
    assert all(later[2] <= earlier[2] for earlier, later in pairwise(grown))
    status, _, err = run(config, "--device", SMALL, "--context", 262145)
    assert (2, 1) == (status, len(err.splitlines()))
    assert "the model was made for at most 262,144" in err


# ---- Flags and files


def test_device_name_may_hold_what_its_spec_holds():
    """The last '=' begins the spec; the reserve is the default one."""
    facts = parse_device("A=B: the card=1.5GiB:448.5:0")
    assert ("A=B: the card", 1610612736, 448.5, 0.0) == (facts.name, facts.free_bytes, facts.gb_s, facts.latency_us)
    assert 1610612736 // 16 == facts.reserve_bytes
    assert 40.0 == parse_device("a=1GiB:448:10:40").layer_us


@pytest.mark.parametrize(
    "spec",
    [
        "8GiB",
        "=8GiB",
        "a=",
        "a=8GX",
        "a=-1",
        "a=8GiB:",
        "a=8GiB:fast",
        "a=8GiB:0",
        "a=8GiB:1:2:3:4",
        "a=8GiB:1e3",
        "a=1:-4",
    ],
)
def test_device_that_is_not_one_is_one_line(run, config, spec):
    """A malformed --device is named, with the form."""
    status, _, err = run(config, "--device", spec)
    assert (2, 1) == (status, len(err.splitlines()))
    assert spec in err or "a: gb_s" in err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--cpu", "fast"), "--cpu: 'fast'"),
        (("--cpu", "0"), "the CPU: gb_s is 0"),
        (("--context", "0"), "--context"),
        (("--place", "dnprj=0"), "dnprj"),
        (("--place", "auto:time"), "auto:time needs the speed"),
        (("--vram", "1GiB"), "--vram"),
        (("--devices", "0"), "--devices"),
        (("--reprobe",), "--reprobe"),
    ],
)
def test_flag_that_cannot_be_is_one_line(run, config, args, named):
    """Exit 2, one line that names the flag."""
    status, _, err = run(config, "--device", SMALL, *args)
    assert (2, 1) == (status, len(err.splitlines()))
    assert named in err


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": "llama"}', "\x00"])
def test_config_that_is_none_is_one_line_with_its_name(run, tmp_path, content):
    """A file that is no model's config is named."""
    path = tmp_path / "some.json"
    path.write_text(content)
    status, _, err = run(path, "--device", SMALL)
    assert (2, 1) == (status, len(err.splitlines()))
    assert str(path) in err


def write_heat(path, **changes):
    counts = [[1000 if e < 8 else 1 for e in range(256)] for _ in range(40)]
    path.write_text(json.dumps({"layers": 40, "experts": 256, "top_k": 8, "counts": counts} | changes))
    return path


def test_heat_file_orders_the_experts(run, config, tmp_path):
    """With the eight that are always chosen, a small card gets nearly all hits."""
    heat = write_heat(tmp_path / "heat.json")
    out = [run(config, "--device", SMALL, "--json", *more)[1] for more in ((), ("--heat", heat))]
    cold, warm = (json.loads(text)["cpu_bytes_per_token"] for text in out)
    assert warm < cold / 3


@pytest.mark.parametrize(
    "content", [None, "{", '{"layers": 39}', '{"layers": 40, "experts": 256, "top_k": 8, "counts": []}']
)
def test_heat_named_by_hand_has_to_be_right_and_from_the_environment_is_warned_about(
    run, config, tmp_path, monkeypatch, content
):
    """By the flag: exit 2 and the file's name.  From the environment: one warning, and the plan as without heat."""
    path = tmp_path / "heat.json"
    if content is not None:
        path.write_text(content)
    status, out, err = run(config, "--device", SMALL, "--heat", path)
    assert (2, "", 1) == (status, out, len(err.splitlines()))
    assert "heat.json" in err
    monkeypatch.setenv("COLI_HEAT", str(path))
    status, out, err = run(config, "--device", SMALL, "--json")
    assert status == 0
    assert (content is not None) == ("warning" in err)
    monkeypatch.delenv("COLI_HEAT")
    assert out == run(config, "--device", SMALL, "--json")[1]


def test_place_comes_from_the_environment_and_a_flag_beats_it(run, config, monkeypatch):
    """COLI_PLACE is the same setting as --place."""
    monkeypatch.setenv("COLI_PLACE", "off")
    assert "off" == json.loads(run(config, "--device", SMALL, "--json")[1])["place"]
    assert "lmhead=0" == json.loads(run(config, "--device", SMALL, "--json", "--place", "lmhead=0")[1])["place"]


def test_plan_without_device_flags_plans_for_the_chosen_devices(run, config):
    """--devices and --vram as for run: what may be taken is what was allowed, the table says what is held back."""
    status, out, _ = run(config, "--devices", "fake:8MiB,fake:2MiB", "--vram", "3MiB", "--json")
    assert status == 0
    assert [3 << 20, 2 << 20] == [device["allowance_bytes"] for device in json.loads(out)["devices"]]
    nothing = json.loads(run(config, "--devices", "fake:8MiB", "--vram", "0", "--json")[1])
    assert [0] == nothing["budgets"]


def test_plan_needs_no_numpy_for_a_config(config):
    """Planning from described cards loads no arithmetic, no kernels and no GPU library."""
    code = (
        "import sys; from coli.cli.main import main; "
        f"status = main(['plan', {str(config)!r}, '--device', 'a=8GiB']); "
        "print(status, sorted({'torch', 'cuda', 'tokenizers', 'jinja2', 'pynvml'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "0 []"
