"""One paper's recipe each."""
