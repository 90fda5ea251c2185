"""What stands on the HTML report: each part worked out as plain values, and the files it is laid
out by (``report.html.j2`` and the style and script that go into it)."""
