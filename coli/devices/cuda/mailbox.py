"""What a span and its host share: pinned memory for rows, lists, answers and choices, and the words that both watch.

The card raises ``asked`` once for every layer that may lack something; the host copies its answer and sets
``answered``.  Both count through all runs, so nothing is ever reset while the other side might look.
"""

from __future__ import annotations

import numpy as np

from coli.container.layout import round_up
from coli.devices.cuda.context import Context, Pinned

_ASKED, _ANSWERED, _ABORT, _LATE, _DONE = 0, 64, 128, 192, 256  # struct Mail of route.cu, then the flag of a run's end
_WORDS_BYTES = 320
_GROW_BYTES = 1 << 16


class Mailbox:
    """Pinned areas by name, as large as `reserve` has been asked for; ``generation`` counts their moves.

    n_unwritten : words of the logits that are as `Launcher.take_logits` wants them, from the first on.
    ask_at : device memory, struct Ask of route.cu.   count_at : device memory, the counter behind the end's flag.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.generation = 0
        self.n_unwritten = 0
        self._layers = self._rows = self._top_k = 0  # what the choices have room for
        self._areas: dict[str, Pinned] = {}
        self.ask_at = self.count_at = 0
        try:
            self._area("words", _WORDS_BYTES)
            self.ask_at = context.alloc(512, "a span's counters")
            self.count_at = self.ask_at + 256
            context.zero(self.ask_at, 512)
        except BaseException:
            self.close()
            raise

    # ---- room ----------------------------------------------------------------------------------------------

    def _area(self, name: str, n_bytes: int) -> None:
        held = self._areas.get(name)
        if held is not None and held.n_bytes >= n_bytes:
            return
        pinned = self.context.pin(-(-max(n_bytes, 64) // _GROW_BYTES) * _GROW_BYTES, f"a span's {name}")
        pinned.array[:] = 0
        if held is not None:
            self.context.unpin(held)
        self._areas[name] = pinned
        self.generation += 1
        if name == "logits":
            self.n_unwritten = 0

    def reserve(
        self, layers: int, rows: int, top_k: int, hidden: int, list_bytes: int, logits_bytes: int, asks: bool
    ) -> None:
        """Make room for a run of so many rows through so many layers.  Nothing may be under way."""
        if layers > self._layers or rows > self._rows or top_k > self._top_k:
            room = max(layers, self._layers), max(rows, self._rows), max(top_k, self._top_k)
            self._area("choices", 5 * room[0] * room[1] * room[2] + 4 * room[0] + 512)
            self._layers, self._rows, self._top_k = room  # only now: it may have failed
            self.generation += 1  # what lies where in them has changed
        self._area("x", rows * round_up(4 * hidden))
        self._area("x_out", rows * 4 * hidden)
        self._area("list", list_bytes)
        self._area("logits", logits_bytes)
        self.mark_logits(logits_bytes // 4)
        if asks:
            self._area("xn", rows * 4 * hidden)
            self._area("answers", rows * (top_k + 1) * 4 * hidden)

    def mark_logits(self, n: int) -> None:
        """Before a run that writes n logits: the host will see which of them are there.  Nothing may be under way."""
        if self.n_unwritten < n:
            self.context.launcher.unwritten(self.at("logits"), n)
            self.n_unwritten = n

    def at(self, name: str) -> int:
        """Address of an area; 0 where it was never needed."""
        held = self._areas.get(name)
        return held.address if held else 0

    def bytes_of(self, name: str) -> np.ndarray:
        """An area: uint8."""
        return self._areas[name].array

    def floats(self, name: str, rows: int, cols: int, first: int = 0) -> np.ndarray:
        """float32 (rows, cols) of an area, from its ``first``-th value on."""
        return self._areas[name].array[4 * first : 4 * (first + rows * cols)].view(np.float32).reshape(rows, cols)

    # ---- choices: top_idx, external, missing ------------------------------------------------------------------

    def _choice_offsets(self) -> tuple[int, int]:
        """Of missing and of external; top_idx is at 0."""
        n = self._layers * self._rows * self._top_k
        return round_up(4 * n), round_up(4 * n) + round_up(4 * self._layers)

    def choice_at(self, place: int, top_k: int) -> tuple[int, int, int]:
        """Where the card writes a layer's top_idx, external and missing."""
        missing, external = self._choice_offsets()
        at, n = self.at("choices"), place * self._rows * top_k
        return at + 4 * n, at + external + n, at + missing + 4 * place

    def choices(self, layers: int, rows: int, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Views: top_idx int32 and external uint8 (layers, rows, top_k), missing uint32 (layers)."""
        missing, external = self._choice_offsets()
        held, shape = self.bytes_of("choices"), (layers, self._rows, top_k)
        n = layers * self._rows * top_k
        return (
            held[: 4 * n].view(np.int32).reshape(shape)[:, :rows],
            held[external : external + n].reshape(shape)[:, :rows],
            held[missing : missing + 4 * layers].view(np.uint32),
        )

    # ---- words -------------------------------------------------------------------------------------------------

    @property
    def mail_at(self) -> int:
        """Address of struct Mail."""
        return self.at("words")

    @property
    def asked_at(self) -> int:
        """Address of the card's counter."""
        return self.at("words") + _ASKED

    @property
    def answered_at(self) -> int:
        """Address of the host's counter."""
        return self.at("words") + _ANSWERED

    @property
    def done_at(self) -> int:
        """Address of the counter that a run's end raises."""
        return self.at("words") + _DONE

    def word(self, offset: int) -> int:
        """One of the words as it is now."""
        return self.context.launcher.word(self.at("words") + offset)

    @property
    def asked(self) -> int:
        """How many layers have asked."""
        return self.word(_ASKED)

    @property
    def done(self) -> int:
        """How many runs have ended."""
        return self.word(_DONE)

    @property
    def late(self) -> bool:
        """The card has given up waiting."""
        return self.word(_LATE) != 0

    def abort(self, on: bool) -> None:
        """Tell the card not to wait any more; or, between two runs, that it may again."""
        self.context.launcher.say(self.at("words") + _ABORT, int(on))
        if not on:
            self.context.launcher.say(self.at("words") + _LATE, 0)

    def close(self) -> None:
        """Give everything back.  Nothing may be under way."""
        for pinned in self._areas.values():
            self.context.unpin(pinned)
        self._areas.clear()
        if self.ask_at:
            self.context.free(self.ask_at)
            self.ask_at = 0
