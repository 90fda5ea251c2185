"""The disk cache, the background thread, and warnings that are given once."""
