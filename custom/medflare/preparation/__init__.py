"""What happens before a federation: import of folders and tables, data of papers, checks,
fingerprints, proposed tasks.
"""
