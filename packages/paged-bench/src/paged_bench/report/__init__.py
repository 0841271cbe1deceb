"""Records as pictures: static SVG and HTML, the same bytes for the same records."""
