"""The parts of the HTML report: the values that each part shows, and their templates."""
