"""Planted bugs: mistakes in synchronization, what each can be seen in, and which tool finds it.

`bug` says what one is and plants it, the modules of families have them, and `catalog` has all. What shows them is in
`scenes`. `shell` and `engine_bugs` have what threads and machine code may do against the machine of runs. `plans` makes
bugs of another kind by the thousand: plans of real nets that lack one wait, record, mutex or dependency each.
"""
