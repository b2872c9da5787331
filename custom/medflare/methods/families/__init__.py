"""Families of methods: each package has a table of `Method` rows in its `__init__`, and their
algorithms beside it.
"""
