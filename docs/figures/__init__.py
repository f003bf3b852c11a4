"""Scripts that draw the figures of the README and of the site with the library itself."""
