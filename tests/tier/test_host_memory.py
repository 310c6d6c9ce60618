"""A component that lies on a device has no copy in the host's memory: its fallback is the mapped container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coli.convert.synth_files import write_synthetic
from coli.convert.synthetic import Synthetic, geometry

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here to read RssAnon from")

# 4 layers of half the real width: 113 MB that a card can take
GEOMETRY = geometry("qwen36-35b") | {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_experts": 16, "vocab_size": 8192, "moe_intermediate_size": 256,
}  # fmt: skip

# RssAnon behind 64 tokens, less what the fake card, itself anonymous memory, has been given
CHILD = """
import json, sys
from pathlib import Path
import coli
from coli.devices.fake import FakeDevice

class Counted(FakeDevice):
    taken = 0
    def upload(self, matrix):
        self.taken += matrix.data.size
        return super().upload(matrix)
    def upload_slab(self, name, slab, data):
        self.taken += data.size
        return super().upload_slab(name, slab, data)

card = Counted(1 << 30)
with coli.load(sys.argv[1], devices=[card], place=sys.argv[2], vram=sys.argv[3], threads=1, context=512) as model:
    session = model.session()
    session.prefill(list(range(32)))
    for token in range(32):
        session.step(token)
    stats = model.stats()
    words = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    slots = stats["tier"]["bytes"]["devices"][0] if stats["tier"] else 0
    on_card = card.taken + slots + card._beside_bytes
print(json.dumps([int(words["RssAnon"].split()[0]) * 1024 - on_card, on_card, stats["fallen"]]))
"""


def test_placed_components_keep_no_host_copy(tmp_path):
    """Everything on the card leaves the host with what it has without one, but for the books of the tier: a
    quarter of what a copy of the components would take."""
    write_synthetic(Synthetic(GEOMETRY), "half", tmp_path / "model")

    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}

    def run(place: str, vram: str) -> tuple[int, int]:
        command = [sys.executable, "-c", CHILD, str(tmp_path / "model"), place, vram]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        anonymous, on_card, fallen = json.loads(done.stdout)
        assert [] == fallen
        return anonymous, on_card

    without, nothing = run("off", "0")
    beside, on_card = run("auto", "auto")
    assert nothing == 0 and on_card > 100e6
    assert beside <= without + 28e6, f"{beside / 1e6:.1f} MB beside a card, {without / 1e6:.1f} MB without"
