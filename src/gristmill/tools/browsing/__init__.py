"""The browser behind the ten tools of `tools/browser.py`, read from the outside in:
`pages` (one session) → `host` (one worker) → `chromium` (the process) and `proxy` (its only network) → `relay` (into a
sandbox); beside them `snapshot` (a page as text) and `downloads`.
"""


class PageError(Exception):
    """Something that the model should read: a sentence that says what is wrong and, where there is one, the way out."""
