"""The parts of generated pages that README shows, copied into it. python -m docs.front

GitHub shows README as it is, so what the site includes has to stand in it. A part begins with
`<!-- from PAGE: PART -->` and ends with `<!-- end -->`. In PAGE it stands between the marks of pymdownx.snippets, as
for the site. tests/test_front.py says if README is behind.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
COPY = re.compile(r"(<!-- from (\S+): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def part(page: str, name: str) -> str:
    """What stands between the marks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(rf"\[start:{name}\] -->\n(.*?)<!-- --8<-- \[end:{name}\]", text, re.DOTALL)
    if found is None:
        raise ValueError(f"docs.front: {page} has no part {name!r}")
    return found[1]


def filled(text: str) -> str:
    """The text with each part as its page has it now."""
    return COPY.sub(lambda m: m[1] + part(m[2], m[3]) + m[4], text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
