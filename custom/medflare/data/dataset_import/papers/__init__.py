"""The data of the papers: `catalogue` says what is downloaded and how it becomes images of sites; `preparing` does the rest."""
