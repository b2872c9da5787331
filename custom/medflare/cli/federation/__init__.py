"""Commands of federations under FLARE: their jobs, and what a site does day by day."""
