"""Playwright's accessibility snapshots, rewritten for a model."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tools.browsing.snapshot import COMPACT_LIMIT, INTERACTIVE, Refs, render

PAGE = """\
- generic [active] [ref=e1]:
  - navigation [ref=e2]:
    - list [ref=e3]:
      - listitem [ref=e4]:
        - link "Home" [ref=e5] [cursor=pointer]:
          - /url: /a
  - heading "Hello" [level=1] [ref=e8]
  - paragraph [ref=e9]:
    - text: "Some: text"
    - 'link "link \\"quoted\\": it''s" [ref=e11] [cursor=pointer]':
      - /url: x
  - checkbox "Agree" [checked] [ref=e16]
  - combobox "Color" [ref=e17]:
    - option "red"
    - option "blue" [selected]
  - textbox "Say [ref=e99]" [ref=e18]: x y
  - generic [ref=e30] [cursor=pointer]: clickable
  - iframe [ref=e32]:
    - generic [ref=f1e1]:
      - button "In frame" [ref=f1e2]
      - paragraph [ref=f1e3]: ft
  - table "T" [ref=e40]:
    - rowgroup [ref=e41]:
      - row [ref=e42]:
        - cell "1" [ref=e43]
        - cell [ref=e44]"""

COMPACT = """\
- navigation:
  - link @e1 "Home"
- heading "Hello" [level=1]
- text: "Some: text"
- link @e2 "link \\"quoted\\": it's"
- checkbox @e3 "Agree" [checked]
- combobox @e4 "Color":
  - option "red"
  - option "blue" [selected]
- textbox @e5 "Say [ref=e99]": x y
- generic @e6: clickable
- iframe:
  - button @e7 "In frame"
  - paragraph: ft
- table "T":
  - row:
    - cell "1"
    - cell"""


def test_the_compact_form_keeps_what_can_be_read_and_used() -> None:
    assert render(PAGE, Refs(), full=False) == (COMPACT, 7)


def test_the_full_form_keeps_everything() -> None:
    text, count = render(PAGE, Refs(), full=True)
    assert count == PAGE.count("[ref=") - 1 == text.count(" @e")
    assert len(text.splitlines()) == len(PAGE.splitlines())
    assert '      - listitem @e4:\n        - link @e5 "Home":\n          - /url: /a' in text


def test_refs_lead_back_and_stay_the_same() -> None:
    refs = Refs()
    first, _ = render(PAGE, refs, full=False)
    assert refs.name("@e7") == refs.name("e7") == refs.name(" @e7 ") == "f1e2"
    assert render(PAGE, refs, full=False)[0] == first
    moved, _ = render('- button "New" [ref=f2e2]', refs, full=False)
    assert moved == '- button @e8 "New"'
    for wrong in ("7", "@7", "e0", "@e9", "@f1e2", "@e", "#id", "", "@e7x", "e" + "9" * 30):
        with pytest.raises(ValueError, match=r"@e\d"):
            refs.name(wrong)


def test_a_long_page_is_cut_at_a_line_and_says_so() -> None:
    page = "\n".join(f'- button "Number {n}" [ref=e{n}]' for n in range(5000))
    text, count = render(page, Refs(), full=False)
    *lines, last = text.splitlines()
    assert COMPACT_LIMIT < len(text) < COMPACT_LIMIT + 200
    assert last == f"- … {5000 - len(lines)} more lines; browser_snapshot with full=true shows everything"
    assert count == len(lines)
    wide, _ = render('- button "' + "x" * 9000 + '" [ref=e1]: ' + "y" * 9000, Refs(), full=False)
    assert len(wide) < 700 and wide.startswith('- button @e1 "xxx')


NODES = st.recursive(
    st.tuples(
        st.sampled_from([*sorted(INTERACTIVE), "generic", "paragraph", "heading", "text", "/url", "odd-role"]),
        st.text(st.characters(exclude_characters='"\\\n\r\0', exclude_categories=("Cs", "Cc"))),
        st.booleans(),
        st.just(()),
    ),
    lambda inner: st.tuples(st.just("generic"), st.just(""), st.booleans(), st.lists(inner, max_size=4).map(tuple)),
    max_leaves=12,
)


@given(st.lists(NODES, max_size=5), st.booleans())
def test_any_tree_is_rendered_with_true_refs(nodes: list[object], full: bool) -> None:
    names: list[str] = []

    def lines(node: object, depth: int) -> list[str]:
        role, name, has_ref, children = node  # type: ignore[misc]
        ref = f" [ref=e{len(names) + 1}]" if has_ref and role not in ("text", "/url") else ""
        if ref:
            names.append(f"e{len(names) + 1}")
        label = f' "{name}"' if name else ""
        return [
            "  " * depth + f"- {role}{label}{ref}" + (":" if children else ""),
            *(line for child in children for line in lines(child, depth + 1)),
        ]

    snapshot = "\n".join(line for node in nodes for line in lines(node, 0))
    refs = Refs()
    text, count = render(snapshot, refs, full=full)
    shown = re.findall(r"^ *- [\w-]+ (@e\d+)", text, re.MULTILINE)
    assert count == len(shown) == len(set(shown))
    assert {refs.name(ref) for ref in shown} <= set(names)
    if full:
        assert len(shown) == len(names)


@given(st.text())
def test_no_text_breaks_it(text: str) -> None:
    for full in (False, True):
        render(text, Refs(), full=full)
        render(f"- {text}", Refs(), full=full)
