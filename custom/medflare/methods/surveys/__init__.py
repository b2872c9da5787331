"""Methods that train nothing: they query the sites."""
