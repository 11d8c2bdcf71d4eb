"""Numbers as a person reads them; units stand beside, never guessed from the size of a number."""


def size(n_bytes: int | float) -> str:
    """Bytes in decimal units, as disks and downloads are sold."""
    value, units = float(n_bytes), ["TB", "GB", "MB", "kB", "B"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop()
    unit = units[-1]
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def ms(value: float | None) -> str:
    """Milliseconds with about three digits."""
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return (
        f"{value:.0f} ms"
        if value >= 100
        else f"{value:.1f} ms"
        if value >= 1
        else f"{value:.2f} ms"
    )


def rate(value: float | None) -> str:
    """Tokens per second."""
    if value is None:
        return "-"
    return f"{value:,.0f} tok/s" if value >= 100 else f"{value:.1f} tok/s"
