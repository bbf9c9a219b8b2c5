"""Which texts can be written down at all.

Owns: the one question. Does not know: what a text is for.
"""


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold it: a lone surrogate, half of a character, it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
