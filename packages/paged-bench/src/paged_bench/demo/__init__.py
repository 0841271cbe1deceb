"""Real text decoded through the page authority and paged attention."""
