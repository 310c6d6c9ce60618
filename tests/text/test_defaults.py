"""Stop ids and sampling defaults from a checkpoint's JSON files."""

from __future__ import annotations

import json

import pytest
from scripted import CASES, TINY

from coli.errors import ModelError
from coli.text.defaults import sampling_defaults, stop_ids
from coli.text.tokenizer import Tokenizer


def test_c16_stop_ids_are_the_union_of_their_files():
    """C16: generation_config says 256, tokenizer_config says <|im_end|> (258): both end an answer."""
    folder = CASES / "tiny_eos_split"
    assert stop_ids(folder, Tokenizer.open(folder).token_id) == {256, 258}
    assert stop_ids(folder) == {256}


def test_stop_ids_are_read_from_the_text_config_too(tmp_path):
    """A multimodal config.json keeps its eos_token_id inside text_config."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [7], "text_config": {"eos_token_id": 9}}))
    assert stop_ids(tmp_path) == {7, 9}


def test_stop_ids_of_no_files_are_none(tmp_path):
    """A folder without any of the files stops at nothing, which is no error."""
    assert stop_ids(tmp_path) == frozenset()


@pytest.mark.parametrize("value", ["258", True, -1, [258, None], {"id": 258}, 1.5])
def test_stop_ids_of_another_kind_name_file_and_value(tmp_path, value):
    """An eos_token_id that is no id is refused with the file's name."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id holds"):
        stop_ids(tmp_path)


def test_stop_ids_of_a_damaged_file_name_it(tmp_path):
    """A file that is not JSON is refused by name."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(ModelError, match="generation_config.json"):
        stop_ids(tmp_path)


def test_sampling_defaults_come_from_generation_config(tmp_path):
    """Sampling is what the checkpoint was made for; do_sample false means greedy."""
    assert sampling_defaults(TINY) == {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
    assert sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7, "top_k": null}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.0}
    (tmp_path / "generation_config.json").write_text('{"top_p": "high"}')
    with pytest.raises(ModelError, match="top_p is 'high'"):
        sampling_defaults(tmp_path)
