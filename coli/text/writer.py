"""The text of one answer: ids in, text that may be shown out.

Joins the streaming decoder and the stop strings, so that whoever drives the model sees one object.
"""

from __future__ import annotations

from collections.abc import Sequence

from coli.text.stops import StopStrings
from coli.text.tokenizer import Tokenizer


class TextWriter:
    """Decodes an answer's ids and cuts it at the first stop string.

    stopped : whether a stop string was completed; nothing comes out any more.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        return self._stops.hit is not None

    def feed(self, token_id: int) -> str:
        """The text that this token makes certain; often empty, sometimes more than the token's own."""
        return self._stops.feed(self._detokenizer.feed(token_id))

    def finish(self) -> str:
        """The rest of the text once no token follows."""
        return self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
