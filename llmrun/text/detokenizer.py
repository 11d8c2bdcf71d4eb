"""Token ids of a running answer become text, one id at a time.

Constant work per id. Never half a character: an unfinished one is held until its last byte or
until it cannot become valid. The pieces joined equal ``tokenizer.decode`` of all ids.
"""

from llmrun.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer; hidden special ids give no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.text_stream()

    def push(self, token_id: int) -> str:
        """The text that this id completes, maybe empty."""
        if token_id in self._tokenizer.hidden_ids:
            return ""
        return self._stream.push(self._tokenizer.token_text(token_id))

    def flush(self) -> str:
        """What is left at the end of the answer."""
        return self._stream.flush()
