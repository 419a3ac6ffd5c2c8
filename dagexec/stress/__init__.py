"""Stress: random nets under random workers, streams, callers, cancellations and faults, compared with SimpleNet.

A case follows from one seed alone (`case`), and so does its net (`nets`). `runner` runs it and raises when a result
differs, an error is not a documented one, or a resource is lost; `report` counts what was tried. Importing this package
registers an operator that fails when told to (`operators`).
"""
