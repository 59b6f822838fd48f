"""Generated parts of documents, between marks."""

from __future__ import annotations

_END = "<!-- end -->"


def insert(page: str, name: str, text: str) -> str:
    """`page` with the part `name` put in place of the one it has, or at its end.

    >>> insert("# Speed\\n", "a", "new")
    '# Speed\\n\\n<!-- a -->\\nnew\\n<!-- end -->\\n'
    >>> insert("<!-- a -->\\nold\\n<!-- end -->\\nrest\\n", "a", "new")
    '<!-- a -->\\nnew\\n<!-- end -->\\nrest\\n'
    """
    begin = f"<!-- {name} -->"
    block = f"{begin}\n{text.rstrip()}\n{_END}"
    before, found, rest = page.partition(begin)
    if not found:
        return f"{page.rstrip()}\n\n{block}\n"
    return before + block + rest.partition(_END)[2]
