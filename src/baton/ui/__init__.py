"""What a person looks at: the report of a run as one page."""
