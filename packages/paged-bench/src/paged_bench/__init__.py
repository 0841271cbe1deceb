"""The demo and the measurements of the paged-attention packages."""
