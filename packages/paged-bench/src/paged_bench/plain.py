"""Text of a record or of a machine, made safe to show."""


def plain(text: str) -> str:
    """Return the text without what a terminal would obey or a document may not hold.

    Example:
        >>> plain("a case" + chr(27) + "[2J")
        'a case?[2J'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)
