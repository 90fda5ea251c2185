"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="For a program to read.")]
Remember = Annotated[
    bool, typer.Option("--remember/--no-remember", help="Keep verdicts for later processes.")
]
PolicyFile = Annotated[Path | None, typer.Option("--policy", help="Sets COMPOSER_CONFIG.")]
