"""The report of an analysis: the numbers, the words for them, the pictures, one page."""
