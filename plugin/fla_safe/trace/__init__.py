"""File-operation accounting for any training command: who touches which file, why, when, and from where in the code.

`fla-safe trace -- COMMAND` sets `FLA_SAFE_TRACE`; `record` then runs inside every Python process that imports torch, on
the standard library alone; `report` merges what the processes wrote. Beside the floors: none of them imports it.
"""

__all__: list[str] = []
