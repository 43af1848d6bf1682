"""Which rows of a table hold what somebody typed."""


def matching(table, columns, text):
    """Return the rows in which each word of `text` stands somewhere in these columns, as text; capitals do not matter."""
    part = table[columns].fillna("").astype(str)
    lines = part.agg(" ".join, axis=1).str.lower()
    for word in text.lower().split():
        lines = lines[lines.str.contains(word, regex=False)]
    return part.loc[lines.index]
