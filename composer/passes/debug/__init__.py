"""To see what passes do, and to find what one does wrong."""
