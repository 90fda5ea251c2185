"""Delivers the records of compiles to people and programs.

For people there are the report (:mod:`~composer.telemetry.report`), warnings
(:mod:`~composer.telemetry.notices`), the meaning of reason codes
(:mod:`~composer.telemetry.reasons`), and an HTML page (:mod:`~composer.telemetry.html`).

For programs, sinks receive each record (:mod:`~composer.telemetry.sinks`; their interface is in
:mod:`~composer.telemetry.base`). :mod:`~composer.telemetry.reader` reads files of records.
:mod:`~composer.telemetry.progress` says what is being compiled now.
"""
