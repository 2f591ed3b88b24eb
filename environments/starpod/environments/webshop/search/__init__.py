"""Text as search and the reward see it: words, terms, nouns, and an index ranked by BM25."""
