"""The parts of the HTML report: the values each shows, and the templates that lay them out."""
