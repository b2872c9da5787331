"""What the server takes from a site, what a site takes from the server, and what a site keeps back."""
