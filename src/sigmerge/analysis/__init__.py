"""What came out of a run, for people: paired tables, figures and the page."""
