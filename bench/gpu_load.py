"""A model from files, in a process of its own for each row: how soon it answers, and what memory it keeps.

    python bench/gpu_load.py FOLDER [--vram 6768,all] [--tokens 64]

FOLDER is a container (``coli synth qwen36-35b FOLDER`` writes one with random weights); it is read once before the
first row, so that the page cache is warm.  The first row with a card measures card and CPU, into a cache folder that is
empty; the others find their figures there.  "Memory" is what the system counts as anonymous (RssAnon) and what the
driver has page-locked for coli, behind ``--tokens`` tokens: mapped weights are in neither.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from gpu_decode import MIB, row  # noqa: E402

from coli.devices.cuda.compile import cache_folder  # noqa: E402

PROMPT = 32

CHILD = """
import json, sys, time
from pathlib import Path

folder, place, devices, vram, n_prompt, n_tokens = sys.argv[1:]
pinned = {}
if devices != "none":
    from coli.devices.cuda.context import Context
    pin, unpin = Context.pin, Context.unpin
    def counted_pin(self, n_bytes, what):
        made = pin(self, n_bytes, what)
        pinned[made.address] = n_bytes
        return made
    def counted_unpin(self, made):
        pinned.pop(made.address, None)
        unpin(self, made)
    Context.pin, Context.unpin = counted_pin, counted_unpin

import coli
start = time.perf_counter()
with coli.load(folder, place=place, devices=devices, vram=vram, context=2048) as model:
    loaded_s = time.perf_counter() - start
    session = model.session()
    session.prefill(list(range(int(n_prompt))))
    first_s = time.perf_counter() - start
    for token in range(int(n_tokens)):
        session.step(token)
    words = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    found = [loaded_s, first_s, int(words["RssAnon"].split()[0]) * 1024, sum(pinned.values())]
print(json.dumps(found))
"""


def warm(folder: Path) -> None:
    """Every file of the folder into the page cache."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(64 << 20):
                    pass


def load(folder: Path, place: str, devices: str, vram: str, tokens: int, env: dict[str, str]) -> list[float]:
    """Seconds to the model and to its first token, bytes anonymous and page-locked: of a process of its own."""
    words = [str(folder), place, devices, vram, str(PROMPT), str(tokens)]
    done = subprocess.run([sys.executable, "-c", CHILD, *words], env=env, capture_output=True, text=True, check=False)
    for line in done.stderr.splitlines():
        print(f"    {line}", file=sys.stderr)
    if done.returncode:
        sys.exit(f"place={place} devices={devices} vram={vram} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vram", default="6768,all", help="MiB of the card, comma-separated")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(argv)
    warm(args.folder)
    sizes = args.vram.split(",")
    rows = [("off, no card opened", "off", "none", "auto")]
    for number, size in enumerate([sizes[0], *sizes]):
        what = f"auto, {'all that is free' if size == 'all' else size + ' MiB'}" + ", measuring first" * (number == 0)
        rows.append((what, "auto", "0", "auto" if size == "all" else f"{size}MiB"))
    rows.append(("off, card opened", "off", "0", "auto"))
    print(f"\n### From files, {args.folder.name}, {time.strftime('%Y-%m-%d')}\n")
    row("what", "loaded after, s", f"behind the first token of a {PROMPT}-token prompt, s",
        f"anonymous + page-locked MiB behind {args.tokens} tokens")  # fmt: skip
    row("---", *["---:"] * 3)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as folder:
        environments = []
        for cache in (first, folder):
            cache_folder().mkdir(parents=True, exist_ok=True)
            (Path(cache) / "coli").mkdir()
            (Path(cache) / "coli" / cache_folder().name).symlink_to(cache_folder())
            environments.append(os.environ | {"XDG_CACHE_HOME": cache, "PYTHONPATH": str(Path(__file__).parent.parent)})
        load(args.folder, "off", "0", "auto", 1, environments[0])  # compiles the kernels, where nobody has done so
        env = environments[1]
        for what, *words in rows:
            loaded_s, first_s, anonymous, pinned = load(args.folder, *words, args.tokens, env)
            row(what, f"{loaded_s:.1f}", f"{first_s:.1f}", f"{anonymous / MIB:.0f} + {pinned / MIB:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
