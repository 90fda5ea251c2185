"""Tools that show what passes do, and find what a pass does wrong."""
