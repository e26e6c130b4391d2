"""The reference's module name for the toolset distributions; works in a checkout without an installation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from gristmill.distribution import (
    BUILTIN,
    DISTRIBUTIONS,
    find_distribution,
    get_distribution,
    list_distributions,
    render_distribution,
    sample_toolsets_from_distribution,
    validate_distribution,
)

__all__ = [
    "DISTRIBUTIONS",
    "get_distribution",
    "list_distributions",
    "print_distribution_info",
    "sample_toolsets_from_distribution",
    "validate_distribution",
]


def print_distribution_info(distribution_name: str) -> None:
    """Print a built-in distribution. Raises `gristmill.distribution.UnknownDistribution`."""
    print(render_distribution(find_distribution(BUILTIN, distribution_name)))


if __name__ == "__main__":
    for name in sorted(DISTRIBUTIONS):
        print_distribution_info(name)
        print()
