"""Operating a run from outside: what state it is in, stopping it, finding out what went wrong. Imports no torch."""
