"""How counts, money, times and long texts are written."""

from __future__ import annotations


def cut(text: str, width: int) -> str:
    """One line of at most `width` characters; 0 is no limit."""
    line = " ".join(text.split())
    return line if not width or len(line) <= width else line[: max(width - 1, 0)] + "…"


def short(number: int) -> str:
    """A count in three figures: 950, 12.3K, 4.56M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def money(dollars: float, known: bool) -> str:
    """Dollars, with what is not known said: `$0.12`, `≥ $0.12`, `unknown`."""
    amount = f"${dollars:.4f}" if 0 < dollars < 1 else f"${dollars:.2f}"
    if known:
        return amount
    return f"≥ {amount}" if dollars else "unknown"


def clock_time(seconds: float) -> str:
    """Seconds as `M:SS` or `H:MM:SS`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(part: float, whole: float) -> str:
    """A share with one decimal; 0.0% of nothing."""
    return f"{100 * part / whole if whole else 0.0:.1f}%"
