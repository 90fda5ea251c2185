"""``composer reasons``: what a reason code means, and what to do."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table

from composer.cli.usage import USAGE, Json, fail
from composer.records import Reason
from composer.registry import did_you_mean
from composer.telemetry.reasons import explained


def reasons(
    code: Annotated[str, typer.Argument(help="Such as low_coverage; all of them without.")] = "",
    as_json: Json = False,
) -> None:
    """Say what the reason codes of attempts mean, how to see more, and what to do."""
    if code and code not in list(Reason):
        close = did_you_mean(code, map(str, Reason))
        fail(f"unknown reason {code!r}{close}", USAGE)
    if as_json:
        rows = {each: {"code": each.value, **asdict(explained(each))} for each in Reason}
        shown = rows[Reason(code)] if code else list(rows.values())
        typer.echo(json.dumps(shown, indent=2))
    elif code:
        each = explained(Reason(code))
        text = f"**Means.** {each.means}\n\n**See more.** {each.see_more}\n\n**Do.** {each.do}"
        Console().print(Markdown(f"# {code}\n\n{text}"))
    else:
        table = Table("code", "what it means")
        for reason in Reason:
            table.add_row(reason.value, escape(explained(reason).summary))
        Console().print(table)
