"""Which calls of a graph an engine takes, in which regions, and what stays with torch."""
