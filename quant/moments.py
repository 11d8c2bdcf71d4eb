"""What a streamed run learns about the inputs of linears: second moments, summed over tokens.

``LayerMoments.observe`` is the observer of one layer's run; ``inputs`` then gives what quantizers
take (``quant.inputs``). Linears with one input (queries, keys and values; gate and up) share it.
Squares are summed in fp64, products of columns in fp32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from llmrun.errors import ModelFileError
from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.activations import first_bad
from llmrun.quant.arrays import floats
from llmrun.quant.inputs import FLOOR, WIDEST_BLOCK, Inputs

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_TOKENS = 256
"""Fewer tokens say too little of a linear's inputs: rare experts are taken as unknown."""

BATCH_TOKENS, BATCH_BYTES = 4096, 160 << 20
"""Inputs wait for so many before their products are summed, mostly until the layer has run: small
products cost several times more each, and the threads of the kernels, which have not gone to sleep
between two steps, are in their way."""

BORDER = 128
"""Borders between Gram blocks are multiples of it, the widest group of any scheme."""


def gram_blocks(width: int) -> list[range]:
    """The columns of each Gram block: near-equal parts, none over ``WIDEST_BLOCK``."""
    count = -(-width // WIDEST_BLOCK)
    step = -(-width // (count * BORDER)) * BORDER
    return [range(start, min(start + step, width)) for start in range(0, width, step)]


def gram_bytes(width: int) -> int:
    """Bytes of the Gram blocks of one linear's input."""
    return sum(4 * len(block) ** 2 for block in gram_blocks(width))


class Moments:
    """Sums over the inputs [K] of one linear, or of several that share them."""

    def __init__(self, width: int, *, gram: bool) -> None:
        import numpy as np

        self.tokens = 0
        self._squares: NDArray[np.float64] = np.zeros(width)
        self._waiting: list[NDArray[np.float32]] = []
        self._blocks = gram_blocks(width) if gram else []
        self._grams = [empty(DType.F32, (len(block), len(block))) for block in self._blocks]

    def add(self, x: HostArray) -> None:
        """Take inputs F32 [T, K] in; all finite."""
        import numpy as np

        rows = floats(x)
        self.tokens += len(rows)
        self._squares += np.square(rows, dtype=np.float64).sum(0)
        if self._blocks:
            self._waiting.append(rows.copy())
            count = sum(map(len, self._waiting))
            if count >= BATCH_TOKENS or count * rows.shape[1] * 4 >= BATCH_BYTES:
                self._multiply()

    def _multiply(self) -> None:
        import numpy as np

        if not self._waiting:
            return
        rows = np.concatenate(self._waiting)
        self._waiting = []
        for block, gram in zip(self._blocks, self._grams, strict=True):
            part = rows[:, block.start : block.stop]
            total = floats(gram)
            total += part.T @ part

    def inputs(self, least_tokens: int = LEAST_TOKENS) -> Inputs | None:
        """What was learned; None from too few tokens or where no input ever differed from 0.

        To be called once, at the end: the sums become means in place.
        """
        import numpy as np

        mean = float(self._squares.mean())
        if self.tokens < least_tokens or not 0 < mean < np.inf:
            return None
        importance = empty(DType.F32, self._squares.shape)
        floats(importance)[...] = np.maximum(self._squares / mean, FLOOR)
        self._multiply()
        for gram in self._grams:
            total = floats(gram)
            total /= np.float32(self.tokens)
        return Inputs(self.tokens, importance, tuple(self._grams) or None)


def unknown(width: int, tokens: int) -> Inputs:
    """The inputs of a linear of which nothing is known: every column counts the same."""
    importance = empty(DType.F32, (width,))
    floats(importance)[...] = 1
    return Inputs(tokens, importance)


class LayerMoments:
    """The moments of all linears of a layer that are seen in a run.

    ``gram(names)``: whether products of columns are summed for linears that share an input.
    """

    def __init__(
        self,
        gram: Callable[[Sequence[str]], bool] = lambda names: False,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        self._gram = gram
        self._least_tokens = least_tokens
        self._moments: dict[tuple[str, ...], tuple[int, Moments]] = {}

    def observe(self, names: Sequence[str], x: HostArray) -> None:
        """Take in F32 [T, K], the inputs of the linears called ``names``.

        ModelFileError that names them if a value is not finite.
        """
        bad = first_bad(x)
        if bad is not None:
            raise ModelFileError(
                f"the inputs of {', '.join(names)} are not finite (token {bad[0]}, column "
                f"{bad[1]}) when the model reads the calibration text",
                "the weights are damaged or the model does not work: try it with `llmrun run`; "
                "--calibrate none quantizes without reading a text",
            )
        key = tuple(names)
        if key not in self._moments:
            width = x.shape[1]
            self._moments[key] = width, Moments(width, gram=self._gram(names))
        self._moments[key][1].add(x)

    def inputs(
        self, widths: Mapping[str, int] | None = None
    ) -> tuple[Mapping[str, Inputs], list[str]]:
        """Inputs of each linear by name, and the names of those taken as unknown.

        ``widths``: [K] of every linear there is, so that experts no token went to are not left
        out. To be called once, at the end.
        """
        found: dict[str, Inputs] = {}
        listed: list[str] = []
        for names, (width, moments) in self._moments.items():
            inputs = moments.inputs(self._least_tokens)
            if inputs is None:
                inputs = unknown(width, moments.tokens)
                listed += names
            found |= dict.fromkeys(names, inputs)
        for name, width in (widths or {}).items():
            if name not in found:
                found[name] = unknown(width, 0)
                listed.append(name)
        return found, listed
