"""Second moments of inputs against float64, and what becomes of those nobody can trust."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.errors import ModelFileError
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.arrays import floats
from llmrun.quant.inputs import FLOOR, WIDEST_BLOCK
from llmrun.quant.moments import BATCH_TOKENS, LayerMoments, gram_blocks, gram_bytes

Values = NDArray[np.float32]


def host(values: Values) -> HostArray:
    data = np.ascontiguousarray(values, np.float32).tobytes()
    return HostArray(DType.F32, values.shape, memoryview(bytearray(data)))


def inputs(n_tokens: int, width: int, seed: int = 0) -> Values:
    """Values whose columns differ in size by orders of magnitude, as those of models do."""
    generator = np.random.default_rng(seed)
    sizes = np.exp(generator.normal(size=width) * 2)
    return (generator.normal(size=(n_tokens, width)) * sizes).astype(np.float32)


def test_importance_and_gram_are_means_over_all_tokens() -> None:
    x = inputs(BATCH_TOKENS + 700, 320)
    layer = LayerMoments(gram=lambda names: True)
    for start in range(0, len(x), 250):
        layer.observe(["q", "k"], host(x[start : start + 250]))
    found, listed = layer.inputs()
    assert listed == []
    assert found["q"] is found["k"]
    assert found["q"].tokens == len(x)
    squares = np.square(x.astype(np.float64)).mean(0)
    wanted = np.maximum(squares / squares.mean(), FLOOR)
    np.testing.assert_allclose(floats(found["q"].importance), wanted, rtol=1e-6)
    assert found["q"].gram is not None
    (gram,) = found["q"].gram
    wide = x.astype(np.float64)
    exact = wide.T @ wide / len(x)
    size = np.sqrt(np.outer(squares, squares))
    assert np.abs((floats(gram) - exact) / size).max() < 1e-5


def test_gram_comes_in_blocks_along_the_diagonal() -> None:
    width = 2 * WIDEST_BLOCK + 64
    x = inputs(300, width)
    layer = LayerMoments(gram=lambda names: True)
    layer.observe(["down"], host(x))
    found, _ = layer.inputs()
    blocks = gram_blocks(width)
    grams = found["down"].gram
    assert grams is not None
    assert [len(block) for block in blocks] == [gram.shape[0] for gram in grams]
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
    assert blocks[-1].stop == width
    assert all(len(block) <= WIDEST_BLOCK and block.start % 128 == 0 for block in blocks)
    assert gram_bytes(width) == sum(gram.nbytes for gram in grams)
    part = x[:, blocks[1].start : blocks[1].stop].astype(np.float64)
    exact = part.T @ part / len(x)
    np.testing.assert_allclose(floats(grams[1]), exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("width", [32, 576, 2048, 2176, 8960, 14336])
def test_blocks_cover_every_width(width: int) -> None:
    columns = [column for block in gram_blocks(width) for column in block]
    assert columns == list(range(width))


def test_q09_inputs_that_say_nothing_count_the_same_and_are_listed() -> None:
    layer = LayerMoments(gram=lambda names: True)
    layer.observe(["rare"], host(inputs(255, 64)))
    layer.observe(["dead"], host(np.zeros((512, 64), np.float32)))
    layer.observe(["known"], host(inputs(256, 64)))
    found, listed = layer.inputs({"known": 64, "never": 96})
    assert listed == ["rare", "dead", "never"]
    for name in listed:
        assert found[name].gram is None
        assert set(floats(found[name].importance).tolist()) == {1.0}
    assert found["never"].importance.shape == (96,)
    assert found["known"].gram is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_q10_an_activation_that_is_not_finite_aborts_and_is_named(bad: float) -> None:
    x = inputs(4, 8)
    x[2, 5] = bad
    with pytest.raises(ModelFileError, match=r"layers\.3\.mlp\.down_proj.*token 2, column 5"):
        LayerMoments().observe(["model.layers.3.mlp.down_proj.weight"], host(x))
