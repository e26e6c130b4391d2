"""The 17 distributions and the module that users of the reference import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gristmill import distribution
from gristmill.errors import UsageError

ROOT = Path(__file__).parents[2]

EXPECTED: dict[str, tuple[str, dict[str, int]]] = {
    "default": (
        "All available tools, all the time",
        {"web": 100, "vision": 100, "image_gen": 100, "terminal": 100, "file": 100, "browser": 100},
    ),
    "image_gen": (
        "Heavy focus on image generation with vision and web support",
        {"image_gen": 90, "vision": 90, "web": 55, "terminal": 45},
    ),
    "research": (
        "Web research with vision analysis and reasoning",
        {"web": 90, "browser": 70, "vision": 50, "terminal": 10},
    ),
    "science": (
        "Scientific research with web, terminal, file, and browser capabilities",
        {"web": 94, "terminal": 94, "file": 94, "vision": 65, "browser": 50, "image_gen": 15},
    ),
    "development": (
        "Terminal, file tools, and reasoning with occasional web lookup",
        {"terminal": 80, "file": 80, "web": 30, "vision": 10},
    ),
    "safe": ("All tools except terminal for safety", {"web": 80, "browser": 70, "vision": 60, "image_gen": 60}),
    "balanced": (
        "Equal probability of all toolsets",
        {"web": 50, "vision": 50, "image_gen": 50, "terminal": 50, "file": 50, "browser": 50},
    ),
    "minimal": ("Only web tools for basic research", {"web": 100}),
    "terminal_only": ("Terminal and file tools for code execution tasks", {"terminal": 100, "file": 100}),
    "terminal_web": (
        "Terminal and file tools with web search for documentation lookup",
        {"terminal": 100, "file": 100, "web": 100},
    ),
    "creative": ("Image generation and vision analysis focus", {"image_gen": 90, "vision": 90, "web": 30}),
    "reasoning": (
        "Heavy research/reasoning distribution with minimal other tools",
        {"web": 90, "file": 60, "terminal": 20},
    ),
    "browser_use": (
        "Full browser-based web interaction with search, vision, and page control",
        {"browser": 100, "web": 80, "vision": 70},
    ),
    "browser_only": ("Only browser automation tools for pure web interaction tasks", {"browser": 100}),
    "browser_tasks": (
        "Browser-focused distribution with web_search for finding URLs",
        {"browser+search": 97, "vision": 12, "terminal": 15},
    ),
    "terminal_tasks": (
        "Terminal-focused distribution with high terminal/file availability",
        {"terminal": 97, "file": 97, "web": 97, "browser": 75, "vision": 50, "image_gen": 10},
    ),
    "mixed_tasks": (
        "Mixed distribution with high browser, terminal, and file availability",
        {"browser": 92, "terminal": 92, "file": 92, "web": 35, "vision": 15, "image_gen": 15},
    ),
}


def test_the_built_in_distributions_are_exactly_these() -> None:
    expected = {name: {"description": text, "toolsets": chances} for name, (text, chances) in EXPECTED.items()}
    assert expected == distribution.DISTRIBUTIONS
    assert list(distribution.DISTRIBUTIONS) == list(EXPECTED)
    assert [list(item["toolsets"]) for item in distribution.DISTRIBUTIONS.values()] == [
        list(chances) for _, chances in EXPECTED.values()
    ]


def test_get_list_and_validate() -> None:
    assert distribution.get_distribution("minimal") == {
        "description": "Only web tools for basic research",
        "toolsets": {"web": 100},
    }
    assert distribution.get_distribution("nope") is None
    assert distribution.list_distributions() == distribution.DISTRIBUTIONS
    assert distribution.validate_distribution("science")
    assert not distribution.validate_distribution("nope")


def test_what_is_handed_out_is_a_copy() -> None:
    distribution.list_distributions()["minimal"]["toolsets"]["web"] = 1
    handed: Any = distribution.get_distribution("minimal")
    handed["toolsets"].clear()
    assert distribution.DISTRIBUTIONS["minimal"]["toolsets"] == {"web": 100}
    assert distribution.sample_toolsets_from_distribution("minimal") == ["web"]


def test_sampling_gives_a_list_of_single_names() -> None:
    assert distribution.sample_toolsets_from_distribution("terminal_only") == ["terminal", "file"]
    draws = [distribution.sample_toolsets_from_distribution("browser_tasks") for _ in range(100)]
    assert all(("browser" in drawn) == ("search" in drawn) for drawn in draws)
    assert any("browser" in drawn for drawn in draws)


@pytest.mark.parametrize("error", [ValueError, UsageError])
def test_an_unknown_name_is_refused_with_all_known_ones(error: type[Exception]) -> None:
    with pytest.raises(error, match="Unknown distribution: nope") as caught:
        distribution.sample_toolsets_from_distribution("nope")
    assert all(name in str(caught.value) for name in EXPECTED)


def test_the_root_module_works_without_an_installation(tmp_path: Path) -> None:
    code = (
        "import json, toolset_distributions as t\n"
        "t.print_distribution_info('research')\n"
        "print(json.dumps([dict(t.DISTRIBUTIONS), t.list_distributions(), t.get_distribution('safe'),"
        " t.validate_distribution('safe'), t.sample_toolsets_from_distribution('minimal'), sorted(t.__all__)]))"
    )
    # Isolated from the working directory and from environment variables; only the root is added, as for a script in it.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    shown, _, data = done.stdout.strip().rpartition("\n")
    assert shown == (
        "research\n"
        "  Web research with vision analysis and reasoning\n"
        "  web 90 %, browser 70 %, vision 50 %, terminal 10 %"
    )
    everything = json.loads(data)
    assert everything[0] == everything[1] == distribution.DISTRIBUTIONS
    assert everything[2]["toolsets"] == EXPECTED["safe"][1]
    assert everything[3:5] == [True, ["web"]]
    assert everything[5] == [
        "DISTRIBUTIONS",
        "get_distribution",
        "list_distributions",
        "print_distribution_info",
        "sample_toolsets_from_distribution",
        "validate_distribution",
    ]
