"""Figures of the README and of the site, drawn by the library itself."""
