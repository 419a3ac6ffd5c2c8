"""The laboratory: task graphs of any origin as nets whose operators do made work, run and judged by measures.

`graph` says what a task graph is; `patterns`, `random_wired`, `stg` and `wfformat` make or read some, and `suites`
gives them names. `kernels` is the work, `nets` the operator that does it, `running` runs and measures, `metg` finds the
smallest task worth its cost, `adversary` graphs on which policies lose. What is compared on neural nets
is in `dagexec.analysis`.
"""
