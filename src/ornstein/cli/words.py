"""Numbers as people read them."""

from __future__ import annotations


def of_bytes(count: float) -> str:
    """1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def of_count(count: int) -> str:
    """35.7 M parameters."""
    if count < 10_000:
        return f"{count:,} parameters"
    if count < 1_000_000:
        return f"{count / 1e3:.0f} k parameters"
    return f"{count / 1e6:.1f} M parameters"


def of_time(seconds: float) -> str:
    """3 min 20 s."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole / 86400:.1f} days"
