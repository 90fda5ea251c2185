"""How the record of a compile reaches whoever wants to read it.

A person reads the report (:mod:`~composer.telemetry.report`), the warnings
(:mod:`~composer.telemetry.notices`), what a reason code means (:mod:`~composer.telemetry.reasons`)
and a page for the browser (:mod:`~composer.telemetry.html`). A program is sent each record by the
sinks that are on (:mod:`~composer.telemetry.sinks`; :mod:`~composer.telemetry.base` says what one
is), and reads files of records back by :mod:`~composer.telemetry.reader`. What is compiled right
now is in :mod:`~composer.telemetry.progress`.
"""
