"""The data of the papers.

`catalogue` says what is downloaded and how it becomes images of sites; `splits` draws or reads the
splits, and `preparing` does the rest.
"""
