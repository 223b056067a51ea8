"""Whether every token of a decoder is right, while hand-overs fail, and while both legs of a request run at once."""
