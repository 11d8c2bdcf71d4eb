"""Numbers as they are shown."""

import pytest

from llmrun.cli.units import ms, rate, size


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_990, "9.99 kB"),
        (9_999, "10.0 kB"),
        (99_990, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (98_362_432, "98.4 MB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_sizes(n_bytes: int, shown: str) -> None:
    assert size(n_bytes) == shown


def test_times_and_rates() -> None:
    assert [ms(value) for value in (None, 0.123, 1.25, 99.96, 123.4, 12_345.0)] == [
        "-", "0.12 ms", "1.2 ms", "100.0 ms", "123 ms", "12.3 s",
    ]  # fmt: skip
    assert [rate(value) for value in (None, 8.14, 4102.4)] == ["-", "8.1 tok/s", "4,102 tok/s"]
