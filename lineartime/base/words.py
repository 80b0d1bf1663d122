"""Numbers as they are shown."""


def millions(n: float) -> str:
    """"112.1 M", or a small count in full."""
    return f"{n / 1e6:,.1f} M" if n >= 1e6 else f"{n:,.0f}"


def mib(n_bytes: float) -> str:
    """"1.5 MiB"."""
    return f"{n_bytes / 2**20:,.1f} MiB"
