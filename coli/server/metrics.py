"""What /metrics shows: counted here by request, read from scheduler and tier when somebody asks.

Names begin with ``coli_``; times in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_FIRST_TOKEN_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_NEXT_TOKEN_S = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
_COUNTED = {
    "prefill_passes": "passes over the weights for pieces of prompts",
    "decode_passes": "passes over the weights for next tokens, one for all running answers",
    "prompt_tokens": "tokens of prompts, reused ones too",
    "reused_tokens": "tokens of prompts that an earlier state held",
    "tokens": "sampled tokens",
    "finished": "jobs that came to their end",
    "cancelled": "jobs whose client left",
    "failed": "jobs that an error ended",
    "refused": "jobs turned away because the queue was full",
}


class Metrics:
    """The server's metrics.   scheduler, tier : give ``Scheduler.stats()`` and the tier's, or None."""

    def __init__(self, scheduler: Callable[[], dict[str, Any] | None], tier: Callable[[], dict[str, Any] | None]):
        self._registry = CollectorRegistry()
        self._registry.register(_Live(scheduler, tier))
        self.requests = Counter(
            "coli_requests", "answered HTTP requests", ("endpoint", "status"), registry=self._registry
        )
        self.first_token_s = Histogram(
            "coli_time_to_first_token_seconds", "from the queue to the first token", buckets=_FIRST_TOKEN_S,
            registry=self._registry,
        )  # fmt: skip
        self.next_token_s = Histogram(
            "coli_time_per_output_token_seconds", "mean of a request, behind its first token", buckets=_NEXT_TOKEN_S,
            registry=self._registry,
        )  # fmt: skip

    def render(self) -> bytes:
        """The text format, UTF-8."""
        return generate_latest(self._registry)


class _Live(Collector):
    def __init__(self, scheduler: Callable[[], dict[str, Any] | None], tier: Callable[[], dict[str, Any] | None]):
        self._scheduler = scheduler
        self._tier = tier

    def collect(self) -> Iterator[Metric]:
        stats = self._scheduler()
        if stats is not None:
            for name, text in _COUNTED.items():
                yield CounterMetricFamily(f"coli_{name}", text, value=stats[name])
            for name in ("slots", "running", "waiting"):
                yield GaugeMetricFamily(f"coli_{name}", f"answers or jobs: {name}", value=stats[name])
            for name in ("states", "bytes", "budget_bytes"):
                yield GaugeMetricFamily(
                    f"coli_prefix_{name}", f"kept prompt states: {name}", value=stats["prefixes"][name]
                )
        tier = self._tier()
        if tier is not None:
            for name in ("hits", "in_passing", "misses", "uploads", "swaps"):
                yield CounterMetricFamily(f"coli_experts_{name}", f"expert tier: {name}", value=tier[name])
            yield GaugeMetricFamily("coli_experts_resident", "experts on devices", value=tier["residents"])
