"""Drawings of nets as text: where nodes stand (`layers.py`), which are drawn as one (`modules.py`), and small pictures
and tables for notebooks (`pictures.py`). Pages that one can zoom and search are in `dagexec/report`.
"""
