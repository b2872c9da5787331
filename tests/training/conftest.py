"""The small sites on disk of `pictures`, as fixtures."""

from helpers.picture_sites import edit, forget_decoded_sites, make_site, make_task

__all__ = ["edit", "forget_decoded_sites", "make_site", "make_task"]
