"""``python -m composer``: the command ``composer`` of this Python."""

from __future__ import annotations

from composer.cli import app

if __name__ == "__main__":
    app(prog_name="composer")
