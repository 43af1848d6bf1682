"""Which rows of a table hold what somebody typed."""


def matching(table, columns, text):
    """Return the rows in which each word of `text` stands somewhere in these columns, as text; capitals do not matter."""
    part = table[columns].astype(object).where(table[columns].notna(), "").astype(str)
    lines = [" ".join(row).lower() for row in part.itertuples(index=False)]
    return part[[all(word in line for word in text.lower().split()) for line in lines]]
