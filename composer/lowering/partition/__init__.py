"""Cuts a graph into regions that an engine takes, and calls that torch runs."""
