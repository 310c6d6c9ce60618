"""coli/convert/resolve.py: what MODEL may be, and the cache of converted checkpoints."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import checkpoints
import pytest

from coli.container.reader import Container
from coli.convert import resolve
from coli.convert.resolve import convert_cached, find_model, resolve_model
from coli.errors import ModelError

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "coli"


def test_container_folder_is_itself(make_container):
    """A container needs no cache."""
    folder = make_container("tiny-random")
    assert resolve_model(str(folder)) == folder


def test_checkpoint_is_converted_once_and_then_found(tmp_path, cache, caplog, monkeypatch):
    """The second use reads the cache; path and bytes are said."""
    monkeypatch.setattr(logging.getLogger("coli"), "propagate", True)  # the command line turns it off
    src = checkpoints.write(tmp_path / "hf")
    caplog.set_level("INFO", "coli.load")
    first = resolve_model(str(src))
    assert first.parent == cache and first.name.startswith("hf-") and f"into the cache: {first}" in caplog.text
    with Container.open(first) as container:
        assert (container.manifest.trunk_format, container.manifest.expert_format) == ("i8_row", "i4_group")
    before = (first / "coli.json").stat().st_mtime_ns
    caplog.clear()
    assert resolve_model(str(src)) == first and (first / "coli.json").stat().st_mtime_ns == before
    assert f"using its container in the cache: {first}" in caplog.text


def test_checkpoint_that_changed_is_converted_anew(tmp_path):
    """Names, sizes and times are the key: a changed checkpoint never answers from the old container."""
    src = checkpoints.write(tmp_path / "hf")
    first = convert_cached(src)
    os.utime(src / "model-00001-of-00002.safetensors", (1, 1))
    second = convert_cached(src)
    (src / "tokenizer_config.json").write_text("{}")
    assert len({first, second, convert_cached(src)}) == 3


def test_two_processes_convert_once(tmp_path, cache):
    """The second waits for the first and takes its container."""
    src = checkpoints.write(tmp_path / "hf")
    code = (
        "import sys; from coli import log; log.configure(); from coli.convert.resolve import convert_cached; "
        "print(convert_cached(sys.argv[1]))"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(src)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][0] == outputs[1][0] and Path(outputs[0][0].strip()).parent == cache
    assert sum("converting" in errors and "once" in errors for _, errors in outputs) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere", "nowhere: no such folder, not the name of the demo model"),
        ("./no/where", "no such folder"),
        ("empty", r"neither a container \(coli.json\) nor a Hugging Face folder \(config.json\)"),
        ("file", "a file; MODEL is a folder"),
        ("broken", "an unfinished conversion; run the same coli convert again"),
        ("late", "not there, but .*late.partial is: finish that conversion"),
    ],
)
def test_name_that_is_no_model_says_what_was_tried(tmp_path, monkeypatch, name, expected):
    """Each kind of wrong name has its own line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for folder in ("broken", "late.partial"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / "journal.jsonl").write_text("{}\n")
    with pytest.raises(ModelError, match=expected):
        resolve_model(name)


def hub(monkeypatch, snapshot_download) -> None:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_hub_id_is_fetched_by_the_hub_s_own_client(tmp_path, monkeypatch):
    """Only the files that a conversion needs; the snapshot is then a Hugging Face folder like any other."""
    asked = {}
    snapshot = tmp_path / "hub" / "models--owner--some-model" / "snapshots" / "5f0c"

    def snapshot_download(repository, allow_patterns):
        asked[repository] = allow_patterns
        return str(checkpoints.write(snapshot))

    hub(monkeypatch, snapshot_download)
    assert find_model("owner/some-model") == snapshot
    assert "*.safetensors" in asked["owner/some-model"] and "*.bin" not in asked["owner/some-model"]
    converted = resolve_model("owner/some-model")  # named after the repository, not after a hash
    assert converted.name.startswith("owner--some-model-")


def test_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    """Offline, unknown, refused: the hub's reason in one line, whatever its client raises."""

    def snapshot_download(repository, allow_patterns):
        raise RuntimeError("no route\nto host")

    hub(monkeypatch, snapshot_download)
    with pytest.raises(
        ModelError, match="owner/x: no such folder, and the Hugging Face hub gave no model: no route to host"
    ):
        find_model("owner/x")


@pytest.mark.parametrize("name", ["models/qwen36.coli", "models/x", "nowhere/m.Coli", "a/b.safetensors", "a/b.partial"])
def test_name_that_looks_like_a_path_is_not_asked_of_the_hub(tmp_path, monkeypatch, name):
    """Its first folder is here, or it ends as files and containers do: a mistyped path, said at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    hub(monkeypatch, lambda repository, allow_patterns: pytest.fail("asked"))
    with pytest.raises(ModelError, match=f"^{name}: there is no such folder or file"):
        find_model(name)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("GatedRepoError", "403 Client Error. (Request ID: x) Cannot access gated repo", "its owner lets in those who"),
        ("RepositoryNotFoundError", "401 Client Error. (Request ID: x) Repository Not Found", "no model of that name"),
        ("LocalEntryNotFoundError", "Got: ConnectError: An error happened", "it cannot be reached from here"),
        ("Other", "Bad thing. Please check your internet connection and try again.", "Bad thing"),
        ("Other", "", "Other"),
        ("Other", "x" * 1000, "x" * 120),
    ],
)
def test_hub_error_is_one_clause(monkeypatch, kind, text, expected):
    """The hub's client writes paragraphs; what to do fits a line."""

    error = type(kind, (Exception,), {})

    def snapshot_download(repository, allow_patterns):
        raise error(text)

    hub(monkeypatch, snapshot_download)
    with pytest.raises(ModelError) as caught:
        find_model("owner/x")
    line = str(caught.value)
    assert line.startswith("owner/x: no such folder, and the Hugging Face hub gave no model: ")
    assert expected in line and len(line) < 200


def test_hub_id_without_the_client_says_how_to_get_it(monkeypatch):
    """The extra is optional."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install coli\[hub\]"):
        find_model("owner/x")


def test_demo_is_a_name_of_its_own(tmp_path, monkeypatch):
    """demo is the packaged model, also where a folder of that name lies about."""
    monkeypatch.chdir(tmp_path)
    checkpoints.write(tmp_path / "demo")
    packaged = tmp_path / "package" / "data" / "demo"
    monkeypatch.setattr(resolve.coli, "__file__", str(tmp_path / "package" / "__init__.py"))
    with pytest.raises(ModelError, match="the demo model is not part of this installation"):
        find_model("demo")
    packaged.mkdir(parents=True)
    (packaged / "coli.json").write_text("{}")
    assert find_model("demo") == packaged and find_model("./demo") == Path("demo")


def test_hub_that_may_not_be_asked_is_said_to_be_that(monkeypatch):
    """The client's own error speaks of a file that is not there; what is behind it is HF_HUB_OFFLINE."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE keeps it from being asked"):
        resolve.download("nobody/nothing")
