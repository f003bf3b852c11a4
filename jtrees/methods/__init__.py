"""One paper a file: the method for :func:`jtrees.train`, and its whole procedure as a recipe; what papers share
beside.
"""
