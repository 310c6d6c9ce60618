"""coli beside llama.cpp: the same geometry, random weights, alternated in one run, one process at a time.

    pip install 'coli[bench]' && python bench/peer_llama_cpp.py [--geometry small8] [--json]

Experts are Q4_0 there and int4 in groups of 128 here, everything else Q8_0 there and int8 rows here.  Both get the
same number of threads.  Each turn is a fresh process that loads, warms up, and reports medians; turns alternate, and
the table shows the median of the turns and the bytes that each engine reads for a token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

DECODE_TOKENS = 48
REPEATS = 3

COLI = """
import json, sys, time, numpy as np
from statistics import median
import coli
path, prompt, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ids = [int(i) for i in np.random.default_rng(0).integers(1, 32000, prompt)]
with coli.load(path, threads=threads, devices="none") as model:
    prefill, decode = [], []
    for turn in range({repeats} + 1):
        session = model.session()
        start = time.perf_counter(); session.prefill(ids); prefill.append(time.perf_counter() - start)
        for i in range({decode}):
            start = time.perf_counter(); session.step(i + 5); decode.append(time.perf_counter() - start)
    before = model.stats()["weight_bytes_read"]
    session.step(3)
    n_bytes = model.stats()["weight_bytes_read"] - before
    print(json.dumps(dict(prefill=prompt / median(prefill[1:]), decode=1 / median(decode[{decode}:]), n_bytes=n_bytes,
                          detail=model.stats()["isa"])))
"""

LLAMA = """
import json, sys, time, numpy as np
from statistics import median
import llama_cpp
path, prompt, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ids = [int(i) for i in np.random.default_rng(0).integers(1, 32000, prompt)]
llm = llama_cpp.Llama(path, n_ctx=prompt + 2 * {decode}, n_threads=threads, n_threads_batch=threads,
                      n_batch=max(prompt, 512), n_ubatch=max(prompt, 512), verbose=False)
prefill, decode = [], []
for turn in range({repeats} + 1):
    llm.reset()
    start = time.perf_counter(); llm.eval(ids); prefill.append(time.perf_counter() - start)
    for i in range({decode}):
        start = time.perf_counter(); llm.eval([i + 5]); decode.append(time.perf_counter() - start)
print(json.dumps(dict(prefill=prompt / median(prefill[1:]), decode=1 / median(decode[{decode}:]), n_bytes=None,
                      detail=llama_cpp.__version__)))
"""


def turn(python: str, code: str, path: Path, prompt: int, threads: int) -> dict:
    """One process: load, warm up, measure."""
    code = code.format(decode=DECODE_TOKENS, repeats=REPEATS)
    done = subprocess.run(
        [python, "-c", code, str(path), str(prompt), str(threads)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{path}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def llama_bytes(weights) -> int:
    """Bytes that llama.cpp reads for a token: Q8_0 is 34 bytes for 32 weights, Q4_0 18, the router float32."""
    c = weights.config
    trunk = c.vocab_size * c.hidden_size
    router = experts = 0
    for kind in c.layer_types:
        if kind == "full_attention":
            q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
            trunk += c.hidden_size * (2 * q + 2 * kv) + q * c.hidden_size
        else:
            v = c.linear_num_value_heads * c.linear_value_head_dim
            trunk += c.hidden_size * (c.conv_channels + v) + v * c.hidden_size
        trunk += 3 * c.hidden_size * c.shared_expert_intermediate_size
        router += c.num_experts * c.hidden_size
        experts += c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size
    return trunk * 34 // 32 + experts * 18 // 32 + router * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="small8")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: as coli chooses")
    parser.add_argument("--skew", type=float, default=0.8)
    parser.add_argument("--models", type=Path, help="keep the two models in this folder, or find them there")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    from coli.convert.synth_files import write_gguf, write_synthetic
    from coli.convert.synthetic import Synthetic, geometry
    from coli.threads.claims import claim_threads

    if not args.threads:
        claim = claim_threads()
        args.threads = claim.binding.threads
        claim.release()
    weights = Synthetic(geometry(args.geometry), skew=args.skew)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.models or Path(scratch)
        ours, theirs = folder / f"{args.geometry}.coli", folder / f"{args.geometry}.gguf"
        if not ours.exists():
            write_synthetic(weights, args.geometry, ours)
        if not theirs.exists():
            write_gguf(weights, theirs)
        engines = {"coli": (sys.executable, COLI, ours), "llama.cpp": (args.llama_python, LLAMA, theirs)}
        turns: dict[str, list[dict]] = {name: [] for name in engines}
        for _ in range(args.turns):
            for name, (python, code, path) in engines.items():
                turns[name].append(turn(python, code, path, args.prompt, args.threads))
    result = {
        name: {
            "prefill_tok_s": median(t["prefill"] for t in rows),
            "decode_tok_s": median(t["decode"] for t in rows),
            "bytes_per_token": rows[0]["n_bytes"] or llama_bytes(weights),
            "detail": rows[0]["detail"],
            "turns": rows,
        }
        for name, rows in turns.items()
    }
    ratios = {
        key: result["coli"][key] / result["llama.cpp"][key] for key in ("prefill_tok_s", "decode_tok_s")
    }
    if args.json:
        print(json.dumps({"geometry": args.geometry, "threads": args.threads, **result, "ratios": ratios}, indent=1))
        return
    print(f"{args.geometry}, {args.threads} threads, prompt of {args.prompt}, median of {args.turns} alternating turns")
    print(f"{'':<10} {'prefill tok/s':>14} {'decode tok/s':>13} {'MB a token':>11} {'GB/s':>6}")
    for name, row in result.items():
        gb_s = row["bytes_per_token"] * row["decode_tok_s"] / 1e9
        print(
            f"{name:<10} {row['prefill_tok_s']:>14.1f} {row['decode_tok_s']:>13.1f} "
            f"{row['bytes_per_token'] / 1e6:>11.1f} {gb_s:>6.1f}   {row['detail']}"
        )
    print(f"{'ratio':<10} {ratios['prefill_tok_s']:>14.2f} {ratios['decode_tok_s']:>13.2f}")


if __name__ == "__main__":
    main()
