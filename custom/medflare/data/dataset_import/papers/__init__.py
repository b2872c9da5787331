"""The data of the papers: a file for each, which says what is downloaded and how it becomes sites; `preparing` does the rest."""
