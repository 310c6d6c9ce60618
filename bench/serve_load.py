"""Load on a server of its own: mixed requests with random disconnects, and what eight streams gain over one.

    python bench/serve_load.py MODEL [--seconds 180] [--clients 12] [--threads N]   mixed load; needs a tokenizer
    python bench/serve_load.py MODEL --speed [--tokens 128]                         tok/s of 1 and of 8 streams

The load holds three things: every answer that is not cut off equals the one that the same request got alone; at the end
no slot is taken and nothing waits; resident memory, once the kept states have filled their budget, stays within 2 %.
Exit status 1 where one of them does not hold.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import psutil

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RSS_TOLERANCE = 0.02
PREFIX_BYTES = 64 << 20  # small, so that the budget is full long before the measurement
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


class Server:
    """``coli serve`` as a process; ``url`` is a (host, port)."""

    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "coli", "serve", model, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.errors: list[str] = []
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if "http://127.0.0.1:" in line:
                self.port = int(line.partition("http://127.0.0.1:")[2].split(",")[0])
            if "is ready" in line:
                break
        else:
            raise SystemExit(f"the server did not start:\n{''.join(said)}")
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read_errors(self) -> None:
        for line in self.process.stderr:  # type: ignore[union-attr]
            if "error:" in line or "warning:" in line:
                self.errors.append(line.rstrip())

    def rss_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def stats(self) -> dict[str, Any]:
        return self.request("GET", "/coli/stats")[1]["server"]

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def stream(self, path: str, body: Any, stop_after: int | None = None) -> list[dict[str, Any]] | None:
        """A stream's chunks; None where the connection was closed after ``stop_after`` lines."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            if stop_after == 0:
                return None
            response = connection.getresponse()
            if response.status != 200:
                return [{"status": response.status}]
            chunks = []
            for line in response:
                if line.startswith(b"data: {"):
                    chunks.append(json.loads(line[6:]))
                if stop_after is not None and len(chunks) >= stop_after:
                    return None
            return chunks
        finally:
            connection.close()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def requests(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Some of everything, each with an answer that is a function of the request."""
    words = "the iron went out of the yard and the ledger was closed by the clerk before noon".split()

    def text(n: int) -> str:
        return " ".join(rng.choice(words) for _ in range(n))

    made: list[tuple[str, dict[str, Any]]] = []
    for i in range(8):
        user = [{"role": "user", "content": text(rng.randint(3, 30))}]
        long = [{"role": "user", "content": text(rng.randint(200, 900))}]
        made += [
            (CHAT, {"messages": user, "max_tokens": rng.randint(5, 120), "temperature": 0}),
            (CHAT, {"messages": user, "max_tokens": 60, "temperature": 1.1, "top_p": 0.95, "seed": i}),
            (CHAT, {"messages": long, "max_tokens": 30, "temperature": 0, "logprobs": True, "top_logprobs": 2}),
            (CHAT, {"messages": [*long, {"role": "assistant", "content": "Well."}, *user], "max_tokens": 20,
                    "temperature": 0}),
            (CHAT, {"messages": user, "max_tokens": 25, "n": 3, "temperature": 0.9, "seed": 100 + i}),
            (CHAT, {"messages": user, "max_tokens": 200, "temperature": 0.7, "seed": i, "enable_thinking": False,
                    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
            (CHAT, {"messages": user, "max_tokens": 200, "temperature": 0, "tools": [TOOL], "tool_choice": "required",
                    "enable_thinking": False, "parallel_tool_calls": False}),
            (TEXT, {"prompt": text(40), "max_tokens": 40, "temperature": 0, "stop": ["the"]}),
            (TEXT, {"prompt": [text(20), text(50)], "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1}),
        ]  # fmt: skip
    return made


def essence(path: str, choices: list[dict[str, Any]]) -> Any:
    """What must be equal: texts, calls without their random ids, log-probabilities, reasons."""
    found = []
    for choice in choices:
        message = choice.get("message", {})
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        texts = (
            [message.get(key) or None for key in ("content", "reasoning_content")] if path == CHAT else choice["text"]
        )
        found.append((choice["index"], texts, calls, choice["finish_reason"], json.dumps(choice["logprobs"])))
    return found


def joined(path: str, chunks: list[dict[str, Any]], n: int) -> Any:
    """A stream's chunks as whole choices, log-probabilities left out."""
    found: list[dict[str, Any]] = [
        {"index": i, "text": "", "finish_reason": None, "logprobs": None,
         "message": {"content": "", "reasoning_content": "", "tool_calls": []}}
        for i in range(n)
    ]  # fmt: skip
    for chunk in chunks:
        for part in chunk.get("choices", ()):
            choice = found[part["index"]]
            choice["text"] += part.get("text", "")
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
            delta = part.get("delta", {})
            for key in ("content", "reasoning_content"):
                choice["message"][key] += delta.get(key) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    choice["message"]["tool_calls"].append({"function": dict(call["function"])})
                else:
                    function = choice["message"]["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    return found


def without_logprobs(found: Any) -> Any:
    return [entry[:4] for entry in found]


def load(args: argparse.Namespace) -> int:
    rng = random.Random(args.seed)
    pool = requests(rng)
    server = Server(
        args.model, *_flags(args), "--prefix-cache", str(PREFIX_BYTES), "--prefix-every", "128", "--queue", "1000"
    )
    try:
        print(f"{len(pool)} requests alone", flush=True)
        alone = []
        for path, body in pool:
            status, answer = server.request("POST", path, body)
            assert status == 200, answer
            alone.append(essence(path, answer["choices"]))
        counts: Counter[str] = Counter()
        wrong: list[str] = []
        end = time.monotonic() + args.seconds

        def client(number: int) -> None:
            mine = random.Random(1000 * args.seed + number)
            while time.monotonic() < end:
                i = mine.randrange(len(pool))
                path, body = pool[i]
                kind = mine.choice(("whole", "stream", "stream", "leave", "bad"))
                if kind == "bad":
                    status, _ = server.request("POST", path, {**body, "temperature": "hot"})
                    same = status == 400
                elif kind == "whole":
                    status, answer = server.request("POST", path, body)
                    same = status == 200 and essence(path, answer["choices"]) == alone[i]
                else:
                    leave = mine.choice((0, 1, 2, 5, 10)) if kind == "leave" else None
                    chunks = server.stream(path, body, leave)
                    same = chunks is None or without_logprobs(
                        essence(path, joined(path, chunks, len(alone[i])))
                    ) == without_logprobs(alone[i])
                counts[kind] += 1
                if not same:
                    wrong.append(f"{kind} {path} {json.dumps(body)[:200]}")

        threads = [threading.Thread(target=client, args=(number,)) for number in range(args.clients)]
        for thread in threads:
            thread.start()
        warm_s = args.seconds / 4
        begin, samples = time.monotonic(), []
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            samples.append((time.monotonic() - begin, server.rss_bytes()))
        deadline = time.monotonic() + 5
        while (stats := server.stats())["running"] + stats["waiting"] and time.monotonic() < deadline:
            time.sleep(0.1)
        warm = [rss for at, rss in samples if at >= warm_s]
        half = len(warm) // 2
        before, after = statistics.median(warm[:half]), statistics.median(warm[half:])
        growth = after / before - 1
        print(f"requests {dict(counts)}; tokens {stats['tokens']} in {stats['decode_passes']} decode passes; "
              f"cancelled {stats['cancelled']}; {stats['reused_tokens']} of {stats['prompt_tokens']} reused")
        rss = f"{before / 2**20:.1f} -> {after / 2**20:.1f} MiB ({100 * growth:+.2f} %)"
        print(f"RSS {rss}, prefixes {stats['prefixes']}")
        failures = [f"answer differs: {what}" for what in wrong[:5]]
        if stats["running"] or stats["waiting"]:
            failures.append(f"stuck: {stats['running']} running, {stats['waiting']} waiting")
        if abs(growth) > RSS_TOLERANCE:
            failures.append(f"RSS moved by {100 * growth:.2f} %")
        failures += server.errors[:5]
        print("\n".join(failures) or "all hold")
        return 1 if failures else 0
    finally:
        server.end()


def speed(args: argparse.Namespace) -> int:
    """Speed of 1 and of 8 streams, alternated; the median of the runs of each.

    Tokens a CPU second tell the same where other work disturbs the machine, with one thread, which waits for no other.
    """
    server = Server(args.model, *_flags(args), "--prefix-cache", "0")
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(100, 1000) for _ in range(16)] for _ in range(8)]

    def run(streams: int) -> tuple[float, float]:
        def one(prompt: list[int]) -> None:
            bias = {"temperature": 0, "max_tokens": args.tokens}
            status, answer = server.request("POST", TEXT, {"prompt": prompt, **bias})
            assert status == 200, answer
            counted.append(answer["usage"]["completion_tokens"])

        counted: list[int] = []
        threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts[:streams]]
        begin, cpu_s = time.perf_counter(), server.cpu_s()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counted) / (time.perf_counter() - begin), sum(counted) / (server.cpu_s() - cpu_s)

    try:
        run(8)
        pairs = [(run(1), run(8)) for _ in range(args.runs)]
        for i, unit in enumerate(("tok/s", "tokens a CPU second")):
            one, eight = (statistics.median(pair[j][i] for pair in pairs) for j in (0, 1))
            by_run = ", ".join(f"{b[i] / a[i]:.2f}" for a, b in pairs)
            print(f"1 stream {one:.1f} {unit}, 8 streams {eight:.1f}: {eight / one:.2f} times (by run {by_run})")
        return 0
    finally:
        server.end()


def _flags(args: argparse.Namespace) -> list[str]:
    return ["--threads", str(args.threads)] if args.threads else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    raise SystemExit(speed(chosen) if chosen.speed else load(chosen))
