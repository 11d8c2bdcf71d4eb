"""A dictionary that keeps what was used last."""

from llmrun.kernels.cpu.recent import Recent


def test_the_one_not_used_for_longest_goes() -> None:
    held: Recent[str, int] = Recent(2)
    held["a"], held["b"] = 1, 2
    assert held.use("a") == 1
    held["c"] = 3
    assert dict(held) == {"a": 1, "c": 3}
    assert held.use("b") is None
    assert held.use("c") == 3
    held["d"] = 4
    assert dict(held) == {"c": 3, "d": 4}
