"""How the record reaches a person: the report that is printed, the log, the warnings."""
