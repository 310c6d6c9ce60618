"""Every setting once: where its value comes from, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coli import settings
from coli.errors import RequestError

ROOT = Path(__file__).parent.parent


def test_flag_beats_environment_beats_default():
    """A flag wins over the variable, which wins over the default; the source says which it was."""
    environ = {"COLI_THREADS": "3"}
    assert settings.resolve("threads", "5", environ) == (5, "--threads")
    assert settings.resolve("threads", None, environ) == (3, "COLI_THREADS")
    assert settings.resolve("threads", None, {}) == ("auto", "default")
    assert settings.get("threads", 2, environ) == 2


def test_empty_variable_counts_as_unset():
    """VAR= in a shell is how people unset."""
    assert settings.resolve("place", None, {"COLI_PLACE": "  "}) == ("auto", "default")


def test_older_names_are_accepted_and_the_present_name_wins():
    """CUDA_EXPERT_GB counts GiB, COLI_GPUS lists devices, HEAT_FILE names the heat file; the new name beats the old."""
    assert settings.resolve("vram", None, {"CUDA_EXPERT_GB": "1.5"}) == (3 << 29, "CUDA_EXPERT_GB")
    assert settings.get("vram", None, {"CUDA_EXPERT_GB": "0"}) == "auto"
    assert settings.get("vram", None, {"CUDA_EXPERT_GB": "6", "COLI_VRAM": "1GiB"}) == 1 << 30
    assert settings.get("devices", None, {"COLI_GPUS": "0,2"}) == [0, 2]
    assert settings.get("heat", None, {"HEAT_FILE": "a", "COLI_HEAT": "b"}) == "b"
    assert settings.get("heat", None, {"HEAT_FILE": "a"}) == "a"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("6GiB", 6 << 30),
        ("6 gib", 6 << 30),
        ("1.5MiB", 3 << 19),
        ("2GB", 2 * 10**9),
        ("auto", "auto"),
        (1 << 20, 1 << 20),
        ("512B", 512),
    ],
)
def test_vram_reads_bytes_with_units(text, expected):
    """Binary and decimal units are different things."""
    assert settings.get("vram", text, {}) == expected


def test_devices_reads_words_and_lists():
    """Indexes are numbers, everything else a name; a list of objects is taken as it is."""
    assert settings.get("devices", "none", {}) == "none"
    assert settings.get("devices", "0, GPU-1f2e,fake:8GiB", {}) == [0, "GPU-1f2e", "fake:8GiB"]
    devices = [object()]
    assert settings.get("devices", devices, {}) is devices


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", "0"), ("threads", "-1"), ("threads", "two"), ("threads", "1.5"), ("context", "0"),
        ("context", "8k"),
        ("vram", "6 apples"), ("vram", "-1"), ("vram", "GiB"), ("devices", "0,,1"), ("isa", "sse9"), ("log", "loud"),
    ],
)  # fmt: skip
def test_bad_value_names_variable_value_and_what_is_accepted(name, value):
    """One line: the variable or flag, the value, what was expected."""
    setting = settings.BY_NAME[name]
    with pytest.raises(RequestError, match=re.escape(f"{setting.env[0]}='{value}' is not valid: expected ")) as caught:
        settings.get(name, None, {setting.env[0]: value})
    assert caught.value.param == name
    if setting.flag:
        with pytest.raises(RequestError, match=re.escape(f"{setting.flag}='{value}'")):
            settings.get(name, value, {})


@pytest.mark.parametrize("value", ["8", " 8 ", "0.5", "1048575", 8])
@pytest.mark.parametrize("name", ["vram", "prefix_cache"])
def test_memory_below_1_mib_without_a_unit_is_refused(name, value):
    """`--vram 8` meant 8 GiB: the message says what was read and what to write."""
    setting, bare = settings.BY_NAME[name], str(value).strip()
    for given, environ, source in ((value, {}, setting.flag), (None, {setting.env[0]: str(value)}, setting.env[0])):
        with pytest.raises(RequestError) as caught:
            settings.get(name, given, environ)
        assert str(caught.value).startswith(f"{source}={str(value)!r} is not valid: ")
        assert f"this is {bare} bytes; write {bare}GiB" in str(caught.value)


def test_message_calls_a_setting_as_the_user_did():
    """What was set by a flag is not blamed on the environment, nor an older variable's value on the present one."""
    message = "COLI_VRAM asks for 5 and COLI_PLACE='x' is none; COLI_VRAMS is another"
    said = settings.as_given(message, {"vram": "5GiB", "place": None, "model": "m"}, {"COLI_PLACE": "x"})
    assert said == "--vram asks for 5 and COLI_PLACE='x' is none; COLI_VRAMS is another"
    assert settings.as_given(message, {"vram": None}, {"CUDA_EXPERT_GB": "5"}).startswith("CUDA_EXPERT_GB asks for 5")


@pytest.mark.parametrize("value", ["-1", "six", "inf", "nan"])
def test_bad_older_value_names_the_older_variable(value):
    """The message names what the user wrote."""
    with pytest.raises(RequestError, match=f"CUDA_EXPERT_GB='{value}'"):
        settings.get("vram", None, {"CUDA_EXPERT_GB": value})


def test_unknown_variable_is_named_with_the_nearest_known_one():
    """A typo has no effect, and says so; other programs' variables are not ours to judge."""
    lines = list(settings.complaints({"COLI_THREAD": "3", "COLI_PLACE": "off", "OMP_NUM_THREADS": "1", "COLIBRI": "x"}))
    assert lines == ["COLI_THREAD is not a setting of coli and has no effect; the nearest is COLI_THREADS"]


def test_older_variable_beside_the_newer_is_named():
    """Nothing is accepted and then ignored."""
    lines = list(settings.complaints({"COLI_HEAT": "a", "HEAT_FILE": "b"}))
    assert lines == ["HEAT_FILE has no effect beside COLI_HEAT, which sets the same thing"]


def test_reference_page_is_up_to_date():
    """docs/settings.md is what `python -m coli.settings` prints."""
    assert (ROOT / "docs" / "settings.md").read_text() == settings.reference_page()


def test_every_variable_that_the_code_names_is_a_setting():
    """A COLI_ name anywhere in the package is in the table, so that the page has it and a user is not warned of it."""
    known = {variable for setting in settings.SETTINGS for variable in setting.env}
    for path in (ROOT / "coli").rglob("*.py"):
        named = set(re.findall(r"\bCOLI_[A-Z][A-Z_]*[A-Z]\b", path.read_text()))
        assert named <= known, f"{path}: {named - known}"


def test_names_and_variables_are_unique():
    """One setting, one place."""
    assert len(settings.BY_NAME) == len(settings.SETTINGS)
    variables = [variable for setting in settings.SETTINGS for variable in setting.env]
    assert len(set(variables)) == len(variables)
    assert all(setting.reason.endswith(".") for setting in settings.SETTINGS)
