"""A party's startup kit, day by day: set up, checked, started, watched, cleaned. It knows FLARE's files and processes, not its code."""
