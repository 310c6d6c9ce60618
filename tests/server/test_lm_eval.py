"""lm-eval, its core package, on a task of this repository through /v1/completions.  Not a part of CI."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

PYTHON = os.environ.get("LM_EVAL_PYTHON", sys.executable)
ITEMS = (
    (
        "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of "
        "a",
        [" wife", " xylophone"],
    ),
    ("She was very", [" much", " of"]),
    ("The King of", [" the", " was"]),
    ("He said to his", [" father", " went"]),
)
TASK = """
task: coli_local
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.full
@pytest.mark.skipif(
    PYTHON == sys.executable and importlib.util.find_spec("lm_eval") is None,
    reason="lm-eval is not installed (LM_EVAL_PYTHON may name an interpreter that has it)",
)
def test_lm_eval_scores_are_those_of_the_model(demo, demo_model, tmp_path):
    """The share of choices that lm-eval finds right is the share that teacher-forced logits give."""
    lines = [json.dumps({"text": text, "choices": choices, "answer": 0}) for text, choices in ITEMS]
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    (tmp_path / "task.yaml").write_text(TASK.replace("ITEMS", str(tmp_path / "items.jsonl")))
    model = f"model=demo,base_url=http://127.0.0.1:{demo.port}/v1/completions,tokenizer_backend=remote,max_length=512"
    command = [PYTHON, "-m", "lm_eval", "--model", "local-completions", "--model_args", model, "--tasks", "coli_local",
               "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(results.read_text())["results"]["coli_local"]["acc,none"]

    def score(text: str, choice: str) -> float:
        ids = demo_model.tokenizer.encode(text + choice)
        start = len(demo_model.tokenizer.encode(text))
        logits = demo_model.logits(ids).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return sum(logits[i - 1, ids[i]] for i in range(start, len(ids)))

    right = [score(text, choices[0]) == max(score(text, choice) for choice in choices) for text, choices in ITEMS]
    assert found == sum(right) / len(right)
